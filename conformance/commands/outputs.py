"""Where the results of a command go."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.commands.errors import CannotJudge
from conformance.records import Record, RunInfo, printable


def command_line() -> str:
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

    def write(self, found: Sequence[Record], info: RunInfo) -> None:
        """Write page and summary, whichever are asked for. Raises `CannotJudge` where the disk does not take them."""
        if self.report is None and self.markdown is None and self.step is None:
            return
        from reports import html, markdown  # imported late: few runs write a page

        try:
            if self.report is not None:
                html.write(self.report, found, info)
            if self.markdown is not None and (self.step is None or self.markdown.resolve() != self.step.resolve()):
                self.markdown.write_text(markdown.render(found, info), encoding="utf-8")
        except OSError as error:
            place = error.filename or "an output"
            raise CannotJudge(f"{place} cannot be written: {error.strerror or error}") from error
        if self.step is not None:
            try:
                with self.step.open("a", encoding="utf-8") as file:  # other commands of the step have theirs there
                    file.write(markdown.render(found, info))
            except OSError as error:  # nobody asked for it by name
                print(f"no summary in GITHUB_STEP_SUMMARY={self.step}: {error.strerror or error}", file=sys.stderr)


def step_summary() -> Path | None:
    """Where GitHub shows a summary of a job's step, if this process is of one."""
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    return Path(place) if place else None


def outputs_of(arguments: argparse.Namespace) -> Outputs:
    """Where results go; each place is tried before any work is done."""
    paths = {}
    for name in ("report", "json", "markdown"):
        value = getattr(arguments, name, None)
        paths[name] = writable(value, name) if value is not None else None
    outputs = Outputs(**paths)
    for path in outputs.journals:
        if path != outputs.json:
            writable(str(path), "report")
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


def writable(value: str, option: str) -> Path:
    """The path of an output, tried before any work is done."""
    path = Path(value)
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{value} is a directory")
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:  # a zero byte in a path is the latter
        why = getattr(error, "strerror", None) or error
        raise CannotJudge(f"--{option}={printable(value)} cannot be written: {why}") from error
    return path
