"""Where the results of a command go."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from pathlib import Path

from conformance import output_files
from conformance.commands.command_errors import CannotJudge
from conformance.output_files import PAGE, RECORDS, SUMMARY, TABLE, OutputRefused
from conformance.records import make_printable
from reports.page_model import Summary


def format_command_line() -> str:
    """The command line, as it can be repeated."""
    words = " ".join(["python -m conformance", *map(shlex.quote, sys.argv[1:])])
    return words.encode(errors="backslashreplace").decode()  # a path may have bytes that are no text


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where results go; `step` is where GitHub shows a summary of a job's step, if this is one."""

    report: Path | None
    json: Path | None
    markdown: Path | None
    step: Path | None = None

    @property
    def journals(self) -> list[Path]:
        """The files of records, written as they come: the one that is asked for, and the one beside the page."""
        beside = self.report.with_suffix(".jsonl") if self.report is not None else None
        named = {path.resolve(): path for path in (beside, self.json) if path is not None}
        return list(named.values())

    def write(self, summary: Summary) -> None:
        """Write page and summary, whichever are asked for. Raises `CannotJudge` where the disk does not take them."""
        if self.report is None and self.markdown is None and self.step is None:
            return
        from reports import html_page, markdown_summary  # imported late: few runs write a page

        try:
            if self.report is not None:
                html_page.save_page(self.report, summary)
            if self.markdown is not None and (self.step is None or not _is_step_summary(self.markdown)):
                write_summary(self.markdown, markdown_summary.format_markdown(summary))
        except OSError as error:
            place = error.filename or "an output"
            raise CannotJudge(f"{place} cannot be written: {error.strerror or error}") from error
        if self.step is not None:
            try:
                with self.step.open("a", encoding="utf-8") as file:  # other commands of the step have theirs there
                    file.write(markdown_summary.format_markdown(summary))
            except OSError as error:  # nobody asked for it by name
                print(f"no summary in GITHUB_STEP_SUMMARY={self.step}: {error.strerror or error}", file=sys.stderr)


def find_step_summary() -> Path | None:
    """Where GitHub shows a summary of a job's step, if this process is of one."""
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    return Path(place) if place else None


def check_outputs(arguments: argparse.Namespace) -> Outputs:
    """Where results go; each place is tried before any work is done."""
    paths = {}
    for name in ("report", "json", "markdown"):
        value = getattr(arguments, name, None)
        paths[name] = Path(value) if value is not None else None
    outputs = Outputs(**paths)
    for name, path in paths.items():
        if path is not None:
            check_writable(getattr(arguments, name), name)
    if outputs.report is not None and (beside := outputs.report.with_suffix(".jsonl")) != outputs.report:
        check_writable(str(beside), "report", RECORDS)
    _reject_collisions(outputs)
    return outputs


def _reject_collisions(outputs: Outputs) -> None:
    """The records beside the page may be the file of `--json`, since they are the same; no other file is shared."""
    named = [path for path in dataclasses.astuple(outputs) if path is not None]
    beside = [] if outputs.report is None else [outputs.report.with_suffix(".jsonl")]
    places = [path.resolve() for path in [*named, *(path for path in beside if path != outputs.json)]]
    for path in places:
        if places.count(path) > 1:
            raise CannotJudge(
                f"two outputs go to {path.name}: give each of --report, --json and --markdown its own file"
            )


# What each option writes.
_FILE_KINDS = {"report": PAGE, "json": RECORDS, "resume": RECORDS, "markdown": SUMMARY, "out": TABLE}


def check_writable(value: str, option: str, kind: str | None = None) -> Path:
    """Return the path of an output, checked before any work is done.

    Args:
      value: the path, as it is given.
      option: the option that it is given by, without dashes.
      kind: of the file, where it is not the one of the option.

    Raises:
      CannotJudge: if it cannot be written, or something else would be overwritten.
    """
    path = Path(value)
    try:
        appended = option == "markdown" and _is_step_summary(path)
        output_files.check_output(path, None if appended else kind or _FILE_KINDS[option])
    except OutputRefused as error:
        raise CannotJudge(make_printable(f"--{option}={value} {error}")) from error
    return path


def write_summary(path: Path, text: str) -> None:
    """Write the file of `--markdown`. Raises `OSError`, which names it."""
    if not _is_step_summary(path):
        output_files.write_text(path, text)
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _is_step_summary(path: Path) -> bool:
    """Tell whether the file is where GitHub shows summaries, to which every command of a step appends."""
    step = find_step_summary()
    return step is not None and os.path.realpath(path) == os.path.realpath(step)
