"""Define the model of features: every mask, operand and distribution of values, at a few lengths and head counts.

`cases.grid` builds the covering array of `MODEL`. A level sets one or more fields of `Case`. A mask level is a function
that writes the mask spec once the lengths are known. `cases.size_model` has the other sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cases.case import Case
from cases.covering_model import Axis, Lengths, Model
from cases.distributions import MOVED
from cases.mask_spec import KINDS, Kind
from cases.operand_registry import OPTIONAL
from cases.optional_operands.bias_operand import HIDING
from cases.score_functions import CAPPING


def _format_offset(value: int) -> str:
    """Return the offset part of a mask term; empty for 0."""
    return f"-o{value}" if value else ""


def _format_causal_end(q: int, kv: int, batch: int) -> str:
    """Return the spec of a causal mask that aligns the last query with the last key."""
    # At equal lengths the offset would be 0, which is the plain causal mask. The offset 3 gives another mask.
    return f"causal{_format_offset(kv - q if kv != q else 3)}"


def _format_window(q: int, kv: int, batch: int) -> str:
    """Return the spec of a window that reaches backwards from the query."""
    if q > kv:
        return f"window-l{kv + 8}-r0"  # the window is longer than the keys
    return f"window-l{max(1, kv // 4) - 1}-r0{_format_offset(kv - q)}"


def _format_two_sided_window(q: int, kv: int, batch: int) -> str:
    """Return the spec of a window that reaches both ways from the query."""
    return "window-linf-r5" if q > kv else f"window-l17-r5{_format_offset(kv - q)}"


def _format_chunked(q: int, kv: int, batch: int) -> str:
    """Return the spec of a chunked mask with three chunks."""
    return f"chunked-{kv // 3 + 1}{_format_offset(max(0, kv - q))}"


def _format_spans(q: int, kv: int, batch: int) -> str:
    """Return the spec of a causal mask with two bidirectional spans."""
    size = min(q, kv)
    return f"causal_or_spans-{size // 8}-{size // 3}-{size // 2}-{size - 3}"


def _format_lengths(q: int, kv: int, batch: int) -> str:
    """Return the spec of key lengths, one for each batch row; of three rows, one has no key."""
    chosen = {1: (2 * kv // 3,), 2: (kv // 2 + 1, kv), 3: (0, kv // 3 + 1, kv)}[batch]
    causal = "causal_and_" if q == kv else ""
    return causal + "-".join(("lengths", *map(str, chosen)))


def _make_moba_formatter(pieces: int, topk: int) -> Callable[[int, int, int], str]:
    """Make the formatter of a MoBA mask with about `pieces` chunks of keys, of which the last is shorter."""
    return lambda q, kv, batch: f"moba-{kv // pieces + 1}-{topk}{_format_offset(kv - q)}"


def _format_edge_lengths(q: int, kv: int, batch: int) -> str:
    """Return the spec of key lengths at and beside the end of a block."""
    # One key, and lengths around 128, where a block of any power of two up to 128 ends.
    return "-".join(("lengths", *map(str, {1: (1,), 2: (127, 129), 3: (128, 0, 1)}[batch])))


_MaskFormatter = Callable[[int, int, int], str]

# The mask levels of each kind of mask. A kind that is not listed has one level, its example.
_FORMATTERS: dict[str, dict[str, _MaskFormatter]] = {
    "causal": {"causal": lambda q, kv, batch: "causal", "causal_end": _format_causal_end},
    "window": {"window": _format_window, "window_both": _format_two_sided_window},
    "chunked": {"chunked": _format_chunked},
    "spans": {"spans": _format_spans},
    "lengths": {"lengths": _format_lengths},
    "moba": {
        "moba": _make_moba_formatter(5, 3),
        # Many chunks of 12 keys. The distribution `ties` has three distinct keys in turn, so all whole chunks are equal
        # and their gates tie.
        "moba_fine": lambda q, kv, batch: f"moba-12-4{_format_offset(kv - q)}",
        "moba_one": _make_moba_formatter(3, 1),
        "moba_all": _make_moba_formatter(4, 99),
    },
    "lightning": {},  # the models of `cases.indexer_cases` have its levels
    "listed": {},  # the models of `cases.list_model` have its levels
    "own": {},  # the axis `own_window` has its levels
}


def _list_formatters(kind: Kind) -> dict[str, _MaskFormatter]:
    """List the mask levels of a kind; by default its example, if it has one."""
    return _FORMATTERS.get(kind.name, {kind.name: lambda q, kv, batch: kind.example} if kind.example else {})


_MASK_FORMATTERS = {level: spec for kind in KINDS for level, spec in _list_formatters(kind).items()} | {
    "lengths_edges": _format_edge_lengths
}


_PREFILL = Lengths("prefill", 64, 320)
_DECODE = Lengths("decode", 1, 200)
_ODD = Lengths("train", 321, 321)  # one more than a multiple of 32 and 64
_THREE = Lengths("train", 384, 384, instead_of=_ODD)


def _build_operand_axis(name: str) -> Axis:
    """Build the axis of an optional operand from its entry in the registry."""
    operand = next(operand for operand in OPTIONAL if operand.name == name)
    levels = (operand.absent, *operand.grid_levels)
    return Axis(operand.field, levels, combined=operand.combined_level, rare=operand.is_rare)


AXES: tuple[Axis, ...] = (
    Axis(
        "lengths",
        (
            Lengths("train", 128, 128),
            Lengths("train", 48, 200),
            Lengths("train", 384, 100),
            Lengths("train", 1, 72),
            _PREFILL,
            _DECODE,
            # The most expensive levels are last, since a case for which any level will do gets an early one.
            _ODD,
            Lengths("train", 40, 1500, may_swap=True),
            # Equal lengths that no usual block divides, for kernels that take only lengths below their block or
            # multiples of it.
            Lengths("train", 100, 100, instead_of=_ODD),
            # Three and more whole blocks, for kernels that take multiples of 128, of 256 or of 512.
            _THREE,
            Lengths("train", 1536, 1536, instead_of=_THREE),
            Lengths("prefill", 128, 512, instead_of=_PREFILL),
            Lengths("decode", 1, 1024, instead_of=_DECODE),
        ),
    ),
    Axis(
        "mask",
        tuple(_MASK_FORMATTERS),
        combined="causal",
    ),
    Axis(
        "distribution",
        ("normal", "large", "small", "heavy", "dominant", "cancel", "ties", "knee", "huge", "low", "apart"),
        cheap=True,
    ),
    # (batch, query heads, key/value heads). One level has B == K on purpose, and another has three distinct sizes.
    Axis("heads", ((1, 2, 2), (2, 4, 2), (1, 6, 2), (3, 2, 1), (1, 2, 1)), combined=(2, 4, 2)),
    Axis("depths", ((64, 64), (32, 32), (16, 48), (72, 40), (128, 128)), combined=(16, 48)),
    _build_operand_axis("bias"),
    Axis("dtype", ("f32", "bf16", "f16")),
    _build_operand_axis("segment_ids"),
    _build_operand_axis("soft_cap"),
    _build_operand_axis("sinks"),
    _build_operand_axis("scale"),
    _build_operand_axis("kv_scales"),
    # How many earlier keys of its own sequence a token sees: no such mask, all keys, less than a block, more than one.
    Axis("own_window", (None, "inf", 6, 70), rare=True),
    _build_operand_axis("alibi_slopes"),
    _build_operand_axis("score_mod"),
)

NAMES = tuple(axis.name for axis in AXES)

# Cases with more pairs of query and key have few heads: the time of an interpreted kernel grows with the square of
# batch times heads.
_MANY_PAIRS = 50_000
_FEW_HEADS = ((1, 2, 2), (1, 2, 1))

# At lengths with `may_swap`, these masks get more queries than keys, and other masks get fewer. If query heads share
# key/value heads, it is the other way round.
_MORE_QUERIES = ("full", "causal", "window_both", "balanced", "dense", "densebatch")


def are_compatible(levels: Mapping[str, Any]) -> bool:
    """Return False if the levels given so far, by axis name, cannot occur in one case."""
    lengths = _order_lengths(levels)
    if lengths is not None and lengths.q == 1 and levels.get("mask") in ("causal", "spans", "balanced"):
        return False  # with one query causal leaves one key, spans cannot be cut, and balanced has no chunks
    if lengths is not None and lengths.phase != "decode" and levels.get("mask") == "lengths_edges":
        return False  # in other phases, the axis of lengths already tests what kernels do at the end of a block
    if lengths is not None and lengths.q % 4 and levels.get("mask") == "balanced":
        return False  # the mask cuts the queries into four chunks of the same size
    heads = levels.get("heads")
    if lengths is not None and lengths.q * lengths.kv > _MANY_PAIRS and heads not in (None, *_FEW_HEADS):
        return False
    if _is_moba(levels):
        if lengths is not None and lengths.q > lengths.kv:
            return False  # every query must be at the position of a key
        if levels.get("distribution") in ("huge", "low"):
            return False  # gates of 1e4 round by more than they differ, so few queries have one right choice
    if levels.get("kv_cache") is not None and lengths is not None and lengths.phase == "train":
        return False  # a cache is read, not differentiated
    if levels.get("own_window") is not None:
        if levels.get("mask", "lengths") not in ("lengths", "lengths_edges"):
            return False  # the window lies within the key length of each row
        if lengths is not None and lengths.phase == "train":
            return False
    if levels.get("score") in CAPPING and levels.get("soft_cap") is not None:
        return False  # a case has one cap
    if levels.get("score") in CAPPING and levels.get("distribution") in ("knee", *MOVED):
        return False  # logits of `knee` are made for another cap, and this one would flatten those of the others
    if levels.get("distribution") == "knee" and "soft_cap" in levels and levels["soft_cap"] is None:
        return False
    if levels.get("distribution") in MOVED and levels.get("soft_cap") is not None:
        return False
    if levels.get("bias") in HIDING:
        # Under a cap, a bias of minus infinity hides nothing. `knee` needs a cap: the search for cases needs this
        # conflict too, since it would find it only after it chose the cap.
        capped = levels.get("soft_cap") is not None or levels.get("score") in CAPPING
        if capped or levels.get("distribution") == "knee":
            return False
    if levels.get("distribution") == "huge":
        # Logits of 7e4 round so coarsely in f32 that probabilities change by 1%. That hides one key among many, and the
        # gradient of a sink.
        short = lengths is None or (lengths.phase == "train" and lengths.q > 1 and max(lengths.q, lengths.kv) <= 384)
        return short and not levels.get("sinks")
    return True


def _order_lengths(levels: Mapping[str, Any]) -> Lengths | None:
    """Return the lengths, with q and kv exchanged if `_MORE_QUERIES` says so and mask and heads are chosen."""
    lengths: Lengths | None = levels.get("lengths")
    mask, heads = levels.get("mask"), levels.get("heads")
    if lengths is None or not lengths.may_swap or mask is None or heads is None or _is_moba(levels):
        return lengths
    _, num_q_heads, num_kv_heads = heads
    # Half of the masks have one order of lengths and the rest the other order, reversed where heads share keys. So both
    # orders occur at every level of the grid, and with every mask if triples are covered.
    if (mask in _MORE_QUERIES) == (num_q_heads > num_kv_heads):
        return lengths
    return dataclasses.replace(lengths, q=lengths.kv, kv=lengths.q)


def _is_moba(levels: Mapping[str, Any]) -> bool:
    """Return whether the mask level is a MoBA mask."""
    return str(levels.get("mask")).startswith("moba")


def assemble(levels: Mapping[str, Any], seed: int) -> Case:
    """Build the case from one level of every axis."""
    lengths = _order_lengths(levels)
    assert lengths is not None
    batch, num_q_heads, num_kv_heads = levels["heads"]
    head_dim, v_head_dim = levels["depths"]
    mask = _MASK_FORMATTERS[levels["mask"]](lengths.q, lengths.kv, batch)
    if (left := levels.get("own_window")) is not None:
        mask = f"own-l{left}{mask.removeprefix('lengths')}"
    return Case(
        phase=lengths.phase,
        q_length=lengths.q,
        kv_length=lengths.kv,
        batch=batch,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        mask=mask,
        seed=seed,
        distribution=levels["distribution"],
        dtype=levels["dtype"],
        **{operand.field: levels[operand.field] for operand in OPTIONAL if operand.field in levels},
    )


MODEL = Model(AXES, are_compatible, assemble)
