"""Phrase findings as text: titles, facts and evidence, used alike by terminal, Markdown and HTML reports."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from reports.causes.case_levels import LENGTHS, Level, parse_fields, rank_plainness
from reports.causes.finding import (
    ALGORITHM,
    BEHIND_MASK,
    CHECK,
    FORWARD,
    GRADIENTS,
    RAISES,
    ROUNDS_TOO_MUCH,
    STATISTICS,
    UNEXPECTED,
    UNREPEATABLE,
    WRONG_EXACTLY,
    Finding,
    Share,
    find_raising_line,
    is_mask_leak,
    is_wrong_form,
)
from reports.causes.remedies import MaskLeak, Remedy, find_remedies, summarize_mask_leak
from reports.causes.sorts import DIFFERS, WRONG, count_trials, find_covering_declarations
from reports.record_groups import JudgedImplementation
from reports.records import Diagnosis, Proposal, Record, SimilarBug
from reports.text_format import format_count, format_judged, format_pattern, format_worst, shorten_text
from reports.unreached_branches import find_common_branch

_MAX_NAMED = 5  # the most checks or results that a line names
_MAX_SUBCHECKS = 2  # the most subchecks that a title names
_MAX_OTHERS = 3  # the most alternative combinations of levels that a line names
_MAX_MESSAGE = 120  # the most characters of an exception's message in a title
_SAME_NUMBERS = 0.97  # a bug of this similarity is wrong by the same numbers, except for rounding
_EXCEPTION = re.compile(r"[A-Z]\w*(:|$)")
_LIMIT_REASON = re.compile(r"^ratio \S+ exceeds \S+(; rms \S+ exceeds \S+)?$|^rms \S+ exceeds \S+$")
_EXACTNESS = {
    ROUNDS_TOO_MUCH: "the algorithm is right, it rounds too much: in float64 this case is within its bound",
    WRONG_EXACTLY: "wrong also in exact arithmetic: in float64 this case is beyond its bound",
}
_SUBCHECK_WORDS = {"x64": "with jax_enable_x64"}  # names that say too little by themselves
_SIZE_LETTERS = {
    "batch": "B=",
    "q_length": "T=",
    "kv_length": "S=",
    "num_q_heads": "N=",
    "num_kv_heads": "K=",
    "head_dim": "H=",
    "v_head_dim": "V=",
}


@dataclasses.dataclass(frozen=True)
class FindingText:
    """The text of a finding in a report.

    Attributes:
      number: the number of the finding in the report, from 1.
      finding: the finding that the text describes.
      sort: `WRONG`, or `DIFFERS` if it passes under declarations.
      declarations: the declarations under which it passes, as they are written in code, and conventions in words.
      title: one sentence that says which results are wrong, and with which features of a case, such as "out is wrong
        with sinks".
      facts: the other facts about the finding, one line each.
      evidence: the measured errors, error pattern and reason of the plainest record (`Finding.smallest`), one line
        each.
      diagnosis: the planted bugs that the finding resembles; None if it was not compared with any.
      resemblance: the diagnosis as text, one line each.
    """

    number: int
    finding: Finding
    title: str
    facts: tuple[str, ...]
    evidence: tuple[str, ...]
    diagnosis: Diagnosis | None = None
    resemblance: tuple[str, ...] = ()
    sort: str = WRONG
    declarations: tuple[str, ...] = ()


def describe_finding(
    number: int,
    finding: Finding,
    diagnosis: Diagnosis | None = None,
    proposal: Proposal | None = None,
    *,
    option: str = "--diagnose-seconds",
) -> FindingText:
    """Phrase a finding as text.

    Args:
      number: its number in the report.
      finding: the finding.
      diagnosis: the planted bugs that it resembles. Nothing is said of them if the finding passes under declarations.
      proposal: the declarations that were tried on it.
      option: the option, or argument in Python, that gives more time for this comparison.
    """
    evidence = tuple(list_evidence(finding.smallest))
    declarations = find_covering_declarations(finding, proposal)
    if proposal is not None and declarations:
        title = f"{_format_difference_title(finding)}: declare it or mend it"
        facts = (*_list_coverage(finding, declarations, proposal), *list_facts(finding, is_declarable=True))
        return FindingText(number, finding, title, facts, evidence, sort=DIFFERS, declarations=declarations)
    resemblance = () if diagnosis is None else tuple(format_diagnosis(diagnosis, option))
    title, facts = format_title(finding), tuple(list_facts(finding))
    return FindingText(number, finding, title, facts, evidence, diagnosis, resemblance)


def _format_difference_title(finding: Finding) -> str:
    """Format the title of a finding that can be declared: results differ, and are not called wrong."""
    title = format_title(finding)
    return re.sub(r"\b(is|are) wrong\b", lambda match: "differs" if match[1] == "is" else "differ", title, count=1)


def _list_coverage(finding: Finding, declarations: tuple[str, ...], proposal: Proposal) -> Iterator[str]:
    """Yield under which declarations a finding passes, and what each of them lets be judged less strictly."""
    failing, right = count_trials(finding, declarations, proposal)
    others = f"; {format_count(right, 'right case')} judged under it stay{'s' * (right == 1)} right" if right else ""
    passes = "passes" if failing == 1 else "pass"
    written = [one for one in declarations if one in proposal.declarations]
    converted = [one for one in declarations if one in proposal.wrappers]
    how = [f"with {', '.join(written)}"] if written else []
    how += [f"where a wrapper converts {_join_words(converted)}"] if converted else []
    yield f"{format_count(failing, 'failing case')} {passes} {' and '.join(how)}{others}"
    for one in written:
        if one in proposal.loosens:
            yield f"{one} loosens what is judged, so a bug may pass too: {proposal.loosens[one]}"


def choose_foremost(findings: Sequence[FindingText], most: int) -> tuple[list[FindingText], int, int]:
    """Choose at most `most` findings; the first finding of every implementation is chosen before a second of any.

    Returns:
      The chosen findings in the order of their numbers, the number of findings left out, and the number of failures
      that those left out explain.
    """
    ranks: Counter[JudgedImplementation] = Counter()
    ranked = []
    for text in findings:
        ranked.append((ranks[text.finding.implementation], text.number, text))
        ranks[text.finding.implementation] += 1
    ranked.sort(key=lambda one: one[:2])
    shown = sorted((text for _, _, text in ranked[:most]), key=lambda text: text.number)
    hidden = [text for _, _, text in ranked[most:]]
    return shown, len(hidden), sum(len(text.finding.records) for text in hidden)


def format_title(finding: Finding) -> str:
    """Format the title of a finding: one sentence that says what is wrong, and with which levels of a case."""
    where = _format_where(finding)
    return f"{_format_fault(finding)}{',' * (finding.kind == RAISES)} {where}" if where else _format_fault(finding)


def list_facts(finding: Finding, *, is_declarable: bool = False) -> list[str]:
    """List the facts about a finding that its title does not have, one line each.

    If it `is_declarable`, the declarations that single failures pass under are left out.
    """
    if finding.kind == BEHIND_MASK:
        lines = [_format_mask_leak(finding, is_declarable=is_declarable)]
    else:
        lines = [
            format_shares(finding),
            format_alternatives(finding),
            format_confirmation(finding),
            format_exactness(finding),
            format_explained(finding),
            "" if is_declarable else format_refusal(finding),
        ]
    remedies = [] if is_declarable else format_remedies(finding)
    return [line for line in (*lines, *remedies) if line]


def format_diagnosis(diagnosis: Diagnosis, option: str = "--diagnose-seconds") -> list[str]:
    """Format which planted bugs a finding resembles, a line each."""
    if not diagnosis.cases and not diagnosis.is_shown:
        return ["no case on which planted bugs are compared is of this kind: no bug is named"]
    if not diagnosis.cases:
        return [f"not compared with planted bugs for lack of time: {option}=60 gives a minute"]
    on = f"on {format_count(diagnosis.cases, 'case')}"
    if not diagnosis.is_shown:
        return [f"not wrong {on} on which planted bugs are compared: no bug is named"]
    if not diagnosis.bugs:
        return [f"resembles none of {diagnosis.known:,} planted bugs, {on} compared"]
    first, *others = diagnosis.bugs
    is_same = first.similarity >= _SAME_NUMBERS
    how = "wrong by the same numbers as" if is_same else f"resembles (similarity {first.similarity:.2f} of 1)"
    lines = [f"{how} the planted bug {_format_bug(first)}"]
    for other in others:
        lines.append(f"or {_format_bug(other)}" if is_same else f"or ({other.similarity:.2f}) {_format_bug(other)}")
    return lines


def _format_bug(bug: SimilarBug) -> str:
    return f"{bug.name} ({bug.family}; {bug.reference})"


def list_evidence(record: Record) -> list[str]:
    """List the measured errors, the error pattern and the reason of a record, one line each.

    The reason is left out if it only says which limit the errors exceed.
    """
    facts = (format_judged(record), format_worst(record), format_pattern(record))
    lines = [line for line in facts if line]
    reason = _LIMIT_REASON.sub("", record.reason)
    return [*lines, shorten_text(reason, longest=300)] if reason else lines


def format_shares(finding: Finding) -> str:
    """Format in how many cases with the properties (levels) of a finding the failure occurs, and in how many others.

    Returns an empty string if only one case was judged.
    """
    inside, outside = finding.inside, finding.outside
    if finding.kind in (BEHIND_MASK, UNEXPECTED) or inside.asked + outside.asked < 2:
        return ""
    if finding.levels is None and finding.is_explained:
        return f"fails in {_format_share(inside)}"
    if finding.levels is None:
        return f"fails in {_format_share(inside)}, and no feature or pair of features distinguishes them"
    left_out = (
        f"; {format_count(finding.left_out, 'case')} left out, failing for other reasons" if finding.left_out else ""
    )
    if not finding.levels:
        return f"fails in {_format_share(inside)}{left_out}"
    others = f", and in {outside.red:,} of {outside.asked:,} others" if outside.asked else ""
    return f"fails in {_format_share(inside, 'such ')}{others}{left_out}"


def format_alternatives(finding: Finding) -> str:
    """Format the other levels that may be the cause, because no case distinguishes them from the finding's levels.

    Returns an empty string if there are none.
    """
    if not finding.others:
        return ""
    more = f", or {len(finding.others) - _MAX_OTHERS} more" if len(finding.others) > _MAX_OTHERS else ""
    return f"or {', or '.join(map(_format_levels, finding.others[:_MAX_OTHERS]))}{more}: no case distinguishes them"


def format_confirmation(finding: Finding) -> str:
    """Format which changes of the smallest case make it pass.

    If none are known, format a plain case with the same levels that passes, or return an empty string.
    """
    if finding.without:
        levels = zip(finding.levels or (), finding.without, strict=True)
        ways = [format_difference(finding.smallest.case, case, level.fields) for level, case in levels if case]
        partly = "" if finding.is_confirmed else " in part"
        return f"confirmed{partly}: this case fails, and the same {' or '.join(dict.fromkeys(ways))} passes"
    if finding.passes and finding.levels:
        return f"needs more than that: {finding.passes} has the same features, and passes"
    return ""


def format_exactness(finding: Finding) -> str:
    """Format whether the plainest case is wrong in exact arithmetic too; empty if that is unknown."""
    return _EXACTNESS.get(finding.in_float64, "")


def format_explained(finding: Finding) -> str:
    """Format how many failures a finding explains, which results are wrong, and which checks fail as a consequence."""
    count, cases = len(finding.records), len({record.case for record in finding.records})
    text = f"explains {format_count(count, 'failure')} in {format_count(cases, 'case')}"
    if finding.kind == RAISES:
        return f"{text}, of {_format_list(finding.checks)}"
    if finding.kind == CHECK:
        return f"{text}: {_format_list(finding.results)}"
    text += f": {_format_list(_list_results(finding))}"
    return f"{text}; {_format_list(finding.follows)} follow" if finding.follows else text


def format_difference(fails: str, passes: str, names: Iterable[str]) -> str:
    """Format how a passing case differs from a failing one as a phrase, such as "without sinks and with T=200".

    Args:
      fails: the id of the case that fails.
      passes: the id of the case that passes.
      names: the fields of `Case` to compare.
    """
    failing, passing = parse_fields(fails) or {}, parse_fields(passes) or {}
    differ = [name for name in names if failing.get(name) != passing.get(name)]
    gone = [failing[name] for name in differ if name not in passing or (name == "mask" and passing[name] == "full")]
    put = [f"{_SIZE_LETTERS.get(name, '')}{passing[name]}" for name in differ if failing.get(name) not in gone]
    ways = [f"{word} {_join_words(found)}" for word, found in (("without", gone), ("with", put)) if found]
    return " and ".join(ways)


def format_mask_leak(leak: MaskLeak) -> str:
    """Format how many failures NaN and infinity behind the mask cause, and the declaration under which they pass."""
    text = f"{format_count(leak.count, 'failure')} in {format_count(leak.cases, 'case')} ({', '.join(leak.checks)})"
    if not leak.remedy:
        return text
    tried = "all" if leak.tried == leak.count else f"{leak.tried:,}"
    return f"{text}; {tried} would pass with the declaration {leak.remedy}"


def format_remedies(finding: Finding) -> list[str]:
    """Format the declarations under which most failures of a finding would pass, one line each.

    For a leak behind the mask the list is empty, since `format_mask_leak` names the declaration.
    """
    if finding.kind == BEHIND_MASK:
        return []
    found = find_remedies(finding.records)
    if chosen := [remedy for remedy in found if _is_remedy(remedy, finding)]:
        return [_format_remedy(remedy) for remedy in chosen]
    explained, tried = sum(remedy.count for remedy in found), max((remedy.tried for remedy in found), default=0)
    # Where a kernel rounds in several places, one declaration may explain some failures and another declaration others,
    # so that neither explains most.
    if len(found) > 1 and 4 * explained >= 3 * tried:
        return [_format_several_remedies(found)]
    return []


def format_refusal(finding: Finding) -> str:
    """Format how to declare a feature unsupported if calls with it always raise.

    Returns an empty string if such calls do not always raise, or no level decides whether they raise.
    """
    if finding.kind != RAISES or not finding.levels or finding.inside.red < finding.inside.asked:
        return ""
    if is_wrong_form(finding.smallest):
        return ""  # the call returned; a wrong dtype or shape is to be fixed, not declared unsupported
    if all(set(level.fields) <= set(LENGTHS) for level in finding.levels):
        return "if such lengths are not supported: raise NotImplementedError for them"
    if finding.outside.red or len(finding.levels) != 1:
        return ""
    (level,) = finding.levels
    features = ", ".join(f'"{feature}": "..."' for feature in level.features)
    return f"if it is not supported: unsupported={{{features}}}" if features else ""


def _is_remedy(remedy: Remedy, finding: Finding) -> bool:
    """Return whether a declaration explains the smallest case, or most failures.

    A declaration that explains only a few failures is no remedy: among hundreds of failures, any declaration explains
    some by chance.
    """
    mends_most = remedy.count > 1 and 4 * remedy.count >= 3 * remedy.tried
    is_of_smallest = finding.smallest.remedy == remedy.declaration
    return is_of_smallest or mends_most or 2 * remedy.count >= len(finding.records)


def _format_mask_leak(finding: Finding, *, is_declarable: bool) -> str:
    leak = summarize_mask_leak([record for record in finding.records if is_mask_leak(record)])
    return format_mask_leak(dataclasses.replace(leak, tried=0) if is_declarable else leak)


def _format_remedy(remedy: Remedy) -> str:
    tried = f" of {remedy.tried:,} on which it was tried" if remedy.tried > remedy.count else ""
    failures = f"{format_count(remedy.count, 'failure')}{tried}"
    return f"{failures} in {', '.join(remedy.checks)} would pass with the declaration {remedy.declaration}"


def _format_several_remedies(found: Sequence[Remedy]) -> str:
    """Format several declarations that explain most failures only together."""
    ranked = sorted(found, key=lambda remedy: (-remedy.count, remedy.declaration))
    explained, tried = sum(remedy.count for remedy in ranked), max(remedy.tried for remedy in ranked)
    each = "; ".join(f"{remedy.count} with {remedy.declaration}" for remedy in ranked)
    failures = f"{explained:,} of {tried:,} failures"
    return f"{failures} would pass with a declaration: {each}. Declare them together to see if all do"


def _format_fault(finding: Finding) -> str:
    record = finding.smallest
    if finding.kind == RAISES:
        line = find_raising_line(record.reason)
        message = record.reason[: line.start()].strip() if line else record.reason
        if is_wrong_form(record):  # the reason says "dtype is ..." or "shape is ...", and not of which result
            message = re.sub(r"^(dtype|shape) is", rf"the \1 of {record.observable.partition('.')[0]} is", message)
        message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
        # If a result has the wrong dtype or shape, nothing raised, and the reason is a sentence of its own.
        return f"raises {message}" if _EXCEPTION.match(message) else message
    if finding.kind == BEHIND_MASK:
        return "NaN or infinity behind the mask reaches the results"
    if finding.kind == UNEXPECTED:
        return "an expected failure passes"
    if finding.kind == UNREPEATABLE:
        named = [name for name in _list_results(finding) if name != "bits"] or ["out"]
        return f"{_join_words(named)} change{'s' * (len(named) == 1)} from call to call"
    results = _list_results(finding)
    if finding.checks == (STATISTICS,) and all(math.isfinite(record.ratio or 0) for record in finding.own):
        return f"{_join_words(results)} {_choose_verb(results)} less precise than a correct kernel's"
    if finding.kind == FORWARD:
        return "out is wrong" if "out" in results else f"{_join_words(results)} {_choose_verb(results)} wrong"
    if finding.kind == GRADIENTS:
        wrong = f"{_join_words(results)} {_choose_verb(results)} wrong"
        return wrong if len(results) < 4 else "the gradients are wrong"
    if finding.checks == (ALGORITHM,):
        return f"{_join_words(results)} {_choose_verb(results)} wrong in exact arithmetic"
    subchecks = _list_subchecks(finding)
    if finding.checks == ("poison",) and subchecks == ["visible"]:
        return "NaN in a key that queries attend to becomes finite numbers in their rows"
    fail = f"{_join_words(finding.checks)} fail{'s' * (len(finding.checks) == 1)}"
    return f"{fail} ({_join_words(subchecks)})" if subchecks and len(subchecks) <= _MAX_SUBCHECKS else fail


def _list_subchecks(finding: Finding) -> list[str]:
    """List the failing subchecks of a finding's checks: `no_sinks` for the observable `out.no_sinks`.

    The list is empty if any observable names no subcheck.
    """
    names = [record.observable.rpartition(".") for record in finding.own]
    found = dict.fromkeys(_SUBCHECK_WORDS.get(name[2], name[2]) for name in names)
    return [] if any(not name[1] for name in names) else list(found)


def _format_where(finding: Finding) -> str:
    if branch := find_common_branch(finding.records):
        # Only confirmed levels say more: by themselves, the few cases of one branch have many levels in common.
        levels = f"{_format_levels(finding.levels)}, " if finding.levels and finding.is_confirmed else ""
        return f"{levels}where {branch}"
    if finding.levels is None:
        return ""
    if finding.levels:
        levels = _format_levels(finding.levels)
        return f"{levels}, {finding.cotangent}" if finding.cotangent else levels
    if finding.cotangent:
        return finding.cotangent
    is_plain = rank_plainness(finding.smallest.case)[0] == 0
    return "in every case" if is_plain else "in every case that was judged"


def _format_levels(levels: Sequence[Level]) -> str:
    return " and ".join(level.words for level in levels)


def _list_results(finding: Finding) -> list[str]:
    """List the wrong results; `out` has one name, whether or not the call also returned residuals."""
    return list(dict.fromkeys(name.removesuffix("_with_residuals") for name in finding.results))


def _join_words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _choose_verb(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _format_list(names: Iterable[str]) -> str:
    """Join names with commas; of more than `_MAX_NAMED`, the rest is counted."""
    found = list(names)
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(found[:_MAX_NAMED]) + more


def _format_share(share: Share, such: str = "") -> str:
    return f"{share.red:,} of {share.asked:,} {such}case{'s' * (share.asked != 1)}"
