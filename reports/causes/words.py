"""How findings are put into words, the same in every report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from conformance.records import Record
from reports import findings, wording
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
    is_of_the_form,
    line_that_raises,
)
from reports.causes.levels import LENGTHS, Level, fields_of, plainness

_NAMED = 5  # checks and results that a line names
_TOLD = 2  # questions of a check that a title names
_LONGEST = 120
_ERROR = re.compile(r"[A-Z]\w*(:|$)")
_LETTERS = {
    "batch": "B=",
    "q_length": "T=",
    "kv_length": "S=",
    "num_q_heads": "N=",
    "num_kv_heads": "K=",
    "head_dim": "H=",
    "v_head_dim": "V=",
}


def title(finding: Finding) -> str:
    """What is wrong, and since which feature, in one sentence."""
    where = _where(finding)
    return f"{_what(finding)}{',' * (finding.kind == RAISES)} {where}" if where else _what(finding)


def shares(finding: Finding) -> str:
    """How many of the cases with its levels fail, and without; empty where one case is all there is."""
    inside, outside = finding.inside, finding.outside
    if finding.kind in (BEHIND_MASK, UNEXPECTED) or inside.asked + outside.asked < 2:
        return ""
    if finding.levels is None and finding.is_explained:
        return f"fails in {_share(inside)}"
    if finding.levels is None:
        return f"fails in {_share(inside)}, and no feature or pair of features tells which"
    left_out = f"; {wording.counted(finding.left_out, 'case')} that fail otherwise left out" if finding.left_out else ""
    if not finding.levels:
        return f"fails in {_share(inside)}{left_out}"
    others = f", and in {outside.red:,} of {outside.asked:,} others" if outside.asked else ""
    return f"fails in {_share(inside, 'such ')}{others}{left_out}"


def undecided(finding: Finding) -> str:
    """Which other levels it may be that it needs, as far as cases tell; empty if there are none."""
    if not finding.others:
        return ""
    more = f", or {len(finding.others) - 3} more" if len(finding.others) > 3 else ""
    return f"or {', or '.join(map(_levels, finding.others[:3]))}{more}: no case tells them apart"


def confirmed(finding: Finding) -> str:
    """What was seen beside the smallest case; empty if nothing was."""
    if finding.without:
        levels = zip(finding.levels or (), finding.without, strict=True)
        ways = [instead(finding.smallest.case, case, level.fields) for level, case in levels if case]
        partly = "" if finding.is_confirmed else " in part"
        return f"confirmed{partly}: this case fails, and the same {' or '.join(ways)} passes"
    if finding.passes and finding.levels:
        return f"not all it takes: {finding.passes} is such a case, and passes"
    return ""


def explained(finding: Finding) -> str:
    """How many failures it explains, which results are wrong beside those of the title, and what follows."""
    count, cases = len(finding.records), len({record.case for record in finding.records})
    text = f"explains {wording.counted(count, 'failure')} in {wording.counted(cases, 'case')}"
    if finding.kind == RAISES:
        return f"{text}, of {_listed(finding.checks)}"
    if finding.kind == CHECK:
        return f"{text}: {_listed(finding.results)}"
    text += f": {_listed(_results(finding))}"
    return f"{text}; {_listed(finding.follows)} follow" if finding.follows else text


def instead(fails: str, passes: str, names: Iterable[str]) -> str:
    """What another case has in place of some fields of one, as a sentence goes on."""
    one, other = fields_of(fails) or {}, fields_of(passes) or {}
    differ = [name for name in names if one.get(name) != other.get(name)]
    gone = [one[name] for name in differ if name not in other or (name == "mask" and other[name] == "full")]
    put = [f"{_LETTERS.get(name, '')}{other[name]}" for name in differ if one.get(name) not in gone]
    ways = [f"{word} {_joined(found)}" for word, found in (("without", gone), ("with", put)) if found]
    return " and ".join(ways)


def leak(finding: Finding) -> str:
    """How much NaN and infinity behind the mask do, of a finding that is about that; else empty."""
    if finding.kind != BEHIND_MASK:
        return ""
    (found,), _ = findings.behind_mask(finding.records)
    return wording.behind_mask_text(found).partition(": ")[2]


def remedies(finding: Finding) -> list[str]:
    """Declarations under which it would pass for the most part, where that was tried; said of leaks elsewhere."""
    if finding.kind == BEHIND_MASK:
        return []
    found = findings.explained(finding.records)
    if told := [one for one in found if _is_remedy(one, finding)]:
        return [wording.explained_text(one) for one in told]
    mended, tried = sum(one.count for one in found), max((one.tried for one in found), default=0)
    # One declaration mends what rounds little, and several at once what rounds more: neither alone mends most.
    if len(found) > 1 and 4 * mended >= 3 * tried:
        return [wording.several_text(found)]
    return []


def _is_remedy(found: findings.Explained, finding: Finding) -> bool:
    """Whether a declaration mends the smallest case, or most of several on which declarations were tried.

    They are tried on few failures, and some failure in hundreds is mended by any.
    """
    most = found.count > 1 and 4 * found.count >= 3 * found.tried
    return finding.smallest.remedy == found.remedy or most or 2 * found.count >= len(finding.records)


def refusal(finding: Finding) -> str:
    """How it is said that what always raises is not supported; empty where it does not always, or not by a level."""
    if finding.kind != RAISES or not finding.levels or finding.inside.red < finding.inside.asked:
        return ""
    if is_of_the_form(finding.smallest):
        return ""  # it is mended by a cast
    if all(set(level.fields) <= set(LENGTHS) for level in finding.levels):
        return "if such lengths are not supported: raise NotImplementedError for them"
    if finding.outside.red or len(finding.levels) != 1:
        return ""
    (level,) = finding.levels
    features = ", ".join(f'"{feature}": "..."' for feature in level.features)
    return f"if it is not supported: unsupported={{{features}}}" if features else ""


def facts(finding: Finding) -> list[str]:
    """What is known of it beside the title, a line each."""
    what = [leak(finding)] if finding.kind == BEHIND_MASK else [shares(finding), undecided(finding), confirmed(finding)]
    what += [] if finding.kind == BEHIND_MASK else [explained(finding), refusal(finding)]
    return [line for line in (*what, *remedies(finding)) if line]


def evidence(record: Record) -> list[str]:
    """The figures of a record and the pattern of its error, a line each; its reason where figures do not say it all."""
    facts = (wording.judged_text(record), wording.worst_text(record), wording.pattern_text(record))
    lines = [line for line in facts if line]
    reason = re.sub(r"^ratio \S+ exceeds \S+(; rms \S+ exceeds \S+)?$|^rms \S+ exceeds \S+$", "", record.reason)
    return [*lines, wording.shorten(reason, longest=300)] if reason else lines


def _what(finding: Finding) -> str:
    record = finding.smallest
    if finding.kind == RAISES:
        line = line_that_raises(record.reason)
        message = record.reason[: line.start()].strip() if line else record.reason
        message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…"
        return f"raises {message}" if _ERROR.match(message) else message  # what returned is wrong is a sentence
    if finding.kind == BEHIND_MASK:
        return "NaN or infinity behind the mask reaches the results"
    if finding.kind == UNEXPECTED:
        return "an expected failure passes"
    results = _results(finding)
    if finding.checks == (STATISTICS,) and all(math.isfinite(record.ratio or 0) for record in finding.own):
        return f"{_joined(results)} {_verb(results)} less precise than a correct kernel's"
    if finding.kind == FORWARD:
        return "out is wrong" if "out" in results else f"{_joined(results)} {_verb(results)} wrong"
    if finding.kind == GRADIENTS:
        return f"{_joined(results)} {_verb(results)} wrong" if len(results) < 4 else "the gradients are wrong"
    fail = f"{_joined(finding.checks)} fail{'s' * (len(finding.checks) == 1)}"
    asked = _asked(finding)
    return f"{fail} ({_joined(asked)})" if asked and len(asked) <= _TOLD else fail


def _asked(finding: Finding) -> list[str]:
    """Under which questions of its checks it is red, none where one has no name: `no_sinks` of `out.no_sinks`."""
    names = [record.observable.rpartition(".") for record in finding.own]
    return [] if any(not name[1] for name in names) else list(dict.fromkeys(name[2] for name in names))


def _where(finding: Finding) -> str:
    if finding.levels is None:
        return ""
    if finding.levels:
        return _levels(finding.levels)
    plain = plainness(finding.smallest.case)[0] == 0
    return "in every case" if plain else "in every case that was asked"


def _levels(levels: Sequence[Level]) -> str:
    return " and ".join(level.words for level in levels)


def _results(finding: Finding) -> list[str]:
    """The results that are wrong, `out` under one name whichever call gives it."""
    return list(dict.fromkeys(name.removesuffix("_with_residuals") for name in finding.results))


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verb(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def _share(share: Share, such: str = "") -> str:
    return f"{share.red:,} of {share.asked:,} {such}case{'s' * (share.asked != 1)}"
