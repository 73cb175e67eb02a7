"""Build the `jq` commands that the HTML page offers, to print records from their files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from reports.record_groups import NO_FEATURE, JudgedImplementation

SELECT_RUNS = (
    'foreach inputs as $x (""; if ($x.schema|startswith("attention-conformance/run/")) then ($x.id//$x.started) '
    "else . end; select(IN(%s))|$x|%s)"
)
"""A `jq -n` program that selects the records of some runs. A record belongs to the last run line before it."""


@dataclasses.dataclass(frozen=True)
class RecordFiles:
    """The files of records, quoted for a shell.

    Attributes:
      default: the files of the implementations that `by_label` does not have.
      by_label: the files of implementations, by their labels.
      runs: the ids of each implementation's runs (`reports.records.Run.mark`), by its label; needed if its files also
        hold other runs.
    """

    default: str
    by_label: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runs: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def get_files(self, implementation: JudgedImplementation) -> str:
        """Return the files that have the records of an implementation."""
        return self.by_label.get(implementation.label) or self.default

    def format_runs(self, implementation: JudgedImplementation) -> str:
        """Return the runs of an implementation as arguments of `IN` in `jq`.

        The result is empty if the implementation's files hold no other runs.
        """
        return ",".join(map(_quote_json, self.runs.get(implementation.label, ())))


def build_query_command(implementation: JudgedImplementation, kind: str, row: str, files: RecordFiles) -> str:
    """Build a command that prints the records of a matrix cell, one per line.

    Args:
      implementation: the column of the cell.
      kind: the kind of the matrix, `feature` or `check`.
      row: the row of the cell, a feature or a check.
      files: the files that hold the records.
    """
    conditions = [
        '(.schema|startswith("attention-conformance/record/"))',
        f".implementation=={_quote_json(implementation.name)}",
        f".platform=={_quote_json(implementation.platform)}",
    ]
    if kind == "check":
        conditions.append(f".check=={_quote_json(row)}")
    elif row == NO_FEATURE:
        conditions.append("(.features|length)==0")
    else:
        conditions.append(f"(.features|index({_quote_json(row)}))")
    query = f"select({' and '.join(conditions)})"
    if runs := files.format_runs(implementation):
        return f"jq -cn {_quote_shell(SELECT_RUNS % (runs, query))} {files.get_files(implementation)}"
    return f"jq -c {_quote_shell(query)} {files.get_files(implementation)}"


def _quote_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quote_shell(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
