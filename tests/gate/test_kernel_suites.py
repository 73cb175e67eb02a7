"""Test `conformance_tests` as a kernel author uses it, in a test file of their own repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.testing import conformance_tests
from reports import records
from reports.records import read_runs
from tests.gate.gate_repository import NO_PROBES, GateRun, Repository

TEST_FILE = """
import pytest
from conformance.testing import conformance_tests
from tests.kernels import naive


def attention(q, k, v, *, causal=False, soft_cap=None):
    return naive.attention(q, k, v, causal=causal, soft_cap=soft_cap)


def capped_wrong(q, k, v, *, causal=False, soft_cap=None):
    soft_cap = soft_cap and 1.05 * soft_cap
    return naive.attention(q, k, v, causal=causal, soft_cap=soft_cap)


few = dict(cases="train/f32/*.T1.*.H64.*", checks="forward", behind_mask="finite")
test_right = conformance_tests(attention, **few)
test_wrong = conformance_tests(capped_wrong, **few)


def test_beside():
    pass
"""
CLOSURE = """
from conformance.testing import conformance_tests
from tests.kernels import naive

factor = 1.01


def build(times):
    def kernel(q, k, v, *, causal=False):
        return times * naive.attention(q, k, v, causal=causal)
    return kernel


few = dict(cases="train/f32/*.T1.*", checks="forward", behind_mask="finite")
test_closure = conformance_tests(build(factor), name="scaled", **few)
test_lambda = conformance_tests(lambda q, k, v: naive.attention(q, k, v), **few)


class TestKernel:
    test_named = staticmethod(conformance_tests("kernel:attention", cases=few["cases"], checks="forward"))
"""
KERNEL = """
from conformance import declare
from tests.kernels import naive

@declare(behind_mask="finite")
def attention(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_mine.py").write_text(TEST_FILE)
    return Repository(tmp_path)


def run_tests(repository: Repository, *arguments: str) -> GateRun:
    return repository.pytest("-p", "cacheprovider", *NO_PROBES, *arguments)


def list_tests(result: GateRun) -> list[str]:
    return [line for line in result.stdout.lines if line.startswith("test_mine.py::")]


def test_a_kernel_is_judged_by_ordinary_tests_and_ids_can_be_pasted(repository: Repository) -> None:
    result = run_tests(repository)
    assert result.ret == 1
    failed = result.list_failed()
    assert failed
    assert all(test.startswith("test_mine.py::test_wrong[") and "softcap" in test for test in failed)
    assert re.search(r"\d+ failed, \d+ passed", result.stdout.lines[-1])
    result.stdout.fnmatch_lines(["test_mine:capped_wrong (cpu): forward out fail", "  worst      at *"])
    result.stdout.fnmatch_lines(["*test_mine:capped_wrong (cpu)*", "test_mine:attention (cpu) passes as far as *"])
    command = next(line for line in result.stdout.lines if line.startswith("  reproduce"))
    assert command == f"  reproduce  python -m pytest '{failed[0]}' -k forward"
    # A pasted id runs that test alone.
    pasted = run_tests(repository, failed[0])
    assert pasted.list_failed() == failed[:1]
    assert re.search(r"= 1 failed(, \d+ warnings?)? in", pasted.stdout.lines[-1])
    last = run_tests(repository, "--lf", "--collect-only", "-q")
    assert list_tests(last) == failed


def test_the_id_of_any_case_can_be_pasted(repository: Repository) -> None:
    case = "train/f32/B1.T3.S5.N2.K2.H16.V16/causal/normal/s7"
    result = run_tests(repository, f"test_mine.py::test_right[{case}]", "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"test_mine.py::test_right[[]{case}[]] PASSED*"])


def test_tests_are_selected_by_case_and_by_check(repository: Repository) -> None:
    everything = list_tests(run_tests(repository, "--collect-only", "-q"))
    capped = list_tests(run_tests(repository, "--collect-only", "-q", "-k", "right and softcap"))
    assert capped == [test for test in everything if "test_right" in test and "softcap" in test]
    kept = list_tests(run_tests(repository, "--collect-only", "-q", "--deselect", capped[0]))
    assert kept == [test for test in everything if test != capped[0]]
    by_check = run_tests(repository, "-k", "forward and right", "--conformance-json=r.jsonl")
    assert by_check.ret == 0
    (recorded,) = read_runs(repository.path / "r.jsonl")
    assert recorded.run is not None
    assert len(recorded.done) == len(recorded.run.jobs)  # what was deselected is not missing
    by_check.stdout.fnmatch_lines(["*passes as far as checked (narrowed to * -k 'forward and right'*"])


def test_editors_find_a_test_at_the_line_that_asks_for_it(repository: Repository) -> None:
    line = TEST_FILE.splitlines().index("test_right = conformance_tests(attention, **few)") + 1
    (repository.path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n    print(sorted({item.location[:2] for item in items}))\n"
    )
    result = run_tests(repository, "--collect-only", "-q", "-s", "-k", "right")
    assert f"('test_mine.py', {line - 1})" in result.stdout.str()


@pytest.mark.long
def test_workers_collect_the_same_tests_and_one_report_covers_all_kernels(repository: Repository) -> None:
    result = run_tests(repository, "-n", "2", "--conformance-report=r.html", "-v")
    assert result.ret == 1
    assert "Different tests were collected" not in result.stdout.str()
    found = read_runs(repository.path / "r.jsonl")
    assert [list(one.run.kernels) for one in found if one.run] == [["test_mine:attention"], ["test_mine:capped_wrong"]]
    assert all(one.is_complete and one.run and len(one.done) == len(one.run.jobs) for one in found)
    page = (repository.path / "r.html").read_text()
    assert "test_mine:attention" in page
    assert "test_mine:capped_wrong" in page
    result.stdout.fnmatch_lines(["*test_mine:capped_wrong (cpu) does not conform*"])
    alone = run_tests(repository, "--conformance-json=alone.jsonl")
    assert {line for line in alone.stdout.lines if line.startswith("✗")} == {
        line for line in result.stdout.lines if line.startswith("✗")
    }
    assert sorted(alone.list_failed()) == sorted(result.list_failed())


@pytest.mark.long
def test_closures_lambdas_and_names_are_judged_in_functions_and_classes(repository: Repository) -> None:
    (repository.path / "kernel.py").write_text(KERNEL)
    (repository.path / "test_mine.py").write_text(CLOSURE)
    result = run_tests(repository)
    failed = result.list_failed()
    assert failed
    assert all(test.startswith("test_mine.py::test_closure[") for test in failed)
    result.stdout.fnmatch_lines(["scaled (cpu): forward out fail"])
    named = run_tests(repository, "-k", "named", "-v")
    assert named.ret == 0
    result.stdout.fnmatch_lines(["*kernel:attention (cpu) passes as far as checked*"])


@pytest.mark.long
def test_a_kernel_with_sandbox_is_not_loaded_by_pytest(repository: Repository) -> None:
    (repository.path / "kernel.py").write_text(
        f"{KERNEL}\nimport sys\nif 'pytest' in sys.modules:\n    open('loaded', 'w').close()\n"
    )
    (repository.path / "test_mine.py").write_text(
        "from conformance.testing import conformance_tests\n"
        "test_it = conformance_tests('kernel:attention', sandbox=True, cases='train/f32/*.T1.*', checks='forward')\n"
    )
    result = run_tests(repository)
    assert result.ret == 0, result.stdout.str()
    assert not (repository.path / "loaded").exists()


SANDBOXED = """
from conformance.testing import conformance_tests
from tests.kernels import naive

def attention(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)


def build(times):
    return lambda q, k, v: times * naive.attention(q, k, v)


few = dict(cases="train/f32/*.T1.*", checks="forward", behind_mask="finite", sandbox=True)
test_function = conformance_tests(attention, **few)
test_closure = conformance_tests(build(1.01), **few)
"""


@pytest.mark.long
@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_functions_and_closures_with_declarations_are_judged_in_a_sandbox(repository: Repository, mode: str) -> None:
    (repository.path / "test_mine.py").write_text(SANDBOXED)
    result = run_tests(repository, f"--import-mode={mode}", "--conformance-json=r.jsonl")
    failed = result.list_failed()
    assert failed
    assert all(test.startswith("test_mine.py::test_closure[") for test in failed)
    runs_of_both = [one.run for one in read_runs(repository.path / "r.jsonl") if one.run is not None]
    assert [list(run.kernels) for run in runs_of_both] == [
        ["test_mine:attention"],
        ["test_mine:build.<locals>.<lambda>"],
    ]
    for run in runs_of_both:
        (kernel,) = run.kernels.values()
        assert kernel.declared["behind_mask"] == "finite"
        assert "judge's own process" not in kernel.place


def test_what_cannot_be_sent_to_a_sandbox_is_one_line_of_a_collection_error(repository: Repository) -> None:
    (repository.path / "test_mine.py").write_text(
        "import threading\nfrom conformance.testing import conformance_tests\nlock = threading.Lock()\n"
        "def build(lock):\n    return lambda q, k, v: lock and q\n"
        "test_it = conformance_tests(build(lock), sandbox=True)\n"
    )
    result = run_tests(repository)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["test_it: *closure variable 'lock'*"])
    assert "Traceback" not in result.stdout.str()


WRONG_GRADIENT = """
import jax
from conformance.testing import conformance_tests
from tests.kernels import naive


@jax.custom_vjp
def half(x):
    return x


half.defvjp(lambda x: (x, None), lambda _, dx: (dx / 2,))


def attention(q, k, v):
    return naive.attention(q, k, half(v))


test_it = conformance_tests(
    attention, cases="train/f32/*.T1.*", checks=["forward", "gradients"], behind_mask="finite"
)
"""
EXPECTED = """
[[tool.attention_conformance.expected_failures]]
implementation = "test_mine:attention"
check = ["gradients"]
reason = "known since May"
some = true
"""


def test_a_test_with_expected_failures_and_passes_is_an_xfail(repository: Repository) -> None:
    repository.settings(EXPECTED)
    (repository.path / "test_mine.py").write_text(WRONG_GRADIENT)
    result = run_tests(repository, "-rx", "--conformance-json=r.jsonl")
    found = records.read_jsonl(repository.path / "r.jsonl")
    verdicts = {record.verdict for record in found}
    assert records.EXPECTED_FAIL in verdicts
    assert records.PASS in verdicts
    assert result.ret == 0, result.stdout.str()
    assert re.search(r"\d+ xfailed", result.stdout.lines[-1])
    assert "passed" not in result.stdout.lines[-1]
    result.stdout.fnmatch_lines(["XFAIL test_mine.py::test_it*known since May*other judgements pass*"])


def test_what_is_unsupported_is_skipped_and_a_kernel_without_a_judgement_is_red(repository: Repository) -> None:
    (repository.path / "test_mine.py").write_text(
        "from conformance.testing import conformance_tests\n"
        "def attention(q, k, v):\n    raise NotImplementedError('not today')\n"
        "test_it = conformance_tests(attention, cases='train/f32/*.T1.*', checks='forward')\n"
    )
    result = run_tests(repository, "-ra")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["SKIPPED [[]*[]] test_mine.py:4: *not today*"])
    result.stdout.fnmatch_lines(["FAILED test_mine.py::something_is_judged - nothing was judged*"])


def test_a_kernel_that_cannot_be_judged_is_one_line_of_a_collection_error(repository: Repository) -> None:
    (repository.path / "test_mine.py").write_text(
        "from conformance.testing import conformance_tests\ntest_it = conformance_tests(lambda q: q)\n"
    )
    result = run_tests(repository)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["test_it: *does not take q, k, v*"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"level": "fast"}, ValueError, "level.*'quick'.*'fast'"),
        ({"checks": "fordward"}, ValueError, "checks.*'fordward'.*'forward'"),
        ({"seeds": -1}, ValueError, "seed.*-1"),
        ({"product": "tf32"}, TypeError, "'product'.*'products'"),
        ({"products": "f8"}, ValueError, "products.*'f8'"),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_written(
    arguments: dict[str, object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        conformance_tests(lambda q, k, v: q, **arguments)  # type: ignore[arg-type] # they are wrong


def test_declarations_of_a_name_are_refused() -> None:
    with pytest.raises(TypeError, match=r"products: .*function"):
        conformance_tests("kernel:attention", products="tf32")
