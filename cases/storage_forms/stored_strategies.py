"""Hypothesis strategies over stored problems: any page size, lengths and windows, not only the levels of the grids.

Cases shrink towards one sequence of one token in a page of one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from cases.case import Case
from cases.storage_forms import storage_spec
from cases.storage_forms.storage_spec import Kind

Caches = tuple[str | None, ...]
_PHASES: dict[Kind, tuple[str, ...]] = {"paged": ("prefill", "decode"), "packed": ("train", "prefill", "decode")}
_LONGEST = 150
_MOST_QUERIES = 40
_MOST_SEQUENCES = 6
_PAGES = (1, 2, 8, 16, 32, 64, 128, 256)
_HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 3))
_DEPTHS = (8, 16, 32, 64, 72, 128)
_CAPS = (None, None, 30.0, 5.0, 2.0)
_SCALES = (None, None, 1.0, 0.3)
_VALUES = ("normal", "small", "large", "heavy", "dominant", "cancel", "ties")


def draw_stored_cases(kind: Kind, phases: tuple[str, ...], caches: Caches = (None,)) -> st.SearchStrategy[Case]:
    """Cases of these phases whose operands are stored as `kind`, `st.nothing()` if it has none of them.

    Pages hold what one of `caches` does, none of these if they are in the dtype of the operands.
    """
    own = tuple(phase for phase in _PHASES[kind] if phase in phases)
    if not own:
        return st.nothing()
    drawn = stored_cases(kind, own)
    return drawn if caches == (None,) else scaled_cases(drawn, caches)


@st.composite
def scaled_cases(draw: st.DrawFn, drawn: st.SearchStrategy[Case], caches: Caches) -> Case:
    """Those of `drawn`, with one of `caches`."""
    return dataclasses.replace(draw(drawn), kv_cache=draw(st.sampled_from(caches)))


@st.composite
def stored_cases(draw: st.DrawFn, kind: Kind, phases: tuple[str, ...]) -> Case:
    """Cases of one kind of storage."""
    phase = draw(st.sampled_from(phases))
    page = draw(st.sampled_from(_PAGES) | st.integers(1, 48)) if kind == "paged" else None
    lengths = draw(st.lists(_draw_lengths(kind, phase, page), min_size=1, max_size=_MOST_SEQUENCES))
    if not any(queries for queries, _ in lengths):
        lengths[0] = (1, max(1, lengths[0][1]))
    q_lengths, kv_lengths = zip(*lengths, strict=True)
    heads, head_dim = draw(st.sampled_from(_HEADS)), draw(st.sampled_from(_DEPTHS))
    cap = draw(st.sampled_from(_CAPS))
    ends = "-".join(map(str, kv_lengths))
    numbers = st.integers(0, _LONGEST).map(str)
    side = draw(st.just("inf") | numbers | st.just("inf"))
    full = kind == "packed" and draw(st.booleans())
    return Case(
        phase=phase,
        dtype=draw(st.sampled_from(("f32", "f32", "bf16", "f16"))),
        batch=len(lengths),
        q_length=max(q_lengths),
        kv_length=max(1, *kv_lengths),
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        v_head_dim=draw(st.just(head_dim) | st.sampled_from(_DEPTHS)),
        mask=f"lengths-{ends}" if full else f"own-l{side}-{ends}",
        soft_cap=cap,
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from(_SCALES)),
        storage=storage_spec.format_storage(kind, page, q_lengths, shared=page is not None and draw(st.booleans())),
        distribution=draw(st.sampled_from((*_VALUES, "knee") if cap is not None else _VALUES)),
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def _draw_lengths(draw: st.DrawFn, kind: Kind, phase: str, page: int | None) -> tuple[int, int]:
    """Queries and keys of a sequence: in training often as many of both, in pages keys around whole pages."""
    ways: list[Any] = [st.integers(0, _LONGEST), st.integers(1, 24)]
    if page is not None and page <= _LONGEST:
        whole = st.integers(0, _LONGEST // page).map(lambda n: n * page)
        ways += [whole, whole.map(lambda n: n + 1), whole.map(lambda n: max(0, n - 1))]
    keys = draw(st.one_of(*ways))
    if phase == "decode":
        return draw(st.sampled_from((1, 1, 1, 0))), keys
    if kind == "packed" and draw(st.booleans()):
        return keys, keys
    most = _MOST_QUERIES if kind == "packed" else min(keys, _MOST_QUERIES)
    return draw(st.integers(0, most)), keys
