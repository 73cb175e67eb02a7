"""Check the files to which a run writes its results before any work is done, and write page and summary at the end."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.session.failures import CannotJudge
from reports import output_files
from reports.output_files import PAGE, RECORDS, SUMMARY, TABLE, OutputRefused
from reports.printable_text import make_printable

# Not imported at run time: the gate loads this module before imports of `reports` find this project's package.
if TYPE_CHECKING:
    from reports.page_model import Summary


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The files that a run writes, None where not requested. `step` is the step summary of GitHub Actions."""

    report: Path | None = None
    json: Path | None = None
    markdown: Path | None = None
    step: Path | None = None

    @property
    def journals(self) -> list[Path]:
        """The files of records, which are written job by job: the one beside the page, and the one of `--json`."""
        beside = self.report.with_suffix(".jsonl") if self.report is not None else None
        named = {path.resolve(): path for path in (beside, self.json) if path is not None}
        return list(named.values())

    def write(self, summary: Summary) -> None:
        """Write the page and the summaries that are requested. Raises `CannotJudge` if one cannot be written."""
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
                # Append, since other commands of the step write there too.
                with self.step.open("a", encoding="utf-8") as file:
                    file.write(markdown_summary.format_markdown(summary))
            except OSError as error:  # the user did not request this file, so the command does not fail
                print(f"no summary in GITHUB_STEP_SUMMARY={self.step}: {error.strerror or error}", file=sys.stderr)


def find_step_summary() -> Path | None:
    """Return the file whose content GitHub shows as the summary of this step of a job; None outside of GitHub."""
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    return Path(place) if place else None


def check_outputs(
    *, report: str | None = None, json: str | None = None, markdown: str | None = None, prefix: str = "--"
) -> Outputs:
    """Check that all outputs can be written, and return their paths.

    Args:
      report: path of the HTML page. A file of records is written beside it.
      prefix: the first characters of option names in messages, such as `--`.

    Raises:
      CannotJudge: if a file cannot be written, would replace another kind of file, or is named twice.
    """
    named = {"report": report, "json": json, "markdown": markdown}
    paths = {name: None if value is None else Path(value) for name, value in named.items()}
    outputs = Outputs(**paths)
    if report is not None and Path(report).suffix == ".jsonl":
        raise CannotJudge(
            f"{prefix}report={report} is the file of records beside the page: give the page another suffix"
        )
    for name, value in named.items():
        if value is not None:
            check_writable(value, name, prefix=prefix)
    if outputs.report is not None:
        beside = outputs.report.with_suffix(".jsonl")
        check_writable(str(report), "report", RECORDS, beside=beside, prefix=prefix)
    _reject_collisions(outputs)
    return outputs


def _reject_collisions(outputs: Outputs) -> None:
    """Raise `CannotJudge` if two outputs are one file. Only `--json` may name the file of records beside the page."""
    named = [path for path in (outputs.report, outputs.json, outputs.markdown) if path is not None]
    beside = [] if outputs.report is None else [outputs.report.with_suffix(".jsonl")]
    places = [path.resolve() for path in [*named, *(path for path in beside if path != outputs.json)]]
    for path in places:
        if places.count(path) > 1:
            raise CannotJudge(
                f"two outputs go to {path.name}: give each of --report, --json and --markdown its own file"
            )


# The kind of file that each option writes, by the option's name.
_FILE_KINDS = {"report": PAGE, "json": RECORDS, "resume": RECORDS, "markdown": SUMMARY, "out": TABLE}


def check_writable(
    value: str, option: str, kind: str | None = None, *, beside: Path | None = None, prefix: str = "--"
) -> Path:
    """Check that an output can be written, and return its path.

    Args:
      option: the name of the option with this path, without prefix.
      kind: the kind of file, if it is not the usual kind of this option.
      beside: a file beside `value` that is written too, and that is checked in its place.
      prefix: the first characters of option names in messages, such as `--`.

    Raises:
      CannotJudge: if the file cannot be written, or has content of another kind, which would be overwritten.
    """
    path = beside or Path(value)
    try:
        is_appended = option == "markdown" and _is_step_summary(path)
        output_files.check_output(path, None if is_appended else kind or _FILE_KINDS[option])
    except OutputRefused as error:
        which = f": {path.name} beside it" if beside is not None else ""
        raise CannotJudge(make_printable(f"{prefix}{option}={value}{which} {error}")) from error
    return path


def write_summary(path: Path, text: str) -> None:
    """Write the file of `--markdown`, or append to GitHub's step summary. Raises `OSError` with the file's name."""
    if not _is_step_summary(path):
        output_files.write_text(path, text)
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _is_step_summary(path: Path) -> bool:
    """Tell whether the file is GitHub's summary of the step, to which every command of the step appends."""
    step = find_step_summary()
    return step is not None and os.path.realpath(path) == os.path.realpath(step)
