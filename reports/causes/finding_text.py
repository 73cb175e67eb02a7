"""How findings are put into words, the same in every report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from conformance.records import Record
from reports import shared_evidence, text_format
from reports.causes.case_levels import LENGTHS, Level, parse_fields, rank_plainness
from reports.causes.finding import (
    BEHIND_MASK,
    CHECK,
    FORWARD,
    GRADIENTS,
    RAISES,
    STATISTICS,
    UNEXPECTED,
    Finding,
    Share,
    find_raising_line,
    is_wrong_form,
)

_MAX_NAMED = 5  # checks and results that a line names
_MAX_QUESTIONS = 2  # questions of a check that a title names
_MAX_MESSAGE = 120
_EXCEPTION = re.compile(r"[A-Z]\w*(:|$)")
_SIZE_LETTERS = {
    "batch": "B=",
    "q_length": "T=",
    "kv_length": "S=",
    "num_q_heads": "N=",
    "num_kv_heads": "K=",
    "head_dim": "H=",
    "v_head_dim": "V=",
}


def format_title(finding: Finding) -> str:
    """What is wrong, and since which feature, in one sentence."""
    where = _format_where(finding)
    return f"{_format_fault(finding)}{',' * (finding.kind == RAISES)} {where}" if where else _format_fault(finding)


def format_shares(finding: Finding) -> str:
    """How many of the cases with its levels fail, and without; empty where one case is all there is."""
    inside, outside = finding.inside, finding.outside
    if finding.kind in (BEHIND_MASK, UNEXPECTED) or inside.asked + outside.asked < 2:
        return ""
    if finding.levels is None and finding.is_explained:
        return f"fails in {_format_share(inside)}"
    if finding.levels is None:
        return f"fails in {_format_share(inside)}, and no feature or pair of features tells which"
    left_out = (
        f"; {text_format.format_count(finding.left_out, 'case')} that fail otherwise left out"
        if finding.left_out
        else ""
    )
    if not finding.levels:
        return f"fails in {_format_share(inside)}{left_out}"
    others = f", and in {outside.red:,} of {outside.asked:,} others" if outside.asked else ""
    return f"fails in {_format_share(inside, 'such ')}{others}{left_out}"


def format_alternatives(finding: Finding) -> str:
    """Which other levels it may be that it needs, as far as cases tell; empty if there are none."""
    if not finding.others:
        return ""
    more = f", or {len(finding.others) - 3} more" if len(finding.others) > 3 else ""
    return f"or {', or '.join(map(_format_levels, finding.others[:3]))}{more}: no case tells them apart"


def format_confirmation(finding: Finding) -> str:
    """What was seen beside the smallest case; empty if nothing was."""
    if finding.without:
        levels = zip(finding.levels or (), finding.without, strict=True)
        ways = [format_difference(finding.smallest.case, case, level.fields) for level, case in levels if case]
        partly = "" if finding.is_confirmed else " in part"
        return f"confirmed{partly}: this case fails, and the same {' or '.join(ways)} passes"
    if finding.passes and finding.levels:
        return f"not all it takes: {finding.passes} is such a case, and passes"
    return ""


def format_explained(finding: Finding) -> str:
    """How many failures it explains, which results are wrong beside those of the title, and what follows."""
    count, cases = len(finding.records), len({record.case for record in finding.records})
    text = f"explains {text_format.format_count(count, 'failure')} in {text_format.format_count(cases, 'case')}"
    if finding.kind == RAISES:
        return f"{text}, of {_format_list(finding.checks)}"
    if finding.kind == CHECK:
        return f"{text}: {_format_list(finding.results)}"
    text += f": {_format_list(_list_results(finding))}"
    return f"{text}; {_format_list(finding.follows)} follow" if finding.follows else text


def format_difference(fails: str, passes: str, names: Iterable[str]) -> str:
    """What another case has in place of some fields of one, as a sentence goes on."""
    one, other = parse_fields(fails) or {}, parse_fields(passes) or {}
    differ = [name for name in names if one.get(name) != other.get(name)]
    gone = [one[name] for name in differ if name not in other or (name == "mask" and other[name] == "full")]
    put = [f"{_SIZE_LETTERS.get(name, '')}{other[name]}" for name in differ if one.get(name) not in gone]
    ways = [f"{word} {_join_words(found)}" for word, found in (("without", gone), ("with", put)) if found]
    return " and ".join(ways)


def format_leak(finding: Finding) -> str:
    """How much NaN and infinity behind the mask do, of a finding that is about that; else empty."""
    if finding.kind != BEHIND_MASK:
        return ""
    (found,), _ = shared_evidence.find_mask_leaks(finding.records)
    return text_format.format_mask_leak(found).partition(": ")[2]


def format_remedies(finding: Finding) -> list[str]:
    """Declarations under which it would pass for the most part, where that was tried; said of leaks elsewhere."""
    if finding.kind == BEHIND_MASK:
        return []
    found = shared_evidence.find_remedies(finding.records)
    if told := [one for one in found if _is_remedy(one, finding)]:
        return [text_format.format_remedy(one) for one in told]
    mended, tried = sum(one.count for one in found), max((one.tried for one in found), default=0)
    # One declaration mends what rounds little, and several at once what rounds more: neither alone mends most.
    if len(found) > 1 and 4 * mended >= 3 * tried:
        return [text_format.format_several_remedies(found)]
    return []


def _is_remedy(found: shared_evidence.Remedy, finding: Finding) -> bool:
    """Whether a declaration mends the smallest case, or most of several on which declarations were tried.

    They are tried on few failures, and some failure in hundreds is mended by any.
    """
    most = found.count > 1 and 4 * found.count >= 3 * found.tried
    return finding.smallest.remedy == found.remedy or most or 2 * found.count >= len(finding.records)


def format_refusal(finding: Finding) -> str:
    """How it is said that what always raises is not supported; empty where it does not always, or not by a level."""
    if finding.kind != RAISES or not finding.levels or finding.inside.red < finding.inside.asked:
        return ""
    if is_wrong_form(finding.smallest):
        return ""  # it is mended by a cast
    if all(set(level.fields) <= set(LENGTHS) for level in finding.levels):
        return "if such lengths are not supported: raise NotImplementedError for them"
    if finding.outside.red or len(finding.levels) != 1:
        return ""
    (level,) = finding.levels
    features = ", ".join(f'"{feature}": "..."' for feature in level.features)
    return f"if it is not supported: unsupported={{{features}}}" if features else ""


def list_facts(finding: Finding) -> list[str]:
    """What is known of it beside the title, a line each."""
    what = (
        [format_leak(finding)]
        if finding.kind == BEHIND_MASK
        else [format_shares(finding), format_alternatives(finding), format_confirmation(finding)]
    )
    what += [] if finding.kind == BEHIND_MASK else [format_explained(finding), format_refusal(finding)]
    return [line for line in (*what, *format_remedies(finding)) if line]


def list_evidence(record: Record) -> list[str]:
    """The figures of a record and the pattern of its error, a line each; its reason where figures do not say it all."""
    facts = (text_format.format_judged(record), text_format.worst_text(record), text_format.pattern_text(record))
    lines = [line for line in facts if line]
    reason = re.sub(r"^ratio \S+ exceeds \S+(; rms \S+ exceeds \S+)?$|^rms \S+ exceeds \S+$", "", record.reason)
    return [*lines, text_format.shorten(reason, longest=300)] if reason else lines


def _format_fault(finding: Finding) -> str:
    record = finding.smallest
    if finding.kind == RAISES:
        line = find_raising_line(record.reason)
        message = record.reason[: line.start()].strip() if line else record.reason
        message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
        return f"raises {message}" if _EXCEPTION.match(message) else message  # what returned is wrong is a sentence
    if finding.kind == BEHIND_MASK:
        return "NaN or infinity behind the mask reaches the results"
    if finding.kind == UNEXPECTED:
        return "an expected failure passes"
    results = _list_results(finding)
    if finding.checks == (STATISTICS,) and all(math.isfinite(record.ratio or 0) for record in finding.own):
        return f"{_join_words(results)} {_choose_verb(results)} less precise than a correct kernel's"
    if finding.kind == FORWARD:
        return "out is wrong" if "out" in results else f"{_join_words(results)} {_choose_verb(results)} wrong"
    if finding.kind == GRADIENTS:
        return (
            f"{_join_words(results)} {_choose_verb(results)} wrong" if len(results) < 4 else "the gradients are wrong"
        )
    fail = f"{_join_words(finding.checks)} fail{'s' * (len(finding.checks) == 1)}"
    asked = _list_questions(finding)
    return f"{fail} ({_join_words(asked)})" if asked and len(asked) <= _MAX_QUESTIONS else fail


def _list_questions(finding: Finding) -> list[str]:
    """Under which questions of its checks it is red, none where one has no name: `no_sinks` of `out.no_sinks`."""
    names = [record.observable.rpartition(".") for record in finding.own]
    return [] if any(not name[1] for name in names) else list(dict.fromkeys(name[2] for name in names))


def _format_where(finding: Finding) -> str:
    if finding.levels is None:
        return ""
    if finding.levels:
        return _format_levels(finding.levels)
    plain = rank_plainness(finding.smallest.case)[0] == 0
    return "in every case" if plain else "in every case that was asked"


def _format_levels(levels: Sequence[Level]) -> str:
    return " and ".join(level.words for level in levels)


def _list_results(finding: Finding) -> list[str]:
    """The results that are wrong, `out` under one name whichever call gives it."""
    return list(dict.fromkeys(name.removesuffix("_with_residuals") for name in finding.results))


def _join_words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _choose_verb(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _format_list(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:_MAX_NAMED]) + (f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else "")


def _format_share(share: Share, such: str = "") -> str:
    return f"{share.red:,} of {share.asked:,} {such}case{'s' * (share.asked != 1)}"
