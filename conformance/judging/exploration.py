"""Define and describe the result of an exploration (`conformance.judging.explorer`).

The result has the smallest wrong case, if there was one, and says how much of the case space was tried.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from cases.case import Case
from cases.case_space.clue_numbers import Clues
from cases.operand_registry import REMOVABLE
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exploration:
    """The result of an exploration: the smallest wrong case, and how much was tried.

    Attributes:
      records: the records of every drawn case that was right, and of the smallest wrong case.
      failing: the smallest wrong case, or None if no case was wrong.
      first: the wrong case as it was drawn, before shrinking; None if no case was wrong.
      unjudged: number of cases that do not discriminate, or that no check could judge.
      declined: number of drawn cases that the implementation does not support.
      shrinks: number of cases judged to shrink the first wrong one.
      shrunk: whether shrinking ran to its end.
      reached: number of judged cases with each feature, distribution of values and phase.
      used: the clues that were tried, with the size or soft cap of a judged case that was at or beside the clue.
      beyond: number of pairs of properties (marks, `cases.case_space.novelty`) that judged cases combine and no case of
        the grids does.
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
    """A case that an exploration has judged, its records, and whether it was judged to shrink a wrong case."""

    case: Case
    records: Sequence[Record]
    shrinking: bool


def compute_plainness(case: Case) -> tuple[int, int, int, str]:
    """Return a sort key that puts the plainest case first: by number of non-default properties, then by size."""
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
    """Describe an exploration for people: one line for each fact that its records do not contain."""
    rate = exploration.judged / max(exploration.seconds, 1e-3)
    lines = [
        f"explored {exploration.judged} cases in {exploration.seconds:.0f} s ({rate:.2f} a second) "
        f"from seed {seed}; "
        f"{exploration.unjudged} more could not be judged, {exploration.declined} drawn ones are not supported",
        f"reached {', '.join(f'{name} {count}' for name, count in exploration.reached.most_common()) or 'nothing'}",
    ]
    lines += [
        f"clues: {exploration.clues.format_numbers()}"
        + (f"; tried around them: {', '.join(exploration.used)}" if exploration.used else ""),
        f"{exploration.beyond} pairs of properties that the grid does not combine",
    ]
    if exploration.failing is not None:
        stopped = "" if exploration.shrunk else ", stopped before the end"
        lines.append(f"wrong as drawn: {exploration.first}")
        lines.append(f"smallest found: {exploration.failing} ({exploration.shrinks} others tried{stopped})")
    return lines


def build_exploration_runner(settings: Settings, options: Sequence[str]) -> Runner:
    """Build an exploration's runner, which judges all failures again; unexpected passes do not count as wrong."""
    lenient = tuple(dataclasses.replace(entry, some=True) for entry in settings.expected_failures)
    return Runner(dataclasses.replace(settings, expected_failures=lenient), confirmed=math.inf, options=options)
