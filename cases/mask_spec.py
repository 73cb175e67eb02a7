"""Mask specs: how a case id names a mask.

    full   causal   causal-o64   window-l31-r0   window-linf-r8-o2   chunked-32   spans-8-24-40-56   balanced-2
    lengths-0-100   dense-d40   densehead-d40   densebatch-d40   indexer-d40   moba-64-3   moba-64-3-o128
    own-l31-0-100

`-oN` is the offset. `-dP` is the percentage of allowed pairs in a random mask. `moba-C-K` has chunks of `C` keys, of
which a query takes `K`. `own-lL-A-B` has `A` keys in the first batch row and `B` in the second. The queries of a row
are its last tokens, and each sees a window of `L` keys before its own. Specs combine with `_and_` and `_or_` (`_and_`
binds tighter): `causal_or_spans-8-24`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from cases import counter_rng
from cases.masks import (
    Bidirectional,
    Causal,
    Chunked,
    Dense,
    Full,
    Indexer,
    Lengths,
    LoadBalancedCausal,
    Mask,
    OwnWindow,
    Window,
)
from cases.moba import Moba

_OFFSET = r"(?:-o(-?\d+))?"
_TERMS = {
    "full": re.compile(r"full"),
    "causal": re.compile(rf"causal{_OFFSET}"),
    "window": re.compile(rf"window-l(\d+|inf)-r(\d+|inf){_OFFSET}"),
    "chunked": re.compile(rf"chunked-(\d+){_OFFSET}"),
    "spans": re.compile(r"spans((?:-\d+-\d+)+)"),
    "balanced": re.compile(r"balanced-(\d+)"),
    "lengths": re.compile(r"lengths((?:-\d+)+)"),
    "dense": re.compile(r"dense-d(\d+)"),
    "densehead": re.compile(r"densehead-d(\d+)"),
    "densebatch": re.compile(r"densebatch-d(\d+)"),
    "indexer": re.compile(r"indexer-d(\d+)"),
    "moba": re.compile(r"moba-(\d+)-(\d+)(?:-o(\d+))?"),
    "own": re.compile(r"own-l(\d+|inf)((?:-\d+)+)"),
}
_FEATURES = {"spans": "bidirectional", "densehead": "dense_head", "densebatch": "dense_batch", "own": "own_window"}


def parse(spec: str) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]:
    """Terms of the spec, `((kind, arguments), ...)` and-ed inside and or-ed outside. Raises `ValueError`."""
    return tuple(tuple(_term(term, spec) for term in group.split("_and_")) for group in spec.split("_or_"))


def _term(term: str, spec: str) -> tuple[str, tuple[str, ...]]:
    for kind, pattern in _TERMS.items():
        if found := pattern.fullmatch(term):
            return kind, tuple(group or "" for group in found.groups())
    raise ValueError(
        f"{term!r} in mask {spec!r} is not a mask; known forms: full, causal[-oN], window-lL-rR[-oN], chunked-C[-oN], "
        f"spans-A-B..., balanced-CP, lengths-L..., dense-dP, densehead-dP, densebatch-dP, indexer-dP, moba-C-K[-oN], "
        f"own-lL-A..."
    )


def features(spec: str) -> list[str]:
    """Feature names of the spec, in the order of first use."""
    found: list[str] = []
    for kind, arguments in (term for group in parse(spec) for term in group):
        if kind == "own":
            found.append("lengths")
        found.append(_FEATURES.get(kind, kind))
        if kind in ("causal", "window", "chunked", "moba") and arguments[-1] not in ("", "0"):
            found.append("offset")
    return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=64)
def build(spec: str, batch: int, num_q_heads: int, q_length: int, kv_length: int, seed: int) -> Mask:
    """The mask object that `spec` names at these sizes; random masks are drawn from `seed`."""

    def term(kind: str, arguments: tuple[str, ...]) -> Mask:
        if kind.startswith(("dense", "indexer")):
            b = batch if kind in ("densebatch", "indexer") else 1
            n = num_q_heads if kind == "densehead" else 1
            array = _random(seed, (b, n, q_length, kv_length), int(arguments[0]))
            if array.shape[:2] != (1, 1):
                # Every second head or batch row is causal too, so that blocks are empty for it and not for the others.
                causal = np.tri(q_length, kv_length, max(0, kv_length - q_length), dtype=bool)
                every_second = array[:, ::2] if kind == "densehead" else array[::2]
                every_second &= causal
            return Indexer(array) if kind == "indexer" else Dense(array)
        if kind in ("lengths", "own"):
            lengths = _integers(arguments[-1])
            if len(lengths) != batch or max(lengths) > kv_length:
                raise ValueError(f"{spec!r} needs one length <= S={kv_length} for each of {batch} batch rows")
            if kind == "lengths":
                return Lengths(lengths)
            return OwnWindow(_side(arguments[0]), tuple(n - q_length for n in lengths)) & Lengths(lengths)
        if kind == "balanced":
            return LoadBalancedCausal(int(arguments[0]), q_length)
        if kind == "moba":
            mask = Moba(*map(_int, arguments))
            mask.check_lengths(q_length, kv_length)
            return mask
        return _FORMULAS[kind](*arguments)

    return functools.reduce(
        lambda a, b: a | b,
        (
            functools.reduce(lambda a, b: a & b, (term(kind, arguments) for kind, arguments in group))
            for group in parse(spec)
        ),
    )


def _spans(text: str) -> Mask:
    edges = _integers(text)
    return Bidirectional(tuple(zip(edges[::2], edges[1::2], strict=True)))


_FORMULAS: dict[str, Callable[..., Mask]] = {
    "full": Full,
    "causal": lambda offset: Causal(_int(offset)),
    "window": lambda left, right, offset: Window(_side(left), _side(right), _int(offset)),
    "chunked": lambda size, offset: Chunked(int(size), _int(offset)),
    "spans": _spans,
}


def _random(seed: int, shape: tuple[int, ...], percent: int) -> np.ndarray:
    """Random booleans; the first key and one key in nine are hidden from everybody, one query in seven sees nothing."""
    if not 0 < percent <= 100:
        raise ValueError(f"the percentage of allowed pairs must be in 1..100, got {percent}")
    array = counter_rng.integers(seed, "mask", shape, 100) < percent
    if shape[-1] > 1:
        array[..., 0::9] = False
    if shape[-2] > 1:
        array[..., 3::7, :] = False
    return array


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("-") if part)


def _int(text: str) -> int:
    return int(text or 0)


def _side(text: str) -> int | None:
    return None if text == "inf" else int(text)
