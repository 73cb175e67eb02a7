"""A suspicion becomes a statement: the same case fails with a level, and passes without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from conformance.records import Record
from reports.causes.levels import Level, fields_of, levels_of, oddities, plainness


@dataclasses.dataclass(frozen=True)
class Compared:
    """The plainest case that fails with some levels, and what was seen beside it.

    Attributes:
      smallest: its record.
      without: for each level, a case that passes and is otherwise the same, empty where there is none.
      passes: a case that passes, though it has all levels and is plain otherwise; empty if there is none.
    """

    smallest: Record
    without: tuple[str, ...] = ()
    passes: str = ""


def compared(levels: Sequence[Level], failing: Sequence[Record], passing: Iterable[Record]) -> Compared:
    """The plainest of the failing cases, one that passes without each of the levels if there is any."""
    ranked = sorted(failing, key=lambda record: (plainness(record.case), record.key))
    right = [record.case for record in passing]
    partly: Compared | None = None
    for record in ranked if levels else ():
        if fields_of(record.case) is None:
            continue
        beside = tuple(_same_without(record.case, level, right) for level in levels)
        if all(beside):
            return Compared(record, beside)
        if any(beside) and partly is None:
            partly = Compared(record, beside)
    passes = _plain(levels, right)
    return partly if partly is not None and not passes else Compared(ranked[0], passes=passes)


def _same_without(case: str, level: Level, right: Iterable[str]) -> str:
    """A case that passes, lacks the level, and differs in nothing but what decides it."""
    wanted = _but(fields_of(case) or {}, level.fields)
    return next(
        (x for x in right if level not in levels_of(x) and _but(fields_of(x) or {}, level.fields) == wanted), ""
    )


def _but(fields: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if name not in names}


def _plain(levels: Sequence[Level], right: Iterable[str]) -> str:
    """A case that passes, and has all the levels and nothing else out of the ordinary."""
    wanted, deciding = set(levels), {name for level in levels for name in level.fields}
    found = [x for x in right if wanted <= levels_of(x) and oddities(x) <= deciding]
    return min(found, key=plainness, default="") if levels else ""
