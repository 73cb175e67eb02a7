"""The alternatives of each choice in the case space, the plainest first, as far as they are supported.

An implementation says case by case what it supports. If cases were drawn from everything and then filtered, a kernel
that supports little would have almost none left. So each alternative is first tried alone, on a case that is otherwise
plain. An alternative that is never supported is not drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from cases.case import DISTRIBUTIONS, DTYPES, PHASES, Case
from cases.case_space.clue_numbers import NO_CLUES, Clues
from cases.mask_spec import KINDS
from cases.operand_registry import OPTIONAL
from cases.score_functions import CAPPING

Supports = Callable[[Case], "str | None"]
"""Returns why a case is not wanted, or None if it is."""

MASKS: Mapping[str, str] = {kind.name: kind.example for kind in KINDS}
"""An example spec that fits the plain case, by kind of mask, the plainest first."""
_OFFSETS = {kind.name: f"{kind.example}-o3" for kind in KINDS if kind.offset == "any"}
_JOINTS = {"_and_": "causal_and_window-l31-r7", "_or_": "causal_or_window-l7-r7"}
# Some kernels take only lengths and depths that are multiples of a block. The first supported step is used. Each step
# has a size that is tried.
_LENGTH_STEPS = {1: 77, 8: 72, 128: 128}
_DEPTH_STEPS = {1: 37, 8: 40, 64: 64, 128: 128}


class NothingToDraw(ValueError):  # noqa: N818 -- a statement, as the message is
    """No case is supported, however plain."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """The alternatives to draw cases from; every tuple has the plainest one first.

    Attributes:
      phases, dtypes, masks, distributions: as in `Case`.
      operands: by field of `Case`, its possible values; for a number, one that stands for all.
      offsets: the kinds of mask that may have an offset.
      joints: how masks may be combined.
      grouped: whether query heads may share a key/value head.
      unequal_lengths, v_head_dim: whether T may differ from S, and V from H.
      length_step, depth_step: lengths and depths are multiples of these.
      clues: numbers found in the implementation; sizes beside them are drawn too.
    """

    phases: tuple[str, ...]
    dtypes: tuple[str, ...]
    masks: tuple[str, ...]
    offsets: tuple[str, ...]
    joints: tuple[str, ...]
    grouped: tuple[bool, ...]
    unequal_lengths: tuple[bool, ...]
    v_head_dim: tuple[bool, ...]
    length_step: int
    depth_step: int
    operands: Mapping[str, tuple[Any, ...]]
    distributions: tuple[str, ...]
    clues: Clues = NO_CLUES


def build_space(supports: Supports = lambda case: None, phases: tuple[str, ...] = PHASES) -> Space:
    """Build the space that `supports` leaves of the given phases.

    Raises:
      NothingToDraw: no plain case is supported; the message has the reason for the plainest.
    """
    base = _find_base(supports, phases)

    def is_supported(**changes: Any) -> bool:
        """Return whether the plain case with these changes is supported."""
        if _is_impossible(dataclasses.asdict(base) | changes):
            return False
        return supports(dataclasses.replace(base, **changes)) is None

    def keep_supported(field: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values of the field that are supported."""
        return tuple(value for value in values if is_supported(**{field: value}, **_choose_phase(field, value, base)))

    return Space(
        phases=tuple(phase for phase in phases if is_supported(**_build_phase_fields(phase))),
        dtypes=keep_supported("dtype", DTYPES),
        masks=tuple(kind for kind, spec in MASKS.items() if is_supported(mask=spec)),
        offsets=tuple(kind for kind, spec in _OFFSETS.items() if is_supported(mask=spec)),
        joints=tuple(joint for joint, spec in _JOINTS.items() if is_supported(mask=spec)),
        grouped=tuple(on for on in (False, True) if is_supported(num_q_heads=4 if on else 2, num_kv_heads=2)),
        unequal_lengths=tuple(on for on in (False, True) if is_supported(kv_length=base.q_length * (2 if on else 1)))
        or (True,),
        v_head_dim=tuple(on for on in (False, True) if is_supported(v_head_dim=base.head_dim * (2 if on else 1))),
        length_step=_find_step(
            _LENGTH_STEPS, lambda n: is_supported(q_length=n, kv_length=n, mask=_adapt_mask(base.mask, n))
        ),
        depth_step=_find_step(_DEPTH_STEPS, lambda n: is_supported(head_dim=n, v_head_dim=n)),
        operands={o.field: keep_supported(o.field, (o.absent, *o.levels)) or (o.absent,) for o in OPTIONAL},
        distributions=tuple(
            name
            for name in DISTRIBUTIONS
            if is_supported(distribution=name, soft_cap=30.0 if name == "knee" else base.soft_cap)
        ),
    )


def _adapt_mask(mask: str, length: int) -> str:
    """Return the plain case's mask at another length: a balanced one needs a length that divides."""
    return "causal" if mask == MASKS["balanced"] and length % 4 else mask


def _find_step(steps: Mapping[int, int], supported: Callable[[int], bool]) -> int:
    """Return the smallest step that is supported."""
    return next((step for step, probe in steps.items() if supported(probe)), max(steps))


def _choose_phase(field: str, value: Any, base: Case) -> dict[str, Any]:
    """Choose the phase of a case with this value where it cannot be that of the plain one: a cache is not trained."""
    return {"phase": "prefill"} if field == "kv_cache" and value and base.phase == "train" else {}


def _build_phase_fields(phase: str) -> dict[str, Any]:
    """Return the fields of a phase."""
    return {"phase": phase, "q_length": 1} if phase == "decode" else {"phase": phase}


def _is_impossible(changed: Mapping[str, Any]) -> bool:
    """Return whether no case can have these fields.

    Examples are one query in a balanced mask, a knee without a cap, two caps, and training on a cache.
    """
    if changed.get("kv_cache") and changed.get("phase", "train") == "train":
        return True
    if changed.get("score") == CAPPING and changed.get("soft_cap") is not None:
        return True
    one_query = changed.get("q_length") == 1 and changed.get("mask") == MASKS["balanced"]
    return one_query or (changed.get("distribution") == "knee" and changed.get("soft_cap") is None)


def _find_base(supports: Supports, phases: tuple[str, ...]) -> Case:
    """Find the plainest supported case, with one or two changes if need be."""
    plain = Case()
    first: str | None = None
    changes: list[dict[str, Any]] = [
        *(_build_phase_fields(phase) for phase in phases),
        *({"dtype": dtype} for dtype in DTYPES),
        *({"mask": spec} for spec in (*MASKS.values(), *_OFFSETS.values(), *_JOINTS.values())),
        *({operand.field: level} for operand in OPTIONAL for level in operand.levels),
        {"num_q_heads": 4},
        *({"distribution": name} for name in DISTRIBUTIONS if name != "knee"),
        {"distribution": "knee", "soft_cap": 30.0},
        {"q_length": 512, "kv_length": 512},
        {"head_dim": 128, "v_head_dim": 128},
    ]
    for moves in itertools.chain(((),), ((change,) for change in changes), itertools.combinations(changes, 2)):
        changed = {name: value for move in moves for name, value in move.items()}
        if changed.get("phase", plain.phase) not in phases or _is_impossible(changed):
            continue
        case = dataclasses.replace(plain, **changed)
        reason = supports(case)
        if reason is None:
            return case
        first = first or reason
    raise NothingToDraw(first or f"no phase to draw from: {phases}")
