"""Format the results of the pytest gate for the terminal and for JUnit files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest

from conformance.execution import implementation_registry
from conformance.gate.gate_run import SuiteResult
from conformance.judging.job import Job
from conformance.session.run_annotations import annotate_run
from conformance.session.run_result import SessionResult
from reports import changes, terminal
from reports.changes import Comparison
from reports.page_model import Summary
from reports.printable_text import make_printable
from reports.records import Record, Run


def list_test_properties(job: Job, judged: Iterable[Record]) -> list[tuple[str, object]]:
    """List the properties of one test for JUnit files: its job, the verdicts, and the largest ratio."""
    found = list(judged)
    counts = Counter(record.verdict for record in found)
    ratios = [record.ratio / record.limit for record in found if record.ratio is not None and record.limit]
    properties: list[tuple[str, object]] = [
        ("implementation", job.implementation.name),
        ("case", job.case.id),
        ("checks", ",".join(check.name for check in job.checks)),
        ("verdicts", ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))),
    ]
    return [*properties, ("largest_ratio_of_limit", f"{max(ratios):.3g}")] if ratios else properties


def find_suite_property(config: pytest.Config) -> Callable[[str, str], None] | None:
    """Return the function that adds a property to the test suite in this process's JUnit file; None without a file."""
    from _pytest.junitxml import xml_key  # as pytest's own fixture `record_testsuite_property` does

    xml = config.stash.get(xml_key, None)
    return None if xml is None else xml.add_global_property


def list_suite_properties(result: SessionResult) -> list[tuple[str, str]]:
    """List the properties of the whole run for JUnit files. A name in brackets is the name of an implementation."""
    run, summary = result.recorded.run, result.summary
    assert run is not None
    facts = {
        "started": run.started,
        "command": run.command,
        "level": run.level,
        "narrowed": run.narrowed,
        "seeds": ", ".join(map(str, run.seeds)),
        "shard": run.shard,
        "state": summary.state,
    }
    facts |= {f"environment.{name}": value for name, value in run.environment.items()}
    for one in summary.implementations:
        facts[f"verdict[{one.implementation.label}]"] = one.text
    for name, kernel in run.kernels.items():
        facts[f"declared[{name}]"] = ", ".join(kernel.asks_less) or "as the defaults"
        facts[f"package[{name}]"] = kernel.package
        facts[f"source[{name}]"] = kernel.source
        ours = implementation_registry.is_builtin(name)
        usual = "ran in the judge's process" if ours else "ran in a confined process of its own"
        facts[f"place[{name}]"] = kernel.place or usual
    return [(make_printable(name), make_printable(value)) for name, value in facts.items()]


def format_terminal_summary(
    records: Sequence[Record],
    run: Run,
    result: SessionResult | None,
    *,
    report: str,
    said: Sequence[str],
    notes: Sequence[str],
) -> list[str]:
    """Return the lines of the terminal's summary: findings, counts, places of kernels, the verdict, annotations for CI.

    Args:
      records: all records of the run.
      run: the run record.
      result: the result of the session; None if the session did not finish.
      report: the path of the HTML page; empty if none is written.
      said: lines that were printed while findings were confirmed.
      notes: notes on how the run was planned.
    """
    counted = [*_format_counts(records), *_format_places(run)]
    if result is None:
        return [*counted, *annotate_run(records)]
    return [
        *said,
        *terminal.format_findings(result.summary, report),
        *counted,
        *notes,
        *_list_shortfall(result.summary),
        result.summary.headline,
        *annotate_run(records, result.comparison, result.summary.run),
    ]


def format_suite_summary(result: SuiteResult, report: str) -> list[str]:
    """Return the lines of the terminal's summary for one kernel of a test file.

    Args:
      result: what its tests found.
      report: the path of the HTML page; empty if none is written.
    """
    assert result.recorded.run is not None
    return [
        *result.said,
        *terminal.format_findings(result.summary, report),
        *_format_counts(result.records),
        *_format_places(result.recorded.run),
        *result.notes,
        *_list_shortfall(result.summary),
        result.summary.headline,
        *annotate_run(result.records, None, result.summary.run),
    ]


def format_regressions(comparison: Comparison) -> str:
    """Describe the regressions against the baseline, one line for each group; empty without regressions."""
    if not comparison.regressions:
        return ""
    groups = [
        f"{len(group)} {' '.join(key)}, as in {group[0].record.case}"
        for key, group in changes.list_reported_changes(comparison)
    ]
    return "\n".join([changes.format_changes_headline(comparison), *groups])


def _format_counts(records: Iterable[Record]) -> list[str]:
    """Return one aligned line for each implementation and platform, with its counts of verdicts."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        counts.setdefault(f"{record.implementation} ({record.platform})", Counter())[record.verdict] += 1
    width = max(map(len, counts))
    return [
        f"{name:<{width}}  " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items()))
        for name, count in sorted(counts.items())
    ]


def _list_shortfall(summary: Summary) -> list[str]:
    """Return a line that says that planned jobs were not judged and why; none if all were, or the run was stopped."""
    return [summary.shortfall] if summary.shortfall and not summary.run.interrupted else []


def _format_places(run: Run) -> list[str]:
    """Return one line for each kernel that ran in an unusual place, such as without a complete sandbox."""
    return [f"{name} {kernel.place}" for name, kernel in run.kernels.items() if kernel.place]
