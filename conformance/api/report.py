"""Define `Report`, the result of `conformance.check`."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from conformance.api.findings import Finding, build_findings, build_record_rows
from conformance.session.failures import CannotJudge
from conformance.session.job_judging import FIRST_FAILURE
from conformance.session.run_outputs import check_writable
from conformance.session.run_result import SessionResult
from impls.contract.argument_validation import validate_arguments
from reports import conformity, html_fragment, html_page, markdown_summary, output_files, terminal
from reports.records import COMPLETE, EARLY_END, Record, serialize_recorded_run

if TYPE_CHECKING:
    import pandas as pd

_WIDTH = 200


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Report:
    """The result of judging one kernel: a verdict, the causes of its failures, and every record.

    `bool(report)` is `report.conforms`. `str(report)` is the text that the command line prints. A notebook shows the
    report as HTML.

    Attributes:
      name: the name of the kernel.
      verdict: `conforms`, `conforms but for known failures`, `conforms in what was called`, `does not conform` or
        `could not be judged`.
      reason: why it could not be judged, or why the run ended early; empty otherwise.
      findings: the causes of its failures, the most telling first.
      records: every judgement of the run.
      session: the result of the session, with all that reports show.
    """

    name: str
    verdict: str
    reason: str
    findings: tuple[Finding, ...]
    records: tuple[Record, ...]
    session: SessionResult

    @property
    def conforms(self) -> bool:
        """Return whether the kernel was judged with all its operands, and nothing but known failures is wrong."""
        return self.verdict in (conformity.CONFORMS, conformity.KNOWN_FAILURES)

    @property
    def is_judged(self) -> bool:
        """Return whether there is a verdict: not if nothing was judged, or the run was stopped before its end."""
        return self.verdict != conformity.NOT_JUDGED

    @property
    def unreached_branches(self) -> tuple[tuple[str, str], ...]:
        """Return the branches of the kernel's source that no case reaches: the place, and the condition in words."""
        return tuple(branch for found in self.session.summary.unreached for branch in found.branches)

    def __bool__(self) -> bool:
        return self.conforms

    def __str__(self) -> str:
        console = Console(file=(text := io.StringIO()), width=_WIDTH, color_system=None, force_jupyter=False)
        terminal.print_summary(self.session.summary, console)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        is_said = self.reason in self.session.summary.shortfall
        return "\n".join([*lines, *([] if is_said else [f"{self.verdict}: {self.reason}"])])

    def __repr__(self) -> str:
        count = f"{len(self.findings)} finding{'s' * (len(self.findings) != 1)}"
        return f"<Report: {self.name} {self.verdict}, {count}, {len(self.records)} records>"

    def _repr_html_(self) -> str:
        return html_fragment.render_fragment(self.session.summary)

    def to_pandas(self) -> pd.DataFrame:
        """Return the records as a table, one row for each judgement.

        Raises:
          ImportError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "report.to_pandas() needs pandas, which is not installed: pip install pandas, or use report.records"
            ) from error
        return pandas.DataFrame(build_record_rows(self.records))

    @validate_arguments
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a file, and return its path.

        The suffix says what is written: the page (`.html`), the records that `python -m conformance report` reads
        (`.json`, `.jsonl`), or a summary in Markdown (`.md`).

        Raises:
          TypeError: if it is no path.
          ValueError: for any other suffix, and for a file that another kind of content would replace.
          OSError: if the file cannot be written.
        """
        target = Path(path)
        kinds = {".html": "report", ".htm": "report", ".json": "json", ".jsonl": "json", ".md": "markdown"}
        if (kind := kinds.get(target.suffix.lower())) is None:
            raise ValueError(f"path={str(path)!r} must end in .html, .json, .jsonl or .md, which say what is written")
        try:
            check_writable(str(path), kind, prefix="")
        except CannotJudge as error:
            raise ValueError(str(error)) from error
        if kind == "report":
            html_page.save_page(target, self.session.summary)
        elif kind == "json":
            output_files.write_text(target, serialize_recorded_run(self.session.recorded))
        else:
            output_files.write_text(target, markdown_summary.format_markdown(self.session.summary))
        return target


def build_report(name: str, result: SessionResult) -> Report:
    """Build the report of a session that judged one kernel."""
    ends = [record.reason for record in result.records if record.check == EARLY_END]
    reason = result.reason if result.how != COMPLETE else " ".join(ends)
    found = {one.conformity for one in result.summary.implementations}
    if result.exit_code == 0:
        verdict = conformity.KNOWN_FAILURES if conformity.KNOWN_FAILURES in found else conformity.CONFORMS
    elif result.exit_code == 1 or result.reason == FIRST_FAILURE:
        is_in_part = found & conformity.WRONG == {conformity.IN_PART}
        verdict = conformity.IN_PART if is_in_part else conformity.DOES_NOT_CONFORM
    else:
        verdict = conformity.NOT_JUDGED
        reason = reason or next((x.reason for x in result.summary.implementations if x.reason), "nothing was judged")
    return Report(name, verdict, reason, build_findings(result), tuple(result.records), result)
