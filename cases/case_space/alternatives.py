"""Find the alternatives that an implementation supports for each field of a random case, the plainest first.

An implementation says only for a whole case whether it supports the case. If cases were drawn from everything and then
filtered, almost none would be left for a kernel that supports little. So `build_space` first tries each alternative
alone, on an otherwise plain case. `case_strategies` then draws only from the supported alternatives.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from cases.case import Case
from cases.case_fields import DISTRIBUTIONS, DTYPES, PHASES
from cases.case_space.code_numbers import NO_CODE_NUMBERS, CodeNumbers
from cases.mask_spec import KINDS
from cases.operand_registry import OPTIONAL
from cases.score_functions import CAPPING

Supports = Callable[[Case], "str | None"]
"""A function that returns why a case is not supported, or None if it is."""

MASKS: Mapping[str, str] = {kind.name: kind.example for kind in KINDS if kind.example}
"""For each kind of mask, an example spec that fits the plain case; the plainest kind comes first."""
_OFFSETS = {kind.name: f"{kind.example}-o3" for kind in KINDS if kind.offset == "any"}
_JOINTS = {"_and_": "causal_and_window-l31-r7", "_or_": "causal_or_window-l7-r7"}
# Some kernels take only lengths and depths that are multiples of a block, the step. Each entry is a step and the size
# that is tried for it: a multiple of this step, but not of the next. The first step whose size is supported is used.
_LENGTH_STEPS = {1: 77, 8: 72, 128: 128}
_DEPTH_STEPS = {1: 37, 8: 40, 64: 64, 128: 128}


class NothingToDraw(ValueError):
    """Raised if not even one of the plainest cases is supported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """The alternatives to draw cases from; every tuple has the plainest one first.

    Attributes:
      phases, dtypes, distributions: the supported values of the fields of `Case`.
      masks: the supported kinds of masks.
      operands: by the field of `Case`, the supported values of an optional operand. For an operand that is a number,
        one value stands for all numbers.
      offsets: the kinds of masks that may have an offset.
      joints: the supported ways to combine two masks in a mask spec, `_and_` and `_or_`.
      grouped: the supported answers to whether query heads share a key/value head.
      unequal_lengths: the supported answers to whether T differs from S.
      v_head_dim: the supported answers to whether V differs from H.
      length_step, depth_step: all lengths, and all depths, are multiples of this number.
      code_numbers: numbers found in the implementation; sizes near them are drawn too.
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
    code_numbers: CodeNumbers = NO_CODE_NUMBERS


def build_space(supports: Supports = lambda case: None, phases: tuple[str, ...] = PHASES) -> Space:
    """Build the space of the alternatives for these phases. Raises `NothingToDraw` if no plain case is supported."""
    base = _find_base(supports, phases)

    def is_supported(**changes: Any) -> bool:
        """Return whether the plain case with these changes is supported."""
        if _is_impossible(dataclasses.asdict(base) | changes):
            return False
        return supports(dataclasses.replace(base, **changes)) is None

    def keep_supported(field: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values of `field` with which the plain case is supported."""
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
    """Adapt the plain case's mask to another length: `causal` replaces `balanced` unless 4 divides the length."""
    return "causal" if mask == MASKS["balanced"] and length % 4 else mask


def _find_step(steps: Mapping[int, int], supported: Callable[[int], bool]) -> int:
    """Return the first step whose size is supported, or the largest step if none is."""
    return next((step for step, probe in steps.items() if supported(probe)), max(steps))


def _choose_phase(field: str, value: Any, base: Case) -> dict[str, Any]:
    """Return the phase to change to: a case with a quantised cache cannot be in training, so it becomes prefill."""
    return {"phase": "prefill"} if field == "kv_cache" and value and base.phase == "train" else {}


def _build_phase_fields(phase: str) -> dict[str, Any]:
    """Return the fields of a case in this phase; decode has one query."""
    return {"phase": phase, "q_length": 1} if phase == "decode" else {"phase": phase}


def _is_impossible(changed: Mapping[str, Any]) -> bool:
    """Return whether no case can have this combination of fields.

    These combinations are impossible:

    - a balanced mask with one query;
    - the distribution `knee` without a soft cap;
    - a soft cap beside a score function that caps;
    - training with a quantised cache.
    """
    if changed.get("kv_cache") and changed.get("phase", "train") == "train":
        return True
    if changed.get("score") in CAPPING and changed.get("soft_cap") is not None:
        return True
    one_query = changed.get("q_length") == 1 and changed.get("mask") == MASKS["balanced"]
    return one_query or (changed.get("distribution") == "knee" and changed.get("soft_cap") is None)


def _find_base(supports: Supports, phases: tuple[str, ...]) -> Case:
    """Find the plainest supported case: `Case()`, or `Case()` with one or two changes."""
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
