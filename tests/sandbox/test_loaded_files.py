"""Test that what a kernel's process reads is recorded by digest, and that byte code is not loaded."""

from __future__ import annotations

import dataclasses
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cases.case import Case
from cases.operand_values import draw_problem
from conformance.execution import installed_packages
from conformance.execution.implementation_registry import ImplementationNotFound
from conformance.judging import provenance
from conformance.judging.journal import ResumeMismatchError, load_resumed_run
from conformance.judging.run_plan import Plan
from conformance.judging.runner import build_changed_file_records
from conformance.sandbox import kernel_process, loaded_files, sandboxed_executor
from conformance.sandbox.kernel_process import Limits, ProcessLost
from conformance.sandbox.sandboxed_executor import SandboxedExecutor
from impls.contract.implementation import Implementation
from reports.records import ERROR, PASS, Record, Run, read_runs, serialize_run
from tests.process_helpers import COMMAND_TIMEOUT

CASE = Case(q_length=16, kv_length=16, head_dim=16, v_head_dim=16)
KERNEL = """
from pathlib import Path
HERE = Path(__file__).parent
{}

def attention(q, k, v):
    return q * VALUE
"""
READS_IN_A_CALL = KERNEL.format("").replace("q * VALUE", "q * float((HERE / 'value').read_text())")
COMPILER = shutil.which("cc")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a new folder, and end all processes of kernels after the test."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    kernel_process.end_all_processes()


def load_kernel(first: str = "") -> Implementation:
    limits = Limits(timeout=60.0, memory=4 * 2**30)
    return sandboxed_executor.load_sandboxed("kernel.py:attention", None, limits, first_handshake=first)


def executor(implementation: Implementation) -> SandboxedExecutor:
    found = sandboxed_executor.create_executor(implementation)
    assert isinstance(found, SandboxedExecutor)
    return found


def build_run_of(implementation: Implementation) -> Run:
    return provenance.build_run([implementation], Plan((), ()), command="", level="smoke", limits=())


def test_a_module_that_stands_for_a_missing_package_is_no_obstacle(folder: Path) -> None:
    module = """
import sys
class Missing:
    def __getattr__(self, name):
        raise ImportError(f"{name} needs a package that is not installed")
sys.modules["missing"] = Missing()
VALUE = 1
"""
    (folder / "kernel.py").write_text(KERNEL.format(module))
    executor(load_kernel()).forward(draw_problem(CASE))


def write_library(value: str) -> None:
    Path("native.c").write_text(f"int value(void) {{ return {value}; }}\n")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", "new.so", "native.c"], check=True)
    os.replace("new.so", "native.so")


def write_link(value: str) -> None:
    Path(f"helper_{value}.py").write_text(f"VALUE = {value}\n")
    Path("helper.py").unlink(missing_ok=True)
    Path("helper.py").symlink_to(f"helper_{value}.py")


def write_text(value: str) -> None:
    Path("text.txt").write_text(f"VALUE = {value}\n")


def write_module(value: str) -> None:
    Path("helper.py").write_text(f"VALUE = {value}\n")


def write_namespace(value: str) -> None:
    Path("elsewhere", "theirs").mkdir(parents=True, exist_ok=True)
    Path("elsewhere", "theirs", "part.py").write_text(f"VALUE = {value}\n")


def write_archive(value: str) -> None:
    with zipfile.ZipFile("helper.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("helper.py"), f"VALUE = {value}\n")


NATIVE = pytest.mark.skipif(COMPILER is None, reason="no C compiler here to build a library with")
KINDS = [
    pytest.param("from helper import VALUE", write_module, "helper.py", id="a module"),
    pytest.param("from helper import VALUE", write_link, "helper.py", id="a link to another module"),
    pytest.param("exec((HERE / ('te' + 'xt.t' + 'xt')).read_text())", write_text, "text.txt", id="a text"),
    pytest.param(
        "import sys; sys.path.append('elsewhere'); from theirs.part import VALUE",
        write_namespace,
        "elsewhere/theirs/part.py",
        id="a package without __init__",
    ),
    pytest.param(
        "import sys; sys.path.append('hel' + 'per.z' + 'ip'); from helper import VALUE",
        write_archive,
        "helper.zip",
        id="an archive",
    ),
    pytest.param(
        "import ctypes; VALUE = ctypes.CDLL(str(HERE / ('nat' + 'ive.s' + 'o'))).value()",
        write_library,
        "native.so",
        id="a library",
        marks=NATIVE,
    ),
]


@pytest.mark.parametrize(("code", "write", "name"), KINDS)
def test_a_run_is_not_gone_on_with_when_a_file_has_changed(
    code: str, write: Callable[[str], None], name: str, folder: Path
) -> None:
    Path("kernel.py").write_text(KERNEL.format(code))
    found = []
    for value in ("1", "1", "2"):
        write(value)
        implementation = load_kernel()
        found.append(build_run_of(implementation))
        sandboxed_executor.end_process(implementation)
    once, again, changed = found
    assert {"kernel.py", name} <= set(once.kernels["kernel.py:attention"].files)
    Path("r.jsonl").write_text(serialize_run(once) + "\n")
    assert load_resumed_run(Path("r.jsonl"), again)
    with pytest.raises(ResumeMismatchError, match=name):
        load_resumed_run(Path("r.jsonl"), changed)


def test_a_run_is_not_gone_on_with_when_other_files_are_read(folder: Path) -> None:
    choice = "VALUE = __import__('importlib').import_module('helper_' + open('choice').read()).VALUE"
    Path("kernel.py").write_text(KERNEL.format(choice))
    found = []
    for value in ("1", "2"):
        write_link(value)
        Path("choice").write_text(value)
        found.append(build_run_of(load_kernel()))
    once, other = (set(run.kernels["kernel.py:attention"].files) for run in found)
    assert once - other == {"helper_1.py"}
    assert other - once == {"helper_2.py"}


def find_byte_code(name: str, source: str, place: str, mode: py_compile.PycInvalidationMode) -> None:
    Path(name).write_text(source)
    Path(place).parent.mkdir(exist_ok=True)
    py_compile.compile(name, cfile=place, invalidation_mode=mode, doraise=True)
    Path(name).unlink()


def test_byte_code_beside_its_source_is_not_loaded(folder: Path) -> None:
    Path("kernel.py").write_text(KERNEL.format("from helper import VALUE"))
    cached = f"__pycache__/helper.{sys.implementation.cache_tag}.pyc"
    find_byte_code("helper.py", "VALUE = 1\n", cached, py_compile.PycInvalidationMode.UNCHECKED_HASH)
    Path("helper.py").write_text("VALUE = 2\n")
    problem = draw_problem(CASE)
    implementation = load_kernel()
    out = executor(implementation).forward(problem).values["out"]
    np.testing.assert_array_equal(out, 2 * np.asarray(problem.q))
    sandboxed_executor.end_process(implementation)


def test_byte_code_without_source_is_refused_by_name(folder: Path) -> None:
    Path("kernel.py").write_text(KERNEL.format("from helper import VALUE"))
    find_byte_code("helper.py", "VALUE = 1\n", "helper.pyc", py_compile.PycInvalidationMode.TIMESTAMP)
    with pytest.raises(ImplementationNotFound, match=r"helper\.pyc.*helper\.py"):
        load_kernel()


def test_a_file_that_is_first_read_in_a_call_is_told_once_and_may_not_change(folder: Path) -> None:
    Path("kernel.py").write_text(READS_IN_A_CALL)
    Path("value").write_text("1")
    implementation = load_kernel()
    asked = executor(implementation)
    assert "value" not in asked.files
    asked.forward(draw_problem(CASE))
    assert list(asked.pop_later_files()) == ["value"]
    asked.forward(draw_problem(dataclasses.replace(CASE, q_length=32)))
    assert asked.pop_later_files() == {}
    Path("value").write_text("2")
    with pytest.raises(ProcessLost, match="value has changed"):
        asked.forward(draw_problem(dataclasses.replace(CASE, q_length=64)))


def test_a_later_process_that_reads_another_content_is_refused(folder: Path) -> None:
    Path("kernel.py").write_text(KERNEL.format("from helper import VALUE"))
    write_module("1")
    implementation = load_kernel()
    ((_, first),) = sandboxed_executor.collect_handshakes([implementation])
    write_module("2")
    with pytest.raises(ImplementationNotFound, match=r"helper\.py has changed"):
        load_kernel(first)


def test_the_scratch_folder_and_what_is_installed_are_left_out(folder: Path) -> None:
    code = "import tempfile; tempfile.TemporaryFile('w+').close(); Path(tempfile.gettempdir(), 'x').write_text('1'); "
    code += (
        "VALUE = int(Path(tempfile.gettempdir(), 'x').read_text()); import rich.text; open('/proc/self/stat').close()"
    )
    Path("kernel.py").write_text(KERNEL.format(code))
    implementation = load_kernel()
    assert set(executor(implementation).files) == {"kernel.py", "package rich"}
    sandboxed_executor.end_process(implementation)


def test_an_installed_module_that_is_not_as_its_package_lists_it_is_told_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    for name in ("listed.py", "altered.py"):
        (tmp_path / name).write_text("")
    empty = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    (tmp_path / "theirs-1.0.dist-info" / "RECORD").write_text(f"listed.py,{empty},0\naltered.py,{empty},0\n")
    (tmp_path / "altered.py").write_text("VALUE = 1\n")
    monkeypatch.setattr(installed_packages, "find_package_folders", lambda: (str(tmp_path),))
    found = loaded_files.LoadedFiles("theirs:attention")
    found.record_reported({"files": {"installed": [str(tmp_path / "listed.py"), str(tmp_path / "altered.py")]}})
    assert set(found.files_at_load) == {"package theirs", str(tmp_path / "altered.py")}
    assert found.files_at_load["package theirs"].startswith("1.0 ")


@pytest.mark.parametrize("names", [{"opened": "kernel.py"}, {"opened": [1]}, [], {"installed": {"a": "b"}}])
def test_what_names_no_files_is_no_answer(names: object) -> None:
    with pytest.raises(ValueError, match="files"):
        loaded_files.LoadedFiles("kernel.py:attention").record_reported({"files": names})


def test_pipes_devices_and_what_is_not_there_have_no_digest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found = loaded_files.LoadedFiles("kernel.py:attention")
    found.record_reported(
        {"files": {"opened": [str(tmp_path / "pipe"), "/dev/zero", str(tmp_path), str(tmp_path / "absent")]}}
    )
    assert found.files_at_load == {}


def judge_kernel(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conformance", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT)


def test_a_file_that_is_read_in_calls_is_recorded_and_refuses_to_go_on(folder: Path) -> None:
    Path("kernel.py").write_text(READS_IN_A_CALL)
    Path("value").write_text("1")
    case = "decode/f32/B1.T1.S16.N2.K2.H16.V16/full/normal/s0"
    judge_kernel("--impl=kernel.py:attention", f"--case={case}", "--check=forward", "--json=r.jsonl")
    (run,) = read_runs(Path("r.jsonl"))
    assert any("value" in record.files for record in run.records)
    Path("value").write_text("2")
    before = Path("r.jsonl").read_bytes()
    refused = judge_kernel("--resume=r.jsonl")
    assert refused.returncode == 2
    assert "value" in refused.stderr
    assert Path("r.jsonl").read_bytes() == before


def test_a_file_that_changed_until_the_end_of_a_run_is_an_error_that_names_it(folder: Path) -> None:
    Path("kernel.py").write_text(KERNEL.format("from helper import VALUE"))
    write_module("1")
    run = build_run_of(load_kernel())
    record = Record(
        implementation="kernel.py:attention", platform="cpu", case="c", check="forward", observable="out", verdict=PASS
    )
    assert build_changed_file_records(run, [record]) == []
    write_module("2")
    (changed,) = build_changed_file_records(run, [record])
    assert changed.verdict == ERROR
    assert "helper.py" in changed.reason
    assert "kernel.py" not in changed.reason
