"""Parts that the cases of several storage forms share: axes of models, a model builder, and a Hypothesis strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.distributions import MOVED
from cases.optional_operands.bias_operand import HIDING
from cases.optional_operands.sinks_operand import EXTREME
from cases.storage_forms.form_registry import FORMS

SequenceLengths = tuple[tuple[int, int], ...]
"""The numbers `(queries, keys)` of each sequence of a call."""

STORED_DISTRIBUTIONS = ("normal", "large", "dominant", "heavy", "small", "cancel", "ties", "knee", "low", "apart")
"""The value distributions of the grids of all storage forms (`cases.case_fields.DISTRIBUTIONS`)."""
VALUE_AXES = (
    Axis("distribution", STORED_DISTRIBUTIONS, cheap=True),
    Axis("dtype", ("f32", "bf16", "f16")),
    Axis("soft_cap", (None, 2.0, 30.0), combined=30.0),
    Axis("sinks", (False, True, EXTREME), combined=True),
    Axis("scale", (None, 0.3), combined=0.3),
)
HEAD_AXES = (
    # (15, 3) has an odd number of key/value heads, and groups whose size is odd.
    Axis("heads", ((2, 2), (4, 2), (15, 3), (1, 1)), combined=(4, 2)),
    Axis("depths", ((64, 64), (32, 32), (16, 48), (128, 128)), combined=(16, 48)),
)
_ROTATIONS = 3
FIRST = Axis("first", tuple(range(_ROTATIONS)))
"""The axis that says which third of the sequences comes first, so that empty sequences lie anywhere in a batch."""
FORTY_KEYS = tuple(1 + 5 * n % 13 for n in range(40))
"""The lengths of forty short sequences."""
FORTY = "-".join(map(str, FORTY_KEYS))
"""`FORTY_KEYS` as a case id writes them."""
MANY_KEY_HEADS = {"num_q_heads": 9, "num_kv_heads": 9}
"""Fields of a case with more than eight key/value heads."""
LARGE_GROUP = {"num_q_heads": 17, "num_kv_heads": 1}
"""Fields of a case with more than sixteen query heads to a key/value head, an odd number of them."""
_STARTS = range(124, 133)
CHUNK_STARTS: dict[str, Any] = {
    **{"phase": "prefill", "batch": len(_STARTS), "q_length": 5, "kv_length": 5 + max(_STARTS)},
    "mask": "own-linf-" + "-".join(str(start + 5) for start in _STARTS),
}
"""Fields of a case with chunks of five queries that begin at each place near the 128th key."""
DEEPEST: dict[str, Any] = {
    **{"phase": "prefill", "batch": 2, "q_length": 5, "kv_length": 100, "head_dim": 512, "v_head_dim": 512},
    "mask": "own-linf-100-37",
}
"""Fields of a case with the largest depths of published kernels."""
LONG: dict[str, Any] = {
    **{"phase": "decode", "batch": 1, "q_length": 1, "kv_length": 33_281, "mask": "own-linf-33281"},
    "soft_cap": None,  # each key has some weight
}
"""Fields of a case with more keys than 16 bits with a sign can count."""
MAX_DRAWN_LENGTH = 150
_MAX_DRAWN_SEQUENCES = 6
_MAX_DRAWN_TOKENS = 40  # the most sequences in decode, where each has one query at most
_DRAWN_HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 3), (15, 3))
_DRAWN_DEPTHS = (8, 16, 32, 64, 72, 128)
_DRAWN_CAPS = (None, None, 30.0, 5.0, 2.0)
_DRAWN_SCALES = (None, None, 1.0, 0.3)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A level of the axis `shape` of a model: the sequences of one call."""

    name: str  # a short name of the call, such as `prefill` or `many`
    lengths: Callable[[int], SequenceLengths]  # returns the lengths of the sequences, from the size of pages or rings
    phase: str = "prefill"  # the phase of the case; `decode` if no sequence has more than one query
    heads: tuple[int, int] | None = None  # heads `(N, K)`, in models of sizes; None if the model has an axis of heads
    # Depths `(H, V)`, in models of sizes; None if the model has an axis of depths, or for `(64, 64)`.
    depths: tuple[int, int] | None = None


def rotate_lengths(lengths: SequenceLengths, first: int) -> SequenceLengths:
    """Move whole thirds of the sequences to the end of the batch, as many as the level `first` of `FIRST` says."""
    start = first * len(lengths) // _ROTATIONS
    return lengths[start:] + lengths[:start]


def list_token_lengths(p: int) -> SequenceLengths:
    """Return the lengths of 25 single tokens whose caches end around a border of pages of `p` tokens.

    Each cache has one token less than whole pages, exactly whole pages, or one token more. The numbers of whole pages
    differ. There are more tokens than a block of 16, and the last block is not full. Caches of small pages have several
    of them at least, so that soft caps and windows matter.
    """
    whole = (1, 2) if p > 64 else (1, 2, 4, 3)
    keys = p * max(1, 8 // p)
    return tuple((1, whole[n % len(whole)] * keys + n % 3 - 1) for n in range(25))


def fix_lengths(*lengths: tuple[int, int]) -> Callable[[int], SequenceLengths]:
    """Return a function for `Shape.lengths` that returns these lengths for every size of pages or rings."""
    return lambda p: lengths


def is_compatible(levels: Mapping[str, Any]) -> bool:
    """Return whether a distribution and a bias can be combined with a soft cap, or with none.

    The logits of `knee` lie where a cap bends. Those of `MOVED` are far from zero, where any cap is flat. A bias of
    minus infinity hides nothing under a cap.
    """
    distribution, cap = levels.get("distribution"), levels.get("soft_cap")
    if distribution == "knee" and "soft_cap" in levels and cap is None:
        return False
    if levels.get("bias") in HIDING and distribution == "knee":
        return False  # follows from the others; stated so that the search for cases need not find it out
    return cap is None or not (distribution in MOVED or levels.get("bias") in HIDING)


def list_fitting_distributions(soft_cap: float | None) -> tuple[str, ...]:
    """Return the distributions of `STORED_DISTRIBUTIONS` that a case with this soft cap, or without one, may have."""
    return tuple(name for name in STORED_DISTRIBUTIONS if is_compatible({"distribution": name, "soft_cap": soft_cap}))


def build_model(form: str, *axes: Axis, strongest: int = 4) -> Model:
    """Build a covering-array model of a storage form; `axes` must include `shape`, `window` and `VALUE_AXES`."""

    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        shape, size = levels["shape"], levels.get("page")
        lengths = rotate_lengths(shape.lengths(size or 0), levels.get(FIRST.name, 0))
        q_lengths, kv_lengths = zip(*lengths, strict=True)
        heads, depths = shape.heads or levels["heads"], shape.depths or levels.get("depths", (64, 64))
        ends = "-".join(map(str, kv_lengths))
        left = levels["window"]
        return Case(
            phase=shape.phase,
            dtype=levels["dtype"],
            batch=len(q_lengths),
            q_length=max(q_lengths),
            kv_length=max(kv_lengths),
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=depths[0],
            v_head_dim=depths[1],
            mask=f"lengths-{ends}" if left is None else f"own-l{left}-{ends}",
            soft_cap=levels["soft_cap"],
            sinks=levels["sinks"],
            scale=levels["scale"],
            storage=FORMS[form].format(size, q_lengths, shared=bool(levels.get("shared", False))),
            distribution=levels["distribution"],
            seed=seed,
        )

    return Model(axes, is_compatible, assemble, strongest)


@st.composite
def draw_sequences(
    draw: st.DrawFn,
    form: str,
    phases: tuple[str, ...],
    sizes: st.SearchStrategy[int] | None,
    draw_lengths: Callable[[str, int | None], st.SearchStrategy[tuple[int, int]]],
) -> Case:
    """Draw a case with packed queries; Hypothesis shrinks it towards one sequence of one token.

    Args:
      sizes: the strategy of page sizes; None for a form without a size.
      draw_lengths: returns the strategy of `(queries, keys)` of one sequence, from the phase and the page size.
    """
    phase = draw(st.sampled_from(phases))
    size = None if sizes is None else draw(sizes)
    most = _MAX_DRAWN_TOKENS if phase == "decode" else _MAX_DRAWN_SEQUENCES
    lengths = draw(st.lists(draw_lengths(phase, size), min_size=1, max_size=most))
    if not any(queries for queries, _ in lengths):
        lengths[0] = (1, max(1, lengths[0][1]))
    q_lengths, kv_lengths = zip(*lengths, strict=True)
    heads, head_dim = draw(st.sampled_from(_DRAWN_HEADS)), draw(st.sampled_from(_DRAWN_DEPTHS))
    cap = draw(st.sampled_from(_DRAWN_CAPS))
    ends = "-".join(map(str, kv_lengths))
    numbers = st.integers(0, MAX_DRAWN_LENGTH).map(str)
    left = draw(st.just("inf") | numbers | st.just("inf"))
    full = not FORMS[form].is_cache and draw(st.booleans())
    return Case(
        phase=phase,
        dtype=draw(st.sampled_from(("f32", "f32", "bf16", "f16"))),
        batch=len(lengths),
        q_length=max(q_lengths),
        kv_length=max(1, *kv_lengths),
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        v_head_dim=draw(st.just(head_dim) | st.sampled_from(_DRAWN_DEPTHS)),
        mask=f"lengths-{ends}" if full else f"own-l{left}-{ends}",
        soft_cap=cap,
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from(_DRAWN_SCALES)),
        storage=FORMS[form].format(size, q_lengths, shared=True in FORMS[form].prefixes and draw(st.booleans())),
        distribution=draw(st.sampled_from(list_fitting_distributions(cap))),
        seed=draw(st.integers(0, 999)),
    )
