"""Group the red records of runs into findings: each record belongs to the one root cause that explains it.

`fault_location` finds the levels on which failures depend. This module prepares its input from records, decides which
failures follow from which cause, and builds the findings.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cases.error_profile_cases import ERROR_PROFILE_CASES
from reports.causes import fault_location
from reports.causes.case_levels import Level, find_levels, rank_plainness
from reports.causes.fault_location import Candidate, Combination, Signal
from reports.causes.finding import (
    ALGORITHM,
    BEHIND_MASK,
    CHECK,
    FORWARD,
    GRADIENTS,
    KINDS,
    OUT,
    PLAIN_CALL,
    RAISES,
    ROUNDS_TOO_MUCH,
    STATISTICS,
    UNEXPECTED,
    UNREPEATABLE,
    WRONG_EXACTLY,
    Finding,
    Share,
    classify_record,
    find_raising_line,
    get_result,
    get_signal,
    is_about_gradients,
    is_mask_poison,
    is_repetition,
    is_wrong_form,
)
from reports.causes.nearest_passing import find_nearest_passing, find_needed_levels
from reports.record_groups import JudgedImplementation, group_by_implementation
from reports.records import BEYOND_ROUNDING, ERROR, FAIL, PASS, RED, UNEXPECTED_PASS, Record

CHECKS_WITH_OWN_OPERANDS = frozenset(
    {"arguments", "calls", "decoding", "first_calls", "forms", "invariance", "limits", "sharding", "transforms"}
)
"""The checks that use operands, masks or lengths other than those in the case id."""
_PROFILE_CASES = frozenset(one.case.id for one in ERROR_PROFILE_CASES)
_CLEARLY_WRONG = 2.0  # how many times the limit an error is, so that a case says on what the fault depends
# Dtypes, shapes and other numbers in messages. They differ from case to case, even if messages have one cause. So they
# are replaced by `#` before messages are compared.
_DTYPE = r"\b(?:bool|(?:bfloat|float|uint|int|complex|bf|f|u|s|i)[0-9]+)\b"
_CASE_DETAILS = re.compile(rf"(?:{_DTYPE})?[\[(][0-9, ]*[\])]|{_DTYPE}|[0-9]+")


def find_root_causes(records: Iterable[Record], probes: Iterable[Record] = ()) -> list[Finding]:
    """Find the causes of red records; each red record is in exactly one finding.

    Args:
      probes: records of additional cases that were judged to confirm findings. They are evidence, but no count of cases
        or failures includes them.
    """
    return find_implementation_causes(group_by_implementation(records), group_by_implementation(probes))


def find_implementation_causes(
    records: Mapping[JudgedImplementation, Sequence[Record]], probes: Mapping[JudgedImplementation, Sequence[Record]]
) -> list[Finding]:
    """Find the causes of red records like `find_root_causes`, from records already grouped by implementation."""
    found = []
    for implementation, own_records in records.items():
        if any(record.verdict in RED for record in own_records):
            found += _Evidence(implementation, own_records, probes.get(implementation, ())).build_findings()
    return found


@dataclasses.dataclass(frozen=True)
class _RootCause:
    """Levels that explain failures of a kind, and the name of the signal that shows the cause most plainly."""

    kind: str
    signal: str
    combination: Combination


class _Evidence:
    """The evidence in the records of one implementation; sets of cases are bit masks, and a case's bit is its row."""

    def __init__(
        self, implementation: JudgedImplementation, records: Sequence[Record], probes: Sequence[Record]
    ) -> None:
        self._implementation = implementation
        self._red = [record for record in records if record.verdict in RED]
        # What a probe finds in float64 says what a fault is, and not where it is. Error profile cases are chosen to
        # fail, so that a finding can be compared with planted bugs. Those that do fail would move the finding.
        chosen = _PROFILE_CASES & {record.case for record in probes if record.verdict in RED}
        located = (*records, *(r for r in probes if r.check != ALGORITHM and r.case not in chosen))
        self._judged = [record for record in located if record.verdict in (PASS, FAIL, ERROR)]
        evaluated = [record for record in (*records, *probes) if record.check == ALGORITHM]
        self._in_float64 = {(r.case, r.observable): r for r in evaluated if r.verdict in (PASS, FAIL)}
        self._rows = {case: 1 << row for row, case in enumerate(dict.fromkeys(r.case for r in self._judged))}
        self._harmless_cotangents = self._find_harmless_cotangents()
        self._signals = self._gather_signals(self._judged)
        counted = {record.key for record in records}
        self._counted_rows = _join_rows(self._rows[record.case] for record in self._judged if record.key in counted)
        self._counted = self._gather_signals(record for record in self._judged if record.key in counted)
        self._levels = self._list_candidates()
        self._roots = self._locate_roots()
        self._explained = {name: self._find_explaining(name) for name in self._signals}

    def _gather_signals(self, judged: Iterable[Record]) -> dict[str, Signal]:
        """Collect the cases where each signal fails (red), and those where it passes (green).

        A signal is a check with a result, or a line of code that raises. No record says that a line does not raise. So
        a line counts as passing in each case where some call returned and the line did not raise.
        """
        red: dict[str, int] = {}
        green: dict[str, int] = {}
        answered = 0  # the cases in which some call returned
        for record in judged:
            name, row = _name_signal(record), self._rows[record.case]
            if _get_cotangent(record) in self._harmless_cotangents:
                continue  # the case may have the fault all the same: another cotangent would show it
            side = green if record.verdict == PASS else red
            side[name] = side.get(name, 0) | row
            answered |= 0 if record.verdict == ERROR else row
        return {
            name: Signal(
                rows := red.get(name, 0), (answered if _classify_signal(name) == RAISES else green.get(name, 0)) & ~rows
            )
            for name in dict.fromkeys((*red, *green))
        }

    def _find_harmless_cotangents(self) -> frozenset[str]:
        """Find the kinds of cotangents for which no gradient is wrong, if that is a property of the fault.

        At `quick` each case has only some of the cotangents. So a gradient that is right for such a cotangent says
        nothing about the features of the fault.
        """
        kinds = {True: set[str](), False: set[str]()}
        for record in self._judged:
            if kind := _get_cotangent(record):
                kinds[record.verdict == PASS].add(kind)
        harmless = frozenset(kinds[True] - kinds[False])
        return harmless if describe_cotangents(frozenset(kinds[False]), harmless) else frozenset()

    def _list_candidates(self) -> dict[Level, Candidate]:
        """Return the levels and the cases that have each; levels that all cases have are left out."""
        rows: dict[Level, int] = {}
        for case, row in self._rows.items():
            for level in find_levels(case):
                rows[level] = rows.get(level, 0) | row
        everywhere = _join_rows(self._rows.values())
        return {level: Candidate(rows[level], level.odds) for level in sorted(rows) if rows[level] != everywhere}

    def _locate_roots(self) -> list[_RootCause]:
        """Locate the root causes, kind by kind; failures that an earlier kind explains need no later cause."""
        found: list[_RootCause] = []
        candidates = list(self._levels.values())
        for kind in (RAISES, FORWARD, GRADIENTS, CHECK):
            names = sorted((name for name in self._signals if _classify_signal(name) == kind), key=_rank_signal)
            if kind == CHECK and any(root.kind != RAISES for root in found):
                names = [name for name in names if _get_check(name) not in CHECKS_WITH_OWN_OPERANDS]
            signals = {name: self._get_unexplained(name) for name in names}
            if kind == CHECK:  # a case with wrong results fails other checks as a consequence
                wrong = _join_rows(root.combination.rows for root in found if root.kind != RAISES)
                signals = {name: signal.remove(wrong) for name, signal in signals.items()}
            # Errors with one cause raise at the same line, so each line is a group of its own. Wrong results are first
            # joined, since each result is judged in only some of the cases. Then each result is taken alone, for faults
            # that show in only some results.
            red = {name: signal for name, signal in signals.items() if signal.red}
            groups = [{name: signals[name]} for name in names] if kind == RAISES else [_join_signals(signals), red]
            for group in groups:
                before = [root.combination for root in found if RAISES not in (kind, root.kind)]
                chosen = fault_location.locate(candidates, group, before)[: 1 if kind == RAISES else None]
                for one in chosen:
                    if kind == CHECK and not one.levels:
                        continue  # checks that fail in every case need not have one cause
                    judged = red if kind != RAISES else group
                    left = fault_location.remove_explained(
                        [*before, *(other for other in chosen if other is not one)], judged
                    )
                    name = fault_location.find_clearest_signal(
                        one, {n: judged[n] for n in judged if fault_location.explains(one, left[n])} or judged
                    )
                    if (
                        not one.levels and _get_check(name) == STATISTICS
                    ):  # the statistics say nothing about cases where only other results were judged
                        others = (s for s in signals.values() if not fault_location.explains(one, s))
                        unlike = _join_rows(s.red | s.green for s in others) & ~(judged[name].red | judged[name].green)
                        one = dataclasses.replace(one, rows=one.rows & ~unlike)
                    found.append(
                        _RootCause(kind, name, fault_location.add_indistinguishable(candidates, one, judged[name]))
                    )
        return found

    def _get_unexplained(self, name: str) -> Signal:
        """Return a signal without the cases whose `out` is wrong; errors and wrong forward results stay unchanged."""
        signal = self._signals[name]
        if _classify_signal(name) in (RAISES, FORWARD):
            return signal
        return Signal(signal.red & ~self._wrong_out, signal.green & ~self._wrong_out)

    @functools.cached_property
    def _wrong_out(self) -> int:
        """The set of cases whose `out` is wrong, as a bit mask."""
        return _join_rows(self._signals[signal].red for signal in OUT if signal in self._signals)

    def _find_explaining(self, name: str) -> tuple[_RootCause, ...]:
        """Find causes that each explain other red cases of a signal, or the first that explains the signal."""
        signal, kind = self._get_unexplained(name), _classify_signal(name)
        able = [
            root
            for root in self._roots
            if (root.signal == name if kind == RAISES else root.kind != RAISES)
            and KINDS.index(root.kind) <= KINDS.index(kind)
        ]
        able = [root for root in able if fault_location.explains(root.combination, signal)]
        left = {
            id(root): signal.remove(_join_rows(other.combination.rows for other in able if other is not root))
            for root in able
        }
        return tuple(root for root in able if fault_location.explains(root.combination, left[id(root)])) or tuple(
            able[:1]
        )

    def build_findings(self) -> list[Finding]:
        """Build all findings: first the explained ones, by kind and by number of records, then the unexplained ones."""
        explained: dict[int, list[Record]] = {}
        left: dict[tuple[str, str], list[Record]] = {}
        for record in self._red:
            if (place := self._find_root(record)) is not None:
                explained.setdefault(place, []).append(record)
            else:
                wrong = (
                    record.verdict == FAIL and not is_repetition(record) and self._rows[record.case] & self._wrong_out
                )
                left.setdefault((FORWARD, "") if wrong else _name_unexplained(record), []).append(record)
        for place, found in list(explained.items()):
            # If no record of this cause has the cause's own kind, drop the cause and list its records as unexplained.
            if not any(classify_record(record) == self._roots[place].kind for record in found):
                for record in explained.pop(place):
                    left.setdefault(_name_unexplained(record), []).append(record)
        made = [self._build_finding(self._roots[place], found) for place, found in explained.items()]
        made += [self._build_unexplained(kind, found) for (kind, _), found in left.items()]
        made = [dataclasses.replace(finding, in_float64=self._find_exactness(finding)) for finding in made]
        return sorted(made, key=lambda x: (not x.is_explained, KINDS.index(x.kind), -len(x.records), x.smallest.key))

    def _find_exactness(self, finding: Finding) -> str:
        """Find what the wrong result of the plainest case is in float64; empty if that was not evaluated."""
        wrong = finding.smallest
        result = get_result(wrong.observable).removesuffix("_with_residuals")
        exact = self._in_float64.get((wrong.case, result))
        if finding.kind not in (FORWARD, GRADIENTS) or wrong.verdict != FAIL or wrong.worst is None or exact is None:
            return ""
        is_wrong = exact.verdict == FAIL and exact.figures.get(BEYOND_ROUNDING, 1.0)
        return WRONG_EXACTLY if is_wrong else ROUNDS_TOO_MUCH

    def _find_root(self, record: Record) -> int | None:
        """Find the root cause of a red record, as an index into `_roots`; None if no cause explains the record.

        A cause that explains the record's own result comes first. Otherwise, a cause that makes other results of the
        same case wrong is taken.
        """
        if record.verdict == UNEXPECTED_PASS or classify_record(record) == UNREPEATABLE:
            return None  # no wrong result explains that the same call gives other numbers
        row, name = self._rows[record.case], _name_signal(record)
        of_case = [place for place, root in enumerate(self._roots) if root.combination.rows & row]
        explaining = self._explained[name]
        if record.verdict != ERROR and row & self._wrong_out:
            explaining = tuple(root for root in self._roots if root.kind == FORWARD)
        elif (
            record.check in CHECKS_WITH_OWN_OPERANDS
        ):  # the check's operands are not those of the case: a cause of the same result is likely
            of_case.sort(key=lambda place: _get_result(self._roots[place].signal) != get_result(record.observable))
            explaining += tuple(
                root for root in self._roots if _get_result(root.signal) == get_result(record.observable)
            )
        for place in of_case:
            if self._roots[place] in explaining:
                return place
        if record.verdict == ERROR:  # the check's own lengths may be why the same line raises
            elsewhere = record.check in CHECKS_WITH_OWN_OPERANDS
            return next((n for n, root in enumerate(self._roots) if elsewhere and root.signal == name), None)
        # In a case with the levels of a fault, `out` may be right by chance while results that depend on it are wrong.
        follows = [
            place for place in of_case if KINDS.index(self._roots[place].kind) < KINDS.index(classify_record(record))
        ]
        if not follows and record.check in CHECKS_WITH_OWN_OPERANDS:
            follows = [place for place, root in enumerate(self._roots) if root.kind in (FORWARD, GRADIENTS)]
            follows.sort(key=lambda place: _get_result(self._roots[place].signal) != get_result(record.observable))
        return next((place for place in follows if self._roots[place].kind != RAISES), None)

    def _build_finding(self, root: _RootCause, found: Sequence[Record]) -> Finding:
        inside, outside, left_out = self._count_shares(root)
        names = list(self._levels)
        levels = tuple(names[number] for number in root.combination.levels)
        own = [
            r for r in self._judged if r.verdict in RED and _name_signal(r) == root.signal and self._has_levels(r, root)
        ]
        check = Counter(record.check for record in own).most_common(1)[0][0]
        own = [record for record in own if record.check == check]
        wrong = {record.case for record in own}
        right = [
            r
            for r in self._judged
            if r.verdict == PASS
            and r.check == check
            and r.case not in wrong
            and (root.kind == RAISES or _name_signal(r) == root.signal)
        ]
        nearest = find_nearest_passing(levels, own, right)
        finding = Finding(
            implementation=self._implementation,
            kind=root.kind,
            levels=levels,
            others=tuple(tuple(names[number] for number in other) for other in root.combination.others),
            located_by=(check, get_result(own[0].observable)),
            records=_sort_own_first(found, root.kind),
            inside=inside,
            outside=outside,
            left_out=left_out,
            cotangent=self._find_cotangents(root, own) if root.kind == GRADIENTS else "",
            smallest=nearest.smallest,
            without=nearest.without,
            passes=nearest.passes,
        )
        return self._add_further_levels(finding, own, right) if finding.is_vague else finding

    def _add_further_levels(self, finding: Finding, own: Sequence[Record], right: Sequence[Record]) -> Finding:
        """Add levels without which the plainest failing case passes, and which all failing cases have."""
        given = finding.levels or ()
        decided = {name for level in given for name in level.fields}
        needed = find_needed_levels(finding.smallest.case, dict.fromkeys(record.case for record in right))
        shared = frozenset.intersection(*(find_levels(record.case) for record in own))
        further = {
            level: case
            for level, case in zip(*needed, strict=True)
            if level in shared and not decided & set(level.fields)
        }
        if not given or not further or _is_near_limit(finding.smallest):
            return finding
        levels = (*given, *further)
        counted = {record.case for record in right if self._rows[record.case] & self._counted_rows}
        asked = sum(set(levels) <= find_levels(case) for case in counted)
        red = finding.inside.red
        return dataclasses.replace(
            finding,
            levels=levels,
            others=(),
            inside=Share(red, red + asked),
            outside=Share(finding.outside.red, finding.outside.asked + finding.inside.asked - red - asked),
            without=(*(finding.without or ("",) * len(given)), *further.values()),
            passes="" if not set(levels) <= find_levels(finding.passes) else finding.passes,
        )

    def _find_cotangents(self, root: _RootCause, own: Sequence[Record]) -> str:
        """Find which cotangents show a fault of gradients, from the cases with its levels; empty if any may.

        A kind of cotangent shows the fault if a gradient is wrong for it. It does not if the same gradients were judged
        for it in these cases, and all are right.
        """
        wrong, right = set[str](), set[str]()
        results = {get_result(record.observable) for record in own}
        for record in self._judged:
            kind = _get_cotangent(record)
            row = self._rows[record.case]
            if kind and row & root.combination.rows & ~self._wrong_out and get_result(record.observable) in results:
                (right if record.verdict == PASS else wrong).add(kind)
        return describe_cotangents(frozenset(wrong), frozenset(right - wrong))

    def _build_unexplained(self, kind: str, found: Sequence[Record]) -> Finding:
        first = min(
            found,
            key=lambda r: (classify_record(r) != kind, rank_plainness(r.case), _rank_signal(_name_signal(r)), r.key),
        )
        same = _name_signal if kind == UNREPEATABLE else get_signal
        asked = {record.case for record in self._judged if same(record) == same(first)}
        red = {record.case for record in found}
        finding = Finding(
            implementation=self._implementation,
            kind=kind,
            levels=None,
            located_by=(first.check, get_result(first.observable)),
            records=_sort_own_first(found, kind),
            inside=Share(len(red), len(asked | red)),
            outside=Share(0, 0),
            smallest=first,
        )
        return self._add_needed_levels(finding) if kind in (FORWARD, GRADIENTS) else finding

    def _add_needed_levels(self, finding: Finding) -> Finding:
        """Add the levels without which the plainest failing case passes, if such cases were judged."""
        first, red = finding.smallest, {record.case for record in finding.records}
        of_signal = [record for record in self._judged if get_signal(record) == get_signal(first)]
        failing = {record.case for record in of_signal if record.verdict in RED}
        passing = dict.fromkeys(record.case for record in of_signal if record.case not in failing)
        levels, without = find_needed_levels(first.case, passing)
        is_shared = 2 * sum(set(levels) <= find_levels(case) for case in red) >= len(red)
        if not levels or not is_shared or _is_near_limit(first):
            return finding
        asked = {case for case in (*failing, *passing) if self._rows[case] & self._counted_rows} | red
        having = {case for case in asked if set(levels) <= find_levels(case)}
        return dataclasses.replace(
            finding,
            levels=levels,
            inside=Share(len(red & having), len(having)),
            outside=Share(len(red - having), len(asked - having)),
            without=without,
        )

    def _has_levels(self, record: Record, root: _RootCause) -> bool:
        return bool(self._rows[record.case] & root.combination.rows)

    def _count_shares(self, root: _RootCause) -> tuple[Share, Share, int]:
        """Count the failing cases with a cause's levels, those without, and those left out as others explain them."""
        signal, rows = self._counted.get(root.signal, Signal(0, 0)), root.combination.rows
        others = (
            _join_rows(x.combination.rows for x in self._explained[root.signal] if x is not root) & ~rows & signal.red
        )
        if root.kind in (GRADIENTS, CHECK):
            others |= self._wrong_out
        asked = (signal.red | signal.green) & ~others
        inside, outside = asked & rows, asked & ~rows
        return (
            Share((signal.red & inside).bit_count(), inside.bit_count()),
            Share((signal.red & outside).bit_count(), outside.bit_count()),
            (others & (signal.red | signal.green)).bit_count(),
        )


def _name_signal(record: Record) -> str:
    """Return the name of the signal that a record belongs to: `check/result`, or the line of code that raises."""
    if record.verdict == ERROR or is_wrong_form(record):
        line = find_raising_line(record.reason)
        return f"{RAISES} {line['place'] if line else _CASE_DETAILS.sub('#', record.reason)}"
    if is_repetition(record):
        return f"{get_signal(record)} {UNREPEATABLE}"
    behind = f" {BEHIND_MASK}" if is_mask_poison(record) else ""
    return f"{get_signal(record)}{behind}"


def _is_near_limit(record: Record) -> bool:
    """Return whether errors exceed the limit so little that any change of the case may make it pass."""
    if record.ratio is None or not record.limit:
        return False
    is_small = record.ratio < _CLEARLY_WRONG * record.limit
    return is_small and (record.rms is None or not record.rms_limit or record.rms < _CLEARLY_WRONG * record.rms_limit)


def _classify_signal(signal: str) -> str:
    """Return the kind of the findings that a signal of this name can lead to."""
    if signal.startswith(RAISES):
        return RAISES
    if signal.endswith(UNREPEATABLE):
        return UNREPEATABLE
    if signal in PLAIN_CALL:
        return FORWARD
    if is_about_gradients(signal):
        return GRADIENTS
    return BEHIND_MASK if signal.endswith(BEHIND_MASK) else CHECK


def _get_cotangent(record: Record) -> str:
    """Return the kind of cotangent for which a check judges gradients; empty for any other record."""
    if record.check != "gradients_part":
        return {"gradients": "out", "gradients_lse": "both"}.get(record.check, "")
    return record.observable.rpartition(".")[2]


def describe_cotangents(wrong: frozenset[str], right: frozenset[str]) -> str:
    """Describe for which cotangents gradients are wrong, as the end of a sentence; empty if the kind does not matter.

    Args:
      wrong: the kinds of cotangents for which gradients are wrong: `out`, `both` (of `out` and of `logsumexp`), `lse`
        (of `logsumexp` alone), `row`, `head` or `empty`.
      right: the kinds for which they are right in the same cases.
    """
    of_out = {"out", "row", "head"}
    if not wrong or not right:
        return ""
    if wrong <= {"both", "lse"} and right & of_out:
        if wrong == {"both"} and "lse" in right:
            return "where out and logsumexp both have a cotangent"
        if wrong == {"lse"} and "both" in right:
            return "where only logsumexp has a cotangent"
        return "where the cotangent of logsumexp is not zero"
    if wrong == {"empty"}:
        return "where only rows that attend to nothing have a cotangent"
    if wrong <= {"row", "head"} and right & {"out", "both"}:
        return "where most of the cotangent is zero"
    if wrong <= of_out and "both" in right:
        return "where logsumexp has no cotangent"
    return ""


def _rank_signal(signal: str) -> tuple[int, str]:
    return (PLAIN_CALL.index(signal) if signal in PLAIN_CALL else len(PLAIN_CALL), signal)


def _get_check(signal: str) -> str:
    return signal.partition("/")[0]


def _get_result(signal: str) -> str:
    return signal.partition("/")[2]


def _join_signals(signals: Mapping[str, Signal]) -> dict[str, Signal]:
    """Join signals: those of kind `CHECK` by check, and all other signals into one.

    A joined signal is red in a case if any of its signals is red there. It is green if one is green and none is red.
    """
    groups: dict[str, list[Signal]] = {}
    for name, signal in signals.items():
        groups.setdefault(_get_check(name) if _classify_signal(name) == CHECK else "", []).append(signal)
    red = {name: _join_rows(signal.red for signal in group) for name, group in groups.items()}
    return {name: Signal(red[name], _join_rows(s.green for s in group) & ~red[name]) for name, group in groups.items()}


def _name_unexplained(record: Record) -> tuple[str, str]:
    """Return the kind and the name by which unexplained records are grouped into findings.

    Depending on the kind, the name is the line that raises, the check, the reason of a known failure, or empty.
    """
    kind = classify_record(record)
    by = {RAISES: _name_signal(record), CHECK: record.check, UNEXPECTED: record.reason}
    return kind, by.get(kind, "")


def _sort_own_first(found: Iterable[Record], kind: str) -> tuple[Record, ...]:
    return tuple(sorted(found, key=lambda record: (classify_record(record) != kind, record.key)))


def _join_rows(rows: Iterable[int]) -> int:
    return functools.reduce(operator.or_, rows, 0)
