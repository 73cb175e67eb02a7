"""Commands replace only their own outputs, write whole files, and one run at a time writes a file."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance import cli
from conformance.judging.journal import Journal, JournalWriteError
from reports import output_files, records
from reports.output_files import PAGE, RECORDS, SUMMARY, TABLE, OutputRefused, check_output, write_text
from reports.records import COMPLETE, PASS, Record, Run, serialize_run
from tests.process_helpers import COMMAND_TIMEOUT

CASE = "train/f32/B1.T2.S4.N2.K2.H4.V4/full/normal/s0"
RUN = Run(
    started="2026-01-01T00:00:00+00:00",
    command="run --impl=kernel.py:attention",
    level="quick",
    seeds=(),
    tolerances=(),
    kernels={},
    resumed=(),
)


def record() -> Record:
    return Record(implementation="kernel", platform="cpu", case=CASE, check="forward", observable="out", verdict=PASS)


def run(*arguments: str) -> int:
    return cli.main(cli.build_parser().parse_args(arguments))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    (tmp_path / "r.jsonl").write_text(records.serialize_record(record()) + "\n")
    return tmp_path


OURS = [
    (RECORDS, records.serialize_record(record()) + "\n"),
    (RECORDS, serialize_run(RUN) + "\n"),
    (RECORDS, serialize_run(RUN)[:60]),
    (RECORDS, '{"implementation": "k", "schema": "attention-conformance/measurement/1"}\n'),
    (SUMMARY, "## Attention conformance\n"),
    (TABLE, '{"schema": "attention-conformance/tuned/1", "entries": []}\n'),
]
KINDS = (RECORDS, PAGE, SUMMARY, TABLE)


@pytest.mark.parametrize(("kind", "content"), OURS)
def test_an_older_output_of_the_same_kind_may_be_replaced(kind: str, content: str, folder: Path) -> None:
    (folder / "out").write_text(content)
    check_output(folder / "out", kind)
    assert (folder / "out").read_text() == content


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content", ["import jax\n", "\n", "{}\n", '{"schema": "other/1"}\n', "<!doctype html>\n", "\xff", "[" * 9999]
)
def test_nothing_else_is(kind: str, content: str, folder: Path) -> None:
    (folder / "out").write_text(content, encoding="latin-1")
    with pytest.raises(OutputRefused, match="would be overwritten: give another name, or delete it first"):
        check_output(folder / "out", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_empty_or_not_there_is_free(kind: str, folder: Path) -> None:
    check_output(folder / "out", kind)
    assert not (folder / "out").exists()
    (folder / "out").touch()
    check_output(folder / "out", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_pipe_is_refused_and_stays_one(kind: str, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(OutputRefused, match="named pipe: give a regular file"):
        check_output(folder / "pipe", kind)
    assert (folder / "pipe").is_fifo()


def test_pages_and_summaries_of_every_command_are_recognised(folder: Path) -> None:
    for command in (("report", "r.jsonl"), ("compare", "r.jsonl", "r.jsonl")):
        texts = () if command[0] == "report" else ("--markdown=out.md",)
        for _ in range(2):  # the second time over the first
            assert run(*command, "--report=out.html", *texts) == 0
    check_output(folder / "out.html", PAGE)
    check_output(folder / "out.md", SUMMARY)


def test_summaries_are_added_to_the_summary_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "step.md"))
    (folder / "step.md").write_text("# Before\n")
    assert run("compare", "r.jsonl", "r.jsonl", "--markdown=step.md") == 0
    text = (folder / "step.md").read_text()
    assert text.startswith("# Before\n")
    assert "## Attention conformance" in text


@contextlib.contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Let no file of this process grow beyond `most` bytes in the block."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("there", [True, False], ids=["replaced", "new"])
def test_a_full_disk_leaves_the_old_file_or_none(there: bool, folder: Path) -> None:
    if there:
        (folder / "out").write_text("old")
    with full_disk(1000), pytest.raises(OSError, match="File too large") as raised:
        write_text(folder / "out", "x" * 2000)
    assert raised.value.filename == str(folder / "out")
    assert {path.name for path in folder.iterdir()} == {"r.jsonl", *(["out"] if there else [])}
    if there:
        assert (folder / "out").read_text() == "old"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("report", "r.jsonl", "--report=page.html"), "page.html"),
        (("compare", "r.jsonl", "r.jsonl", "--report=page.html"), "page.html"),
        (("report", "r.jsonl", "--markdown=text.md"), "text.md"),
    ],
)
def test_a_full_disk_is_one_line_that_names_the_file(
    command: tuple[str, ...], name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    with full_disk(100):
        assert run(*command) == 2
    assert capsys.readouterr().err == f"error: {name} cannot be written: File too large\n"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_keeps_its_mode_and_a_link_stays_one(folder: Path) -> None:
    (folder / "there").write_text("old")
    (folder / "there").chmod(0o640)
    (folder / "link").symlink_to("there")
    write_text(folder / "link", "new")
    assert (folder / "link").is_symlink()
    assert (folder / "there").read_text() == "new"
    assert (folder / "there").stat().st_mode & 0o777 == 0o640


def test_text_that_is_no_unicode_is_written_as_its_escape(folder: Path) -> None:
    write_text(folder / "out", "a\udcffb")
    assert (folder / "out").read_text() == "a\\udcffb"


@pytest.mark.parametrize("kept", [{}, {0: (record(),)}], ids=["begun", "resumed"])
def test_a_second_run_into_one_file_is_refused_and_told_which_is_the_first(
    kept: dict[int, tuple[Record, ...]], folder: Path
) -> None:
    first = Journal([folder / "r.jsonl"], RUN, kept)
    first.add_records([record()])
    before = (folder / "r.jsonl").read_bytes()
    for again in ({}, kept):
        with pytest.raises(JournalWriteError) as raised:
            Journal([folder / "new.jsonl", folder / "r.jsonl"], RUN, again)
        assert "r.jsonl" in str(raised.value)
        assert RUN.command in str(raised.value)
        assert (folder / "r.jsonl").read_bytes() == before
    first.end(COMPLETE)
    Journal([folder / "new.jsonl", folder / "r.jsonl"], RUN).end(COMPLETE)


def test_the_command_is_refused_while_another_run_writes_its_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Journal([folder / "r.jsonl"], RUN)
    before = (folder / "r.jsonl").read_bytes()
    command = ("run", "--impl=dot_product", f"--case={CASE}", "--check=forward", "--json=r.jsonl")
    assert run(*command) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: r.jsonl is written by another run")
    assert RUN.command in line
    assert (folder / "r.jsonl").read_bytes() == before
    first.end(COMPLETE)
    assert run(*command) == 0


def test_a_process_that_is_killed_leaves_no_lock(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from conformance.judging.journal import Journal\n"
        "from reports.records import Run; journal = Journal([Path('r.jsonl')], "
        "Run(started='2026-01-01T00:00:00+00:00', command='first', level='quick', "
        "seeds=(), tolerances=(), kernels={}, resumed=()))\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(JournalWriteError, match=r"r\.jsonl is written by another run that has not ended .*: first"):
        Journal([Path("r.jsonl")], RUN)
    process.kill()
    process.communicate(timeout=COMMAND_TIMEOUT)
    Journal([Path("r.jsonl")], RUN).end(COMPLETE)


def test_a_file_that_another_run_has_replaced_is_not_locked(folder: Path) -> None:
    descriptor = os.open("r.jsonl", os.O_WRONLY)
    os.replace("r.jsonl", "moved")
    Path("r.jsonl").touch()
    with pytest.raises(OutputRefused, match=r"r\.jsonl is written by another run"):
        output_files.lock_file(descriptor, Path("r.jsonl"))
    os.close(descriptor)
