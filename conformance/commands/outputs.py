"""Where the results of a command go."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

from conformance import records
from conformance.commands.errors import CannotJudge
from conformance.records import Record, RunInfo
from reports import html, markdown


def command_line() -> str:
    """The command line, as it can be repeated."""
    return " ".join(["python -m conformance", *map(shlex.quote, sys.argv[1:])])


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where results go."""

    report: Path | None
    json: Path | None
    markdown: Path | None

    def write(self, found: list[Record], info: RunInfo) -> None:
        """Write records, page and summary, whichever are asked for."""
        if self.json is not None:
            records.write_jsonl(self.json, found)
        if self.report is not None:
            html.write(self.report, found, info)
            records.write_jsonl(self.report.with_suffix(".jsonl"), found)
        if self.markdown is not None:
            self.markdown.write_text(markdown.render(found, info))


def outputs_of(arguments: argparse.Namespace) -> Outputs:
    """Where results go; each place is tried before any work is done."""
    paths = {}
    for name in ("report", "json", "markdown"):
        value = getattr(arguments, name, None)
        paths[name] = writable(value, name) if value is not None else None
    outputs = Outputs(**paths)
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
    except OSError as error:
        raise CannotJudge(f"--{option}={value} cannot be written: {error.strerror or error}") from error
    return path
