"""Axes and drawn sizes that the cases of several storage forms have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.storage_forms.form_registry import FORMS

SequenceLengths = tuple[tuple[int, int], ...]
"""Numbers of queries and keys of each sequence."""

VALUE_AXES = (
    Axis("distribution", ("normal", "large", "dominant", "heavy", "small", "cancel", "ties", "knee"), cheap=True),
    Axis("dtype", ("f32", "bf16", "f16")),
    Axis("soft_cap", (None, 2.0, 30.0), rich=30.0),
    Axis("sinks", (False, True), rich=True),
    Axis("scale", (None, 0.3), rich=0.3),
)
HEAD_AXES = (
    Axis("heads", ((2, 2), (4, 2), (6, 1), (1, 1)), rich=(4, 2)),
    Axis("depths", ((64, 64), (32, 32), (16, 48), (128, 128)), rich=(16, 48)),
)
FORTY_KEYS = tuple(1 + 5 * n % 13 for n in range(40))
"""Lengths of forty sequences."""
FORTY = "-".join(map(str, FORTY_KEYS))
"""The same as a case id writes them."""
MANY_KEY_HEADS = {"num_q_heads": 9, "num_kv_heads": 9}
"""More than eight key/value heads."""
LARGE_GROUP = {"num_q_heads": 17, "num_kv_heads": 1}
"""More than sixteen query heads to a key head, an odd number."""
MAX_DRAWN_LENGTH = 150
_MAX_DRAWN_SEQUENCES = 6
_DRAWN_HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 3))
_DRAWN_DEPTHS = (8, 16, 32, 64, 72, 128)
_DRAWN_CAPS = (None, None, 30.0, 5.0, 2.0)
_DRAWN_SCALES = (None, None, 1.0, 0.3)
_DRAWN_VALUES = ("normal", "small", "large", "heavy", "dominant", "cancel", "ties")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A level of an axis of sequences.

    Attributes:
      name: says what the call is.
      lengths: the lengths of its sequences for a size of pages or rings.
      phase: `decode` if all sequences have one query.
      heads: heads `(N, K)` of its own, in models of sizes.
      depths: depths `(H, V)` of its own, in models of sizes.
    """

    name: str
    lengths: Callable[[int], SequenceLengths]
    phase: str = "prefill"
    heads: tuple[int, int] | None = None
    depths: tuple[int, int] | None = None


def fix_lengths(*lengths: tuple[int, int]) -> Callable[[int], SequenceLengths]:
    """Return a function that gives these lengths for every size."""
    return lambda p: lengths


def is_compatible(levels: Mapping[str, Any]) -> bool:
    """Return whether levels go together: logits at the knee of a soft cap need one."""
    return not (levels.get("distribution") == "knee" and "soft_cap" in levels and levels["soft_cap"] is None)


def build_model(form: str, *axes: Axis, strongest: int = 4) -> Model:
    """Build a model of cases of a storage form; its axes include `shape`, `window` and those of values."""

    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        shape, size = levels["shape"], levels.get("page")
        q_lengths, kv_lengths = zip(*shape.lengths(size or 0), strict=True)
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
    """Draw a case of packed queries; it shrinks towards one sequence of one token.

    Args:
      draw: draws from a strategy.
      form: the name of the storage form.
      phases: the phases of its cases.
      sizes: sizes of pages; none for a form without a size.
      draw_lengths: draws queries and keys of a sequence, for a phase and a size.
    """
    phase = draw(st.sampled_from(phases))
    size = None if sizes is None else draw(sizes)
    lengths = draw(st.lists(draw_lengths(phase, size), min_size=1, max_size=_MAX_DRAWN_SEQUENCES))
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
        distribution=draw(st.sampled_from((*_DRAWN_VALUES, "knee") if cap is not None else _DRAWN_VALUES)),
        seed=draw(st.integers(0, 999)),
    )
