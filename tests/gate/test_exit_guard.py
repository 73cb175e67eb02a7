"""Test that a run of the gate on a wrong kernel never ends in success, whatever a `conftest.py` does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gate.gate_repository import FEW_CASES, Repository, create_repository, run_gate

ONE = "--conformance-cases=train/f32/B1.T1.S72.N2.K1.H16.V48/full/*"
LEAVES = "import os\nos._exit(0)\n"
LEAVES_POLITELY = "raise SystemExit(0)\n"
LEAVES_LAST = "import os\ndef pytest_unconfigure():\n    os._exit(0)\n"
SAYS_SUCCESS = "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n"
LEAVES_POLITELY_LAST = "def pytest_unconfigure():\n    raise SystemExit(0)\n"
STOPS = """
import pytest
class Stops:
    def pytest_runtest_logfinish(self):
        pytest.exit("enough", returncode=0)
def pytest_configure(config):
    config.pluginmanager.register(Stops())
"""
ENDS_AS_IT_ENDED = "import os\ndef pytest_sessionfinish(session, exitstatus):\n    os._exit(exitstatus)\n"
EXPECTS_FAILURES = (
    "import pytest\ndef pytest_collection_modifyitems(items):\n"
    "    for item in items:\n        item.add_marker(pytest.mark.xfail)\n"
)
# Every judgement passes; only the verdict of a record says that it is red.
JUDGES_BY_ITSELF = """
def pytest_collection_finish(session):
    import msgspec
    from conformance.judging import runner
    judge = runner.Runner.judge
    def kindly(*given, **named):
        found = judge(*given, **named)
        return [msgspec.structs.replace(record, verdict="pass", ratio=None, rms=None) for record in found]
    runner.Runner.judge = kindly
"""
LEAVES_OUT = "def pytest_collection_modifyitems(items):\n    del items[-1]\n"
# Hooks for tests in a `conftest.py` that is not above the gate's module are called only if it is a plugin too.
_AS_A_PLUGIN = """
import pytest
class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        lines = getattr(report, "attention_conformance_records", None)
        if lines is not None:
            {}
def pytest_configure(config):
    config.pluginmanager.register(Plugin())
"""
KEEPS_BACK = _AS_A_PLUGIN.format(
    "if not hasattr(Plugin, 'one'): Plugin.one = lines; del report.attention_conformance_records"
)
SAYS_PASS = _AS_A_PLUGIN.format("""lines[:] = [line.replace('"fail"', '"pass"') for line in lines]""")
SWITCHES_JIT_OFF = "import os\nos.environ['JAX_DISABLE_JIT'] = '1'\n"


@pytest.mark.parametrize(
    ("conftest", "code", "said"),
    [
        pytest.param(LEAVES, 2, "os._exit(0) ends with 2", id="leaves"),
        pytest.param(LEAVES_POLITELY, 4, "a conftest.py ended the process", id="leaves politely"),
        pytest.param(LEAVES_LAST, 1, "os._exit(0) ends with 1", id="leaves last", marks=pytest.mark.long),
        pytest.param(LEAVES_POLITELY_LAST, 1, "", id="leaves politely last", marks=pytest.mark.long),
        pytest.param(JUDGES_BY_ITSELF, 2, "replaced conformance.judging.runner.Runner.judge", id="judges by itself"),
        pytest.param(SAYS_PASS, 2, "", id="says pass"),
        pytest.param(SWITCHES_JIT_OFF, 4, "JAX_DISABLE_JIT is set", id="switches jit off"),
        pytest.param(SAYS_SUCCESS, 1, "pytest ends in success", id="says success"),
        pytest.param(EXPECTS_FAILURES, 1, "pytest ends in success", id="expects failures", marks=pytest.mark.long),
    ],
)
def test_a_wrong_kernel_is_no_success(
    conftest: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository: Repository = create_repository(tmp_path, monkeypatch)
    (tmp_path / "conftest.py").write_text(conftest)
    run = run_gate(repository, ONE, name="wrong")
    assert run.ret == code
    assert not said or any(said in line for line in run.errlines)


@pytest.mark.parametrize(
    ("conftest", "code", "line"),
    [
        pytest.param(
            LEAVES_OUT, 1, "*jobs were planned and not judged, and no argument asks for that: *", id="leaves out"
        ),
        pytest.param(KEEPS_BACK, 2, "*jobs have no records, such as *", id="keeps back", marks=pytest.mark.long),
    ],
)
def test_a_right_kernel_of_which_something_was_not_asked_is_no_success(
    conftest: str, code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository: Repository = create_repository(tmp_path, monkeypatch)
    (tmp_path / "conftest.py").write_text(conftest)
    run = run_gate(repository, FEW_CASES)
    assert run.ret == code, run.stdout.str()
    run.stdout.fnmatch_lines([line])
    run.stdout.fnmatch_lines(["kernel.py:attention (cpu) passes *"])


def test_a_file_that_python_loads_by_itself_ends_the_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository: Repository = create_repository(tmp_path, monkeypatch)
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os._exit, 0)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    run = run_gate(repository, ONE, name="wrong", from_nothing=True)
    assert run.ret == 2
    assert any("sitecustomize.py is loaded into the process that judges" in line for line in run.errlines)


@pytest.mark.long
@pytest.mark.parametrize("conftest", [LEAVES_LAST, ENDS_AS_IT_ENDED], ids=["leaves last", "ends as it ended"])
def test_a_right_kernel_is_a_success(conftest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository: Repository = create_repository(tmp_path, monkeypatch)
    (tmp_path / "conftest.py").write_text(conftest)
    assert run_gate(repository, ONE).ret == 0


@pytest.mark.long
def test_a_run_that_was_stopped_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository: Repository = create_repository(tmp_path, monkeypatch)
    (tmp_path / "conftest.py").write_text(STOPS)
    run = run_gate(repository, "--conformance-cases=train/f32/B1.T1.S72.*")
    assert run.ret == 2
    assert any("was stopped: enough" in line for line in run.errlines)


def test_other_runs_may_end_as_they_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository: Repository = create_repository(tmp_path, monkeypatch)
    (tmp_path / "conftest.py").write_text(LEAVES)
    assert repository.pytest(str(tmp_path)).ret == 0
