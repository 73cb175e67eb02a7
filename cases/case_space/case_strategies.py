"""Hypothesis strategies that draw random cases for the command `explore`, beyond the fixed values of the grid.

Each value is drawn so that it fits the values drawn before it. Hypothesis shrinks a case towards the smallest and
plainest: one query, one key, one head, f32, no mask and no optional operand.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

from hypothesis import strategies as st

from cases.case import Case
from cases.case_fields import PHASES
from cases.case_space.alternatives import NothingToDraw, Space, Supports, build_space
from cases.case_space.code_numbers import NO_CODE_NUMBERS, CodeNumbers
from cases.mask_spec import KINDS
from cases.masks import Mask
from cases.operand_registry import ABSENCE_IGNORED
from cases.optional_operands.bias_operand import HIDING
from cases.quantization import split_level
from cases.score_functions import CAPPING
from cases.storage_forms.form_cases import Caches, FormCases, load_all_form_cases

LONGEST = 600  # the longest length that is drawn without a code number
_USUAL = 300  # the longest length that is drawn often
# Time and memory of the oracle grow with B * N * T * S. Heads and batch rows are drawn so that the product stays below
# this, since a case takes seconds beyond it.
_PAIRS = 150_000
_MOST_BATCH = 3
_MOST_HEADS = 3
_LARGEST_GROUP = 4
_DEPTHS = (8, 136)
_USUAL_DEPTHS = (16, 32, 64, 72, 128)
_BLOCKS = (32, 64, 128)
# The longest length with the distribution `huge`. Its logits of 7e4 round so coarsely in f32 that probabilities change
# by 1%. Among more keys, such an error hides a fault in one key.
_LONGEST_HUGE = 128
_MANY_QUERIES = 16  # the fewest queries of a case whose values have the distribution `levels`
# Limits that keep cases cheap. Lengths near a code number (a number found in the kernel) may be long. `_MOST_PAIRS`
# bounds T * S, and such cases have few heads. If a length is above `_LONG`, depths are small.
_MOST_PAIRS = 1_400_000
_LONG = 2048
_LITTLE_DEPTHS = (8, 16, 64, 128)  # the first two supported ones are used
_BRIEF = (1, 16, 40, 64, 100, 128)  # lengths of the shorter side if the other is long
_MOST_COUNTED = {"batch": 9, "heads": 34, "depth": 272}
# The usual magnitude of the largest logits at scale 1 and usual depths: a code number is divided by it to give a scale.
_LOGIT = 16
_LARGEST_LOGIT = 4000.0
_COMMON_MASKS = ("full", "causal", "window", "lengths")
_OTHER_DEPTHS = (80, 96, 160, 192, 256)

_T = TypeVar("_T")


def draw_cases(
    supports: Supports = lambda case: None,
    phases: tuple[str, ...] = PHASES,
    code_numbers: CodeNumbers = NO_CODE_NUMBERS,
) -> st.SearchStrategy[Case]:
    """Return the strategy of cases of the given phases that `supports` accepts.

    Args:
      supports: returns why a case is not supported, or None if it is.
      phases: the phases to draw from.
      code_numbers: numbers found in a kernel; sizes, masks, caps and scales near them are drawn too.

    Raises:
      cases.case_space.alternatives.NothingToDraw: not even one of the plainest cases is supported.
    """
    try:
        within = dataclasses.replace(build_space(supports, phases), code_numbers=code_numbers)
    except NothingToDraw:
        # An implementation that takes operands in a storage form supports no dense case.
        forms = load_all_form_cases().values()
        form = next((form for form in forms if _list_supported_caches(form, supports)), None)
        if form is None or supports(Case()) is None:
            raise
        drawn = form.draw_cases(phases, _list_supported_caches(form, supports))
        return drawn.filter(lambda case: supports(case) is None)
    return draw_any_case(within).filter(lambda case: supports(case) is None)


def _list_supported_caches(form: FormCases, supports: Supports) -> Caches:
    """Return the formats of caches with which the plain case of a storage form is supported."""
    return tuple(
        cache for cache in form.caches if supports(dataclasses.replace(form.plain, **split_level(cache))) is None
    )


@st.composite
def draw_any_case(draw: st.DrawFn, within: Space) -> Case:
    """Draw a case with dense operands from the alternatives of `within`."""
    phase = draw(_draw_seldom(within.phases))
    dtype = draw(st.sampled_from(within.dtypes))
    q_length, kv_length = draw(draw_lengths(phase, within))
    batch, num_q_heads, num_kv_heads = draw(draw_heads(q_length * kv_length, within))
    long = max(q_length, kv_length) > _LONG
    depth = _draw_small_depth(within) if long else _draw_depth(within)
    head_dim = draw(depth)
    other_depth = draw(st.sampled_from(within.v_head_dim))
    mask = draw(draw_mask_specs(batch, q_length, kv_length, within))
    # Leave each operand out in at least half of the draws, so that cases do not have too many operands at once.
    operands: dict[str, Any] = {}
    for field, levels in within.operands.items():
        if field == "kv_cache" and phase == "train":  # a quantised cache has no gradients
            continue
        if field in ABSENCE_IGNORED and len(levels) == 1:  # so that other kernels' cases do not depend on it
            continue
        level = draw(_draw_seldom(levels))
        operands[field] = draw(_draw_number(field, within)) if level is not None and field in _NUMBERS else level
    if operands["soft_cap"] is not None and operands.get("score") in CAPPING:
        operands["score"] = None  # a case has one cap
    capped = operands["soft_cap"] is not None
    flat = capped or operands.get("score") in CAPPING
    if operands["bias"] in HIDING and flat:
        operands["bias"] = "bias"  # under a cap, minus infinity hides nothing
    huge = not flat and not operands["sinks"] and phase == "train" and max(q_length, kv_length) <= _LONGEST_HUGE
    # The distribution `levels` has logits of several magnitudes and needs a query for each. A soft cap would flatten
    # them, and a sink would get all of the weight or none.
    leveled = not flat and not operands["sinks"] and phase == "train" and q_length >= _MANY_QUERIES
    # Gates of a MoBA mask at low logits round by more than they differ.
    low = not flat and "moba" not in mask
    fitting = {"knee": capped, "huge": huge, "levels": leveled, "low": low, "apart": not flat}
    return Case(
        phase=phase,
        dtype=dtype,
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=draw(depth) if other_depth else head_dim,
        mask=mask,
        distribution=draw(st.sampled_from([name for name in within.distributions if fitting.get(name, True)])),
        seed=draw(st.integers(0, 999)),
        **operands,
    )


@st.composite
def draw_lengths(draw: st.DrawFn, phase: str, within: Space) -> tuple[int, int]:
    """Draw T and S: one query in decode, no more queries than keys in prefill."""
    step = within.length_step
    kv_length = draw(_draw_length(within))
    unequal = draw(st.sampled_from(within.unequal_lengths))
    if phase == "decode":  # after the plain case's draws: Hypothesis takes a case with fewer draws as smaller
        return 1, kv_length
    if not unequal:
        return (
            (kv_length, kv_length)
            if kv_length**2 <= _MOST_PAIRS
            else (_draw_short_length(within), _draw_short_length(within))
        )
    most = max(1, _MOST_PAIRS // kv_length // step) * step
    if phase == "prefill":
        return min(most, step * draw(st.integers(1, kv_length // step))), kv_length
    q_length = draw(_draw_length(within))
    if q_length <= most:
        return q_length, kv_length
    # Both are long: shorten one of them.
    brief = _draw_short_length(within, min(most, draw(st.sampled_from(_BRIEF))))
    return (q_length, brief) if draw(st.booleans()) else (brief, kv_length)


def _draw_short_length(within: Space, length: int = 1) -> int:
    """Round `length` up to a multiple of the supported step of lengths."""
    return -(-length // within.length_step) * within.length_step


def _draw_length(within: Space) -> st.SearchStrategy[int]:
    """Return the strategy of lengths, mostly up to 300, sometimes up to 600.

    Multiples of usual block sizes, their neighbours, and lengths near code numbers are drawn more often than other
    lengths.
    """
    step = within.length_step
    if step > 1:
        usual = st.integers(1, max(1, LONGEST // step)).map(lambda n: n * step)
        beside = sorted({-(-x // step) * step for x in within.code_numbers.lengths + within.code_numbers.far})
        return usual if not beside else st.one_of(usual, st.sampled_from(beside))
    usual = st.integers(1, _USUAL)
    ways = [usual, _draw_near_block(), _draw_near_block(), st.integers(1, 24), st.integers(1, LONGEST)]
    if within.code_numbers.integers:
        ways += [st.sampled_from(within.code_numbers.exact)] * 4 + [st.sampled_from(within.code_numbers.lengths)] * 3
    if far := within.code_numbers.far:
        ways += [st.sampled_from(far)] * 2
    return st.one_of(*ways)


@st.composite
def _draw_near_block(draw: st.DrawFn) -> int:
    """Draw a multiple of a usual block size, or one more or less; there kernels often get the last block wrong."""
    block = draw(st.sampled_from(_BLOCKS))
    return block * draw(st.integers(1, _USUAL // block)) + draw(st.sampled_from((0, 1, -1)))


@st.composite
def draw_heads(draw: st.DrawFn, pairs: int, within: Space) -> tuple[int, int, int]:
    """Draw B, N and K, so that B * N * T * S stays small; `pairs` is T * S."""
    room = max(1, _PAIRS // pairs)
    num_kv_heads = draw(_draw_count("heads", _MOST_HEADS, room, within))
    fewest = 1 if False in within.grouped else 2
    grouped = draw(st.sampled_from(within.grouped))
    group = draw(_draw_count("heads", _LARGEST_GROUP, room // num_kv_heads, within)) if grouped else 1
    batch = draw(_draw_count("batch", _MOST_BATCH, room // (num_kv_heads * group), within))
    return batch, num_kv_heads * max(fewest, group), num_kv_heads


def _draw_count(of: str, usual: int, room: int, within: Space) -> st.SearchStrategy[int]:
    """Return the strategy of counts of heads or batch rows: at most `usual` and `room`, or near a code number.

    Args:
      of: `heads` or `batch`, which decides the largest count near a code number.
      usual: the largest count that is not near a code number.
      room: the largest count that keeps the case cheap.
      within: the alternatives to draw from.
    """
    few = st.integers(1, max(1, min(usual, room)))
    beside = within.code_numbers.list_counts(min(_MOST_COUNTED[of], room))
    return st.one_of(few, few, st.sampled_from(beside)) if beside else few


def _draw_depth(within: Space) -> st.SearchStrategy[int]:
    """Return the strategy of depths H and V: any in a range, usual ones, and ones near code numbers."""
    step = within.depth_step
    low, high = _DEPTHS
    if step > 1:
        return st.integers(math.ceil(low / step), high // step).map(lambda n: n * step)
    ways = [st.integers(low, high), st.sampled_from(_USUAL_DEPTHS)]
    if within.code_numbers:
        beside = [n for n in within.code_numbers.list_counts(_MOST_COUNTED["depth"]) if n >= low]
        ways.append(st.sampled_from(sorted({*_OTHER_DEPTHS, *beside})))
    return st.one_of(*ways)


def _draw_small_depth(within: Space) -> st.SearchStrategy[int]:
    """Return the strategy of the small depths that are used with long sequences."""
    fitting = [depth for depth in _LITTLE_DEPTHS if depth % within.depth_step == 0]
    return st.sampled_from(fitting[:2])


def _draw_seldom(values: tuple[_T, ...]) -> st.SearchStrategy[_T]:
    """Return the strategy that draws the plainest value, the first, in half of all draws."""
    plainest, *others = values
    return st.sampled_from((plainest,) * (1 + len(others)) + tuple(others))


_NUMBERS = {
    "soft_cap": st.one_of(st.sampled_from((30.0, 5.0, 2.0, 50.0)), st.integers(1, 200).map(lambda n: n / 2)),
    "scale": st.one_of(st.sampled_from((1.0, 0.3)), st.integers(1, 40).map(lambda n: n / 20)),
}


def _draw_number(field: str, within: Space) -> st.SearchStrategy[float]:
    """Return the strategy of soft caps or scales: usual ones, and ones that bring logits near a code number."""
    levels = within.code_numbers.levels
    if field == "scale":
        levels = tuple(x / _LOGIT for x in levels if x <= _LARGEST_LOGIT)
    return st.one_of(_NUMBERS[field], _NUMBERS[field], st.sampled_from(levels)) if levels else _NUMBERS[field]


@st.composite
def draw_mask_specs(draw: st.DrawFn, batch: int, q_length: int, kv_length: int, within: Space) -> str:
    """Draw a mask spec that fits the lengths: mostly one mask, else two or three joined by `_and_` and `_or_`."""
    unfit = {"balanced": q_length % 2 == 1, "moba": q_length > kv_length}
    fitting = [kind for kind in within.masks if not unfit.get(kind)] or ["full"]
    # If there are code numbers, draw the masks for which kernels have their own code paths more often.
    common = [kind for kind in _COMMON_MASKS if kind in fitting and within.code_numbers]
    kind = draw(st.sampled_from([*fitting, *common * 3]))
    spec = draw(_draw_term(kind, batch, q_length, kv_length, within))
    partners = [kind for kind in fitting if kind not in ("full", "own")]
    if kind in ("full", "own") or not within.joints:  # `own` has positions per batch row, other masks do not
        return spec
    for _ in range(draw(st.sampled_from((0, 0, 0, 0, 0, 1) if within.code_numbers else (0, 0, 0, 1, 1, 2)))):
        # Masks that count queries along the sequence do not combine with those in load-balanced order.
        excluded = {"balanced"} if kind in _ORDERED - {"balanced"} else _ORDERED if kind == "balanced" else frozenset()
        partners = [partner for partner in partners if partner not in excluded]
        if not partners:
            break
        kind = draw(st.sampled_from(partners))
        spec += draw(st.sampled_from(within.joints))
        spec += draw(_draw_term(kind, batch, q_length, kv_length, within))
    return spec


_ORDERED = frozenset(kind.name for kind in KINDS if kind.type.query_order is not Mask.query_order)
_NUMBERED = {kind.name: kind.numbers for kind in KINDS}


@st.composite
def _draw_term(draw: st.DrawFn, kind: str, batch: int, q_length: int, kv_length: int, within: Space) -> str:
    """Draw the spec of one mask of this kind."""
    if kind == "spans":
        # Edges past the end are allowed: a mask may have been made for longer operands.
        edge = st.integers(0, max(q_length, kv_length) + 8)
        edges = sorted(draw(st.lists(edge, min_size=2, max_size=6, unique=True)))
        return "-".join(("spans", *map(str, edges[: len(edges) // 2 * 2])))
    if kind == "balanced":
        sizes = [size for size in range(1, 9) if q_length % (2 * size) == 0]
        return f"balanced-{draw(st.sampled_from(sizes))}"
    if kind in ("lengths", "own"):
        beside = [kv_length - n for n in reversed(within.code_numbers.lengths) if n <= kv_length]
        left_out = st.integers(0, kv_length) | st.sampled_from(beside) if beside else st.integers(0, kv_length)
        missing = draw(st.lists(left_out, min_size=batch, max_size=batch))
        missing[-1] %= kv_length  # the last batch row has at least one key
        name = "lengths" if kind == "lengths" else draw(_draw_own_window(kv_length))
        return "-".join((name, *(str(kv_length - n) for n in missing)))
    if kind == "moba":
        chunk, topk = draw(st.integers(1, kv_length + 8)), draw(st.integers(1, 6))
        ahead = draw(st.integers(0, kv_length - q_length))
        return f"moba-{chunk}-{topk}" + (f"-o{ahead}" if ahead else "")
    offset = draw(_draw_offset(q_length, kv_length)) if kind in within.offsets else ""
    if within.code_numbers and draw(st.booleans()):  # kernels have their own code paths for masks without an offset
        offset = ""
    if kind == "window":
        sides = [st.integers(0, kv_length), *([st.sampled_from(near)] if (near := within.code_numbers.lengths) else [])]
        side = st.one_of(*sides).map(str) | st.just("inf")
        return f"window-l{draw(side)}-r{draw(side)}{offset}"
    ranges = {before: of(q_length, kv_length) for before, of in _NUMBERED[kind].items()}
    drawn = [f"{before}{draw(st.integers(least, most))}" for before, (least, most) in ranges.items()]
    return "-".join((kind, *drawn)) + offset


def _draw_own_window(kv_length: int) -> st.SearchStrategy[str]:
    """Return the strategy of the sides of a window of each batch row; some windows also show the first keys."""
    sides = st.integers(0, kv_length).map(str)
    shown = st.tuples(sides, st.integers(1, 8)).map(lambda one: f"own-l{one[0]}-f{one[1]}")
    return st.one_of(sides.map("own-l{}".format), st.just("own-linf"), shown)


def _draw_offset(q_length: int, kv_length: int) -> st.SearchStrategy[str]:
    """Return the strategy of offsets as a mask spec writes them.

    They are no offset, the offset that aligns the last query with the last key, or any that leaves some query a key.
    """
    aligned = max(0, kv_length - q_length)
    drawn = st.one_of(st.just(0), st.just(aligned), st.integers(1 - q_length, kv_length))
    return drawn.map(lambda n: f"-o{n}" if n else "")
