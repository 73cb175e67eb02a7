"""What an exploration found: the smallest wrong case, how far it got, and how a person is told of it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from cases.case import Case
from cases.case_space.clue_numbers import Clues
from cases.operand_registry import REMOVABLE
from conformance.records import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exploration:
    """What was found, and how far the exploration got.

    Attributes:
      records: of every case judged while drawing that was not wrong, and of the smallest wrong one.
      failing: the smallest wrong case, or none.
      first: the wrong case as it was drawn.
      judged: how many cases were judged while drawing.
      unjudged: how many do not discriminate, or could not be judged by any check.
      declined: how many cases were drawn that the implementation does not support.
      shrinks: cases judged to shrink the first one.
      shrunk: whether shrinking ran to its end.
      reached: how many judged cases had each feature, value distribution and phase.
      clues: the numbers that the implementation shows.
      used: beside how many of them, and on which side, some judged case had a size or a number.
      beyond: how many pairs of marks (`cases.case_space.novelty`) judged cases had that no case of the grids has.
      seconds: duration.
      interrupted: whether it was stopped by hand.
    """

    records: list[Record]
    failing: Case | None
    first: Case | None
    judged: int
    unjudged: int
    declined: int
    shrinks: int
    shrunk: bool
    reached: collections.Counter[str]
    clues: Clues
    used: tuple[str, ...]
    beyond: int
    seconds: float
    interrupted: bool


@dataclasses.dataclass(frozen=True)
class JudgedCase:
    """What an exploration tells while it goes on: a judged case, and whether it was met while shrinking."""

    case: Case
    records: Sequence[Record]
    shrinking: bool


def compute_plainness(case: Case) -> tuple[int, int, int, str]:
    """Sorts cases, the plainest first: by how many things are out of the ordinary, then by size."""
    odd = (
        case.phase != "train",
        case.dtype != "f32",
        case.num_q_heads != case.num_kv_heads,
        case.q_length != case.kv_length,
        case.head_dim != case.v_head_dim,
        *(getattr(case, operand.field) != operand.absent for operand in REMOVABLE),
        case.distribution != "normal",
    )
    terms = 0 if case.mask == "full" else 1 + case.mask.count("_and_") + case.mask.count("_or_")
    size = case.batch * case.num_q_heads * (case.q_length + case.kv_length) * (case.head_dim + case.v_head_dim)
    return sum(odd) + terms, size, len(case.id), case.id


def describe_exploration(found: Exploration, seed: int) -> list[str]:
    """What a person should know of an exploration, beside its records: one line each."""
    rate = found.judged / max(found.seconds, 1e-3)
    lines = [
        f"explored {found.judged} cases in {found.seconds:.0f} s ({rate:.2f} a second) "
        f"from seed {seed}; "
        f"{found.unjudged} more could not tell right from wrong, {found.declined} drawn ones are not supported",
        f"reached {', '.join(f'{name} {count}' for name, count in found.reached.most_common()) or 'nothing'}",
    ]
    lines += [
        f"clues: {found.clues.told()}" + (f"; tried beside them: {', '.join(found.used)}" if found.used else ""),
        f"{found.beyond} pairs that the grid has not combined",
    ]
    if found.failing is not None:
        stopped = "" if found.shrunk else ", stopped before the end"
        lines.append(f"wrong as drawn: {found.first}")
        lines.append(f"smallest found: {found.failing} ({found.shrinks} others tried{stopped})")
    return lines
