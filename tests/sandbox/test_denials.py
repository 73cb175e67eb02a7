"""Test that what the sandbox denies is reported in one line, with the option that allows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.case_id import parse_case_id
from conformance import cli
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.implementation_registry import ImplementationNotFound
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sandbox import confinement, denials, sandboxed_executor
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.policy import build_policy
from reports import records

CASE = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/normal/s0"
RIGHT = Path(__file__).parent.parent / "exploits" / "right.py"
READS = """
from pathlib import Path
from jax.nn import dot_product_attention

def attention(q, k, v):
    Path({path!r}).read_text()
    return dot_product_attention(q, k, v)
"""


@pytest.fixture
def confined() -> None:
    """Skip where the system has no sandbox."""
    found = KernelOptions().find(f"{RIGHT}:attention")
    sentence = sandboxed_executor.create_executor(found).isolation
    sandboxed_executor.end_process(found)
    if not confinement.is_confined(sentence):
        pytest.skip(sentence)


@pytest.mark.usefixtures("confined")
def test_an_import_that_is_denied_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("library", "kernels"):
        (tmp_path / folder).mkdir()
    (tmp_path / "library" / "shared_ops.py").write_text("from jax.nn import dot_product_attention as attention\n")
    (tmp_path / "kernels" / "flash.py").write_text("from shared_ops import attention\n")
    monkeypatch.chdir(tmp_path / "library")
    name = f"{tmp_path}/kernels/flash.py:attention"
    with pytest.raises(ImplementationNotFound) as raised:
        KernelOptions().find(name)
    assert "shared_ops" in str(raised.value)
    assert f"--sandbox-read={tmp_path / 'library'}" in str(raised.value)
    assert "\n" not in str(raised.value)
    allowed = KernelOptions(sandbox=build_policy([str(tmp_path / "library")], [], []))
    sandboxed_executor.end_process(allowed.find(name))


@pytest.mark.usefixtures("confined")
def test_a_file_that_is_denied_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "blocks.txt").write_text("128")
    (tmp_path / "kernels").mkdir()
    kernel = tmp_path / "kernels" / "flash.py"
    kernel.write_text(READS.format(path=str(tmp_path / "tables" / "blocks.txt")))
    name = f"{kernel}:attention"
    for options, verdict in (
        (KernelOptions(), records.ERROR),
        (KernelOptions(sandbox=build_policy([str(tmp_path / "tables")], [], [])), records.PASS),
    ):
        found = options.find(name)
        (record,) = Runner(Settings()).run([Job(found, parse_case_id(CASE), (CHECKS_BY_NAME["forward"],))])
        sandboxed_executor.end_process(found)
        assert record.verdict == verdict
        assert (f"--sandbox-read={tmp_path / 'tables'}" in record.reason) == (verdict == records.ERROR)


@pytest.mark.usefixtures("confined")
def test_a_dot_file_in_a_named_folder_must_be_named_itself(tmp_path: Path) -> None:
    secret = tmp_path / "tables" / "deep" / ".env"
    secret.parent.mkdir(parents=True)
    secret.write_text("128")
    (tmp_path / "kernels").mkdir()
    kernel = tmp_path / "kernels" / "flash.py"
    kernel.write_text(READS.format(path=str(secret)))
    for named, verdict in ((tmp_path / "tables", records.ERROR), (secret, records.PASS)):
        found = KernelOptions(sandbox=build_policy([str(named)], [], [])).find(f"{kernel}:attention")
        (record,) = Runner(Settings()).run([Job(found, parse_case_id(CASE), (CHECKS_BY_NAME["forward"],))])
        sandboxed_executor.end_process(found)
        assert record.verdict == verdict
        assert (f"--sandbox-read={secret} " in record.reason) == (verdict == records.ERROR)


def test_errors_of_the_kernel_itself_name_no_option() -> None:
    assert denials.explain_denial("no_such_module_anywhere", is_permission_error=False) == ""
    assert denials.explain_denial("", is_permission_error=False) == ""


def test_a_sandbox_that_is_required_and_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "is_confined", lambda sentence: False)
    with pytest.raises(ImplementationNotFound, match="--require-sandbox"):
        KernelOptions(require_sandbox=True).find(f"{RIGHT}:attention")
    with pytest.raises(ImplementationNotFound, match="--in-process"):
        KernelOptions(in_process=True, require_sandbox=True).find(f"{RIGHT}:attention")


def test_the_headline_says_that_there_was_no_sandbox(capsys: pytest.CaptureFixture[str]) -> None:
    what = ["run", f"--impl={RIGHT}:attention", f"--case={CASE}", "--check=forward"]
    assert cli.main(cli.build_parser().parse_args([*what, "--in-process"])) == 0
    assert "judged without a sandbox." in " ".join(capsys.readouterr().out.split())


def test_a_path_that_is_not_there_cannot_be_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    what = ["run", f"--impl={RIGHT}:attention", f"--case={CASE}", "--sandbox-read=/no/such/folder"]
    assert cli.main(cli.build_parser().parse_args(what)) == 2
    assert "--sandbox-read=/no/such/folder" in capsys.readouterr().err
