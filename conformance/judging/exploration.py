"""Describe the result of an exploration: the smallest wrong case, and how far it got."""

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
    """What an exploration found, and how far it got.

    Attributes:
      records: those of every judged drawn case that was right, and of the smallest wrong one.
      failing: the smallest wrong case, or None.
      first: the wrong case as it was drawn.
      judged: number of cases judged while drawing.
      unjudged: number of cases that do not discriminate, or that no check could judge.
      declined: number of drawn cases that the implementation does not support.
      shrinks: number of cases judged to shrink the first wrong one.
      shrunk: whether shrinking ran to its end.
      reached: number of judged cases with each feature, distribution of values and phase.
      clues: the numbers found in the implementation's source.
      used: the clues near which judged cases had a size or a number, each with the side.
      beyond: number of pairs of marks (`cases.case_space.novelty`) of judged cases that no case of the grids has.
      seconds: duration.
      interrupted: whether a signal stopped it.
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
    """A case that an exploration has judged, and whether that was while shrinking."""

    case: Case
    records: Sequence[Record]
    shrinking: bool


def compute_plainness(case: Case) -> tuple[int, int, int, str]:
    """Return a sort key that puts the plainest case first: by the number of unusual properties, then by size."""
    unusual = (
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
    return sum(unusual) + terms, size, len(case.id), case.id


def describe_exploration(exploration: Exploration, seed: int) -> list[str]:
    """Describe an exploration to a person, one line for each fact that its records do not have."""
    rate = exploration.judged / max(exploration.seconds, 1e-3)
    lines = [
        f"explored {exploration.judged} cases in {exploration.seconds:.0f} s ({rate:.2f} a second) "
        f"from seed {seed}; "
        f"{exploration.unjudged} more could not be judged, {exploration.declined} drawn ones are not supported",
        f"reached {', '.join(f'{name} {count}' for name, count in exploration.reached.most_common()) or 'nothing'}",
    ]
    lines += [
        f"clues: {exploration.clues.told()}"
        + (f"; tried around them: {', '.join(exploration.used)}" if exploration.used else ""),
        f"{exploration.beyond} pairs of properties that the grid does not combine",
    ]
    if exploration.failing is not None:
        stopped = "" if exploration.shrunk else ", stopped before the end"
        lines.append(f"wrong as drawn: {exploration.first}")
        lines.append(f"smallest found: {exploration.failing} ({exploration.shrinks} others tried{stopped})")
    return lines
