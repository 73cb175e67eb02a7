"""Build the `jq` commands that the HTML page offers, to print records from their files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from reports.record_groups import NO_FEATURE, Contender

SELECT_RUNS = (
    'foreach inputs as $x (""; if ($x.schema|startswith("attention-conformance/run/")) then ($x.id//$x.started) '
    "else . end; select(IN(%s))|$x|%s)"
)
"""A `jq -n` program that selects the records of some runs. A record belongs to the last run line before it."""


@dataclasses.dataclass(frozen=True)
class RecordFiles:
    """The files of records, quoted for a shell.

    Attributes:
      default: the files of the contenders that `by_label` does not have.
      by_label: the files of contenders, by their labels.
      runs: the ids of each contender's runs (`reports.records.Run.mark`), by its label. They are needed if its files
        also hold other runs.
    """

    default: str
    by_label: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runs: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def get_files(self, contender: Contender) -> str:
        """Return the files that have the records of a contender."""
        return self.by_label.get(contender.label) or self.default

    def format_runs(self, contender: Contender) -> str:
        """Return a contender's runs as arguments of `IN` in `jq`; empty if its files hold no other runs."""
        return ",".join(map(_quote_json, self.runs.get(contender.label, ())))


def build_query_command(contender: Contender, kind: str, row: str, files: RecordFiles) -> str:
    """Build a command that prints the records of a matrix cell, one per line."""
    conditions = [
        '(.schema|startswith("attention-conformance/record/"))',
        f".implementation=={_quote_json(contender.implementation)}",
        f".platform=={_quote_json(contender.platform)}",
    ]
    if kind == "check":
        conditions.append(f".check=={_quote_json(row)}")
    elif row == NO_FEATURE:
        conditions.append("(.features|length)==0")
    else:
        conditions.append(f"(.features|index({_quote_json(row)}))")
    query = f"select({' and '.join(conditions)})"
    if runs := files.format_runs(contender):
        return f"jq -cn {_quote_shell(SELECT_RUNS % (runs, query))} {files.get_files(contender)}"
    return f"jq -c {_quote_shell(query)} {files.get_files(contender)}"


def _quote_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quote_shell(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
