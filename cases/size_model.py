"""Define the model of sizes: whole blocks, long sequences, decoding, head counts, depths, and forms of arguments.

`cases.grid` builds the covering array of `MODEL`. The model of features (`cases.feature_model`) has every mask and
operand at short and odd lengths. This one has few masks and operands, and the sizes at which a kernel's handling of
blocks may go wrong: lengths of three and more whole blocks of 128, with more queries, more keys, or equally many; more
than eight and sixteen blocks along an axis; one to sixteen queries over caches of more than a thousand keys; positions
beyond 32,767. Each length is combined with masks, operands and dtypes, in pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.distributions import MOVED
from cases.operand_registry import OPTIONAL
from cases.optional_operands.bias_operand import HIDING
from cases.optional_operands.sinks_operand import EXTREME


@dataclasses.dataclass(frozen=True)
class Shape:
    """A level of the axis of shapes."""

    phase: str  # `train`, `prefill` or `decode`
    q: int
    kv: int
    heads: tuple[int, int, int] = (1, 2, 2)  # `(B, N, K)`: batch rows, query heads, key/value heads
    depths: tuple[int, int] = (64, 64)  # `(H, V)`: depth of queries and keys, depth of values
    # If given, this level is a stand-in: it is tested only on implementations that do not support `instead_of`.
    instead_of: Shape | None = None


_PLAIN = Shape("train", 128, 128)
_SQUARE = Shape("train", 384, 384, (1, 2, 1))
_WIDE = Shape("train", 256, 512)
_TALL = Shape("train", 512, 256, (1, 4, 2), (32, 32))
_SPECULATIVE = Shape("prefill", 4, 1152, (1, 8, 1))
# The shapes that are combined with all masks of `_FORMS`.
_ALL_FORMS = (_PLAIN, _WIDE, _SPECULATIVE)
_BLOCKS = (
    _PLAIN,
    _SQUARE,
    _WIDE,
    _TALL,
    Shape("train", 2304, 128, (1, 2, 1), (32, 32)),
    Shape("train", 128, 2304, (1, 2, 2), (32, 32)),
    Shape("decode", 1, 1152, (2, 8, 2)),
    _SPECULATIVE,
    Shape("prefill", 16, 1100, (2, 4, 2), (128, 128)),
    Shape("decode", 1, 33024, (1, 2, 1), (16, 16)),
)
# Head counts `(B, N, K)`, each with depths `(H, V)` of its own.
_HEADS = {(1, 32, 4): (33, 17), (2, 10, 2): (80, 80), (1, 3, 3): (96, 96), (2, 3, 1): (192, 128), (5, 1, 1): (256, 256)}
# A tail of keys behind whole blocks of queries, a single key, and more than eight blocks of queries with a tail.
_TAILS = (
    Shape("train", 128, 217, (1, 2, 2), (48, 48)),
    Shape("train", 250, 1, (1, 4, 2), (160, 160)),
    Shape("train", 1030, 200, (1, 2, 1), (256, 256)),
)
# Nine blocks of queries and of keys. This shape is last, since it is the most expensive.
_LARGEST = Shape("train", 1152, 1152, (1, 1, 1), (16, 16))


def _add_stand_ins(shape: Shape) -> tuple[Shape, ...]:
    """Return the shape, and copies with depths 64 and 128, each for kernels that do not support the one before."""
    found = [shape]
    for depth in (64, 128):
        if shape.depths != (depth, depth):
            found.append(dataclasses.replace(shape, depths=(depth, depth), instead_of=found[-1]))
    return tuple(found)


_SHAPES = (
    *_BLOCKS,
    *(Shape("train", 128, 128, heads, depths) for heads, depths in _HEADS.items()),
    *_TAILS,
    _LARGEST,
)
_IN_BLOCKS_OF_512 = tuple(
    dataclasses.replace(other, q=1536, kv=1536, instead_of=other) for other in _add_stand_ins(_SQUARE)
)
_STAND_INS = (
    *(other for shape in _SHAPES for other in _add_stand_ins(shape)[1:]),
    # Three and more blocks, for kernels that take only multiples of 256 or 512.
    *_IN_BLOCKS_OF_512,
    # Three blocks of queries, for kernels without gradients.
    Shape("prefill", 384, 768, (1, 2, 1), instead_of=_IN_BLOCKS_OF_512[0]),
)


def _compute_end_offset(shape: Shape) -> str:
    """Return the offset that aligns the last query with the last key, as a mask term writes it."""
    return f"-o{shape.kv - shape.q}" if shape.kv != shape.q else ""


def _format_window(shape: Shape) -> str:
    """Return the spec of a window of about 5/8 of the keys: several blocks of a long sequence, but not all."""
    return f"window-l{max(3, 5 * shape.kv // 8) - 1}-r0{_compute_end_offset(shape)}"


def _format_causal_and_window(shape: Shape) -> str:
    """Return the spec of a causal mask with a window, aligned at the first query and key in training, else the last."""
    first = "" if shape.phase == "train" else _compute_end_offset(shape)
    return f"causal{first}_and_window-l{min(200, shape.kv // 4)}-r9{first}"


def _format_lengths(shape: Shape) -> str:
    """Return a mask term with one key length per batch row, in this order as far as there are rows.

    The lengths are: one that ends just after a block border, one at a border, all keys, one key and no key.
    """
    borders = (max(65, shape.kv - 127), 128, shape.kv, 1, 0)
    return "-".join(("lengths", *(str(min(shape.kv, n)) for n in borders[: shape.heads[0]])))


_USUAL: dict[str, Callable[[Shape], str]] = {
    "causal_end": lambda shape: f"causal{_compute_end_offset(shape)}",  # aligns the last query with the last key
    "full": lambda shape: "full",
    "window": _format_window,
    "lengths": _format_lengths,
}
# With a left side of 129, the last query that sees a block of 32, 64 or 128 keys is the first of its block of queries.
_FORMS: dict[str, Callable[[Shape], str]] = {
    "causal_start": lambda shape: "causal",
    "left": lambda shape: f"window-l129-rinf{_compute_end_offset(shape)}",
    "right": lambda shape: f"window-linf-r7{_compute_end_offset(shape)}",
    "unbounded": lambda shape: "window-linf-rinf",
    "wider": lambda shape: "window-l99999-r99999",
    "own_key": lambda shape: f"window-l0-r0{_compute_end_offset(shape)}",
    "causal_window": _format_causal_and_window,
}
_MASKS = {**_USUAL, **_FORMS}
# Shapes outside `_ALL_FORMS` get few masks and levels of bias, about as many as there are dtypes. So few cases cover
# the pairs of such a shape with these levels.
_MASKS_ELSEWHERE = ("causal_end", "window", "lengths")
_BIASES_ELSEWHERE = (None, "biasslope", "biasbatch", "biasfirst")

_LOW_CAP = 0.5

AXES: tuple[Axis, ...] = (
    Axis("shape", (*_SHAPES, *_STAND_INS)),
    Axis("mask", ("full", *(name for name in _MASKS if name != "full"))),
    Axis("distribution", ("normal", "dominant", "levels", "low", "apart"), cheap=True),
    Axis("dtype", ("f32", "bf16", "f16")),
    Axis("bias", (None, "biasslope", "biasbatch", "biaspair", *HIDING)),
    Axis("segments", (None, "seg", "segwild")),
    Axis("soft_cap", (None, _LOW_CAP, 150.0)),
    Axis("sinks", (False, True, EXTREME)),
    Axis("scale", (None, 1.0)),
    Axis("kv_cache", (None, "kvint8-token", "kvfp8-head"), rare=True),
)


def _resolve_stand_in(shape: Shape) -> Shape:
    """Return the original shape that a stand-in replaces, directly or through other stand-ins."""
    return shape if shape.instead_of is None else _resolve_stand_in(shape.instead_of)


def are_compatible(levels: Mapping[str, Any]) -> bool:
    """Return whether the levels chosen so far do not contradict each other and are worth testing together."""
    shape, mask = levels.get("shape"), levels.get("mask")
    if levels.get("kv_cache") is not None and shape is not None and shape.phase == "train":
        return False  # a cache is read, not differentiated
    if mask in _FORMS and levels.get("bias") not in (None, "biaspair"):
        return False
    elsewhere = shape is not None and _resolve_stand_in(shape) not in _ALL_FORMS
    if elsewhere and (mask not in (None, *_MASKS_ELSEWHERE) or levels.get("bias") not in _BIASES_ELSEWHERE):
        return False
    if shape is not None and shape.kv == 1 and levels.get("bias") in HIDING:
        return False  # a bias hides no key of a row that has one
    # Under a cap, a bias of minus infinity hides nothing, and logits far from zero are all the same.
    is_flattened = levels.get("bias") in HIDING or levels.get("distribution") in MOVED
    if is_flattened and levels.get("soft_cap") is not None:
        return False
    if levels.get("distribution") == "dominant" and levels.get("soft_cap") == _LOW_CAP:
        return False  # the dominant logits are ten times the cap: its derivative there is less than its rounding
    if levels.get("distribution") == "levels":
        # Each level of the logits needs a query of its own, and a sink gets all of the weight or none.
        if shape is not None and shape.q < 16:
            return False
        return not levels.get("sinks")
    return True


def assemble(levels: Mapping[str, Any], seed: int) -> Case:
    """Build the case from one level of every axis."""
    shape: Shape = levels["shape"]
    batch, num_q_heads, num_kv_heads = shape.heads
    head_dim, v_head_dim = shape.depths
    return Case(
        phase=shape.phase,
        q_length=shape.q,
        kv_length=shape.kv,
        batch=batch,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        mask=_MASKS[levels["mask"]](shape),
        seed=seed,
        distribution=levels["distribution"],
        dtype=levels["dtype"],
        **{operand.field: levels[operand.field] for operand in OPTIONAL if operand.field in levels},
    )


MODEL = Model(AXES, are_compatible, assemble, strongest=2)
