"""Sum up in one line each section that the page folds: what is inside, and whether anything is wrong there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reports.compiled_section import CompiledSection
from reports.detection_section import Detection
from reports.glossary import Glossary
from reports.measures import CostTable, Distribution, GradientTable, MarginRow
from reports.metrics import Counts, rank_share
from reports.record_groups import RecordGroups
from reports.records import ERROR, UNJUDGED, RunInfo
from reports.records.measurement import DIFFERS
from reports.speed_section import SpeedPanel
from reports.text_format import format_count, format_duration, format_multiple, format_number


@dataclasses.dataclass(frozen=True)
class SectionSummary:
    """One line about a folded section."""

    text: str  # what is inside
    wrong: str = ""  # what is wrong with the implementations or the checks, in words; empty if nothing is
    doubt: str = ""  # what could not be judged, in words; empty if nothing is
    is_judged: bool = True  # whether anything in the section could be wrong. A table of versions cannot.


def summarize_reasons(groups: RecordGroups, total: Counts) -> SectionSummary:
    """Sum up why records have no judgement."""
    reasons = format_count(len(groups.by_reason), "reason")
    unjudged = total[UNJUDGED]
    text = f"{total['unsupported']:,} unsupported, {unjudged:,} unjudged, for {reasons}" if groups.by_reason else "none"
    return SectionSummary(text, is_judged=False)


def summarize_ratios(distributions: Sequence[Distribution]) -> SectionSummary:
    """Sum up the ratios of all results by dtype."""
    if not distributions:
        return SectionSummary("no ratio was judged", is_judged=False)
    over = sum(distribution.over for distribution in distributions)
    worst = max(distributions, key=lambda one: rank_share(one.spread.most))
    place = " ".join(filter(None, (worst.observable, worst.dtype)))
    text = f"{format_count(len(distributions), 'pair')} of result and dtype"
    text += f"; the largest ratio is {format_multiple(worst.spread.most)} its limit, in {place}"
    return SectionSummary(text, f"{format_count(over, 'record')} beyond a limit" if over else "")


def summarize_gradients(table: GradientTable) -> SectionSummary:
    """Sum up the gradients against both backward passes."""
    if not table.cells:
        return SectionSummary("no gradient was judged", is_judged=False)
    over = sum(cell.over for cell in table.cells.values())
    text = f"{format_count(len({row[1] for row in table.rows}), 'gradient')}, against two backward passes"
    return SectionSummary(text, f"{format_count(over, 'record')} beyond a limit" if over else "")


def summarize_margins(margins: Sequence[MarginRow]) -> SectionSummary:
    """Sum up how well the cases expose simple wrong results."""
    if not margins:
        return SectionSummary("no margin was recorded", is_judged=False)
    weak = sum(row.buckets[0] for row in margins)
    least = min(row.least for row in margins)
    text = f"{format_count(sum(row.cases for row in margins), 'case')}; the smallest margin is {format_multiple(least)}"
    return SectionSummary(text, doubt=f"{format_count(weak, 'case')} too weak to judge by" if weak else "")


def summarize_compiled(section: CompiledSection | None) -> SectionSummary:
    """Sum up what was compiled for accelerators."""
    if section is None:
        return SectionSummary("nothing was compiled", is_judged=False)
    failed = sum(cell.failed for cell in section.cells.values())
    done = sum(cell.compiled for cell in section.cells.values())
    text = f"{format_count(done, 'program')} compiled, for {format_count(len(section.targets), 'target')}"
    wrong = f"{format_count(failed, 'program')} did not compile" if failed else ""
    return SectionSummary(text, wrong, is_judged=bool(done or failed))


def summarize_speed(panels: Sequence[SpeedPanel]) -> SectionSummary:
    """Sum up what was timed."""
    if not panels:
        return SectionSummary("nothing was timed", is_judged=False)
    wrong = sum(row.outcome in (DIFFERS, ERROR) for panel in panels for row in panel.rows)
    text = f"{format_count(len(panels), 'comparison')} of implementations"
    return SectionSummary(text, f"{format_count(wrong, 'timing')} of wrong or missing results" if wrong else "")


def summarize_detection(detection: Detection | None) -> SectionSummary:
    """Sum up which planted bugs the checks find."""
    if detection is None:
        return SectionSummary("not measured", is_judged=False)
    missed = len(detection.survivors)
    found = len(detection.bugs) - missed
    text = f"{found:,} of {format_count(len(detection.bugs), 'planted bug')} found, measured at {detection.level}"
    return SectionSummary(text, f"{format_count(missed, 'planted bug')} not found" if missed else "")


def summarize_coverage(rows: Iterable[Mapping[str, Any]]) -> SectionSummary:
    """Sum up how many combinations of features a judged case has."""
    known = [row for row in rows if _is_count(row.get("covered")) and _is_count(row.get("combinations"))]
    if not known:
        return SectionSummary("not recorded", is_judged=False)
    covered, combinations = (sum(row[name] for row in known) for name in ("covered", "combinations"))
    text = f"{covered:,} of {format_count(combinations, 'combination')} of features were judged"
    return SectionSummary(text, is_judged=False)


def summarize_tolerances(rows: Sequence[Mapping[str, Any]]) -> SectionSummary:
    """Sum up the limits in force."""
    return SectionSummary(format_count(len(rows), "limit") if rows else "not recorded", is_judged=False)


def summarize_environment(run: RunInfo) -> SectionSummary:
    """Sum up where the run took place."""
    names = ("jax", "python", "backend", "system")
    facts = [f"{name} {run.environment[name]}" for name in names if name in run.environment]
    return SectionSummary(", ".join(facts) or "not recorded", is_judged=False)


def summarize_cost(cost: CostTable) -> SectionSummary:
    """Sum up the time of all checks."""
    if not cost.checks:
        return SectionSummary("nothing was judged", is_judged=False)
    seconds = cost.sum_check(cost.checks[0])
    share = f", {format_number(100 * seconds / cost.total, digits=2)}% of it in {cost.checks[0]}" if cost.total else ""
    return SectionSummary(f"{format_duration(cost.total)} of judging{share}", is_judged=False)


def summarize_glossary(glossary: Glossary) -> SectionSummary:
    """Sum up which words are explained."""
    checks, terms = format_count(len(glossary.checks), "check"), format_count(len(glossary.terms), "term")
    return SectionSummary(f"what {checks} and {terms} mean", is_judged=False)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
