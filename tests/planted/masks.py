"""Bugs of the masks: what they mean, how they compose, and where they are applied."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from cases.case import Case
from cases.masks import And, Bidirectional, Causal, Chunked, Full, Lengths, LoadBalancedCausal, Mask, Or, Window
from conformance.sensitivity import PlantedBug
from tests.planted.plain import Array, BackwardSteps, Call, PlainSteps, Saved, planted
from tests.planted.triggers import Trigger, both, empty_rows, has, masked, one_query, trains

_bug = functools.partial(planted, "masks")
_FORWARD = "out logsumexp max_logits"
_GRADIENTS = "dq dk dv"
_window = has("window")


@dataclasses.dataclass(frozen=True)
class _ChunkedFromZero(Chunked):
    """Chunks that end one position late."""

    def allowed(self, i: Any, j: Any) -> Any:
        position = i + self.offset
        return ((position - 1) // self.size == (j - 1) // self.size) & (j <= position)


@dataclasses.dataclass(frozen=True)
class _InclusiveSpans(Bidirectional):
    """Spans `[start, stop]`."""

    def allowed(self, i: Any, j: Any) -> Any:
        return Bidirectional(tuple((start, stop + 1) for start, stop in self.spans)).allowed(i, j)


@dataclasses.dataclass(frozen=True)
class _UnpairedChunks(LoadBalancedCausal):
    """The order made with `cp_size` chunks instead of twice as many."""

    def position(self, i: Any) -> Any:
        half = dataclasses.replace(self, cp_size=max(1, self.cp_size // 2))
        return LoadBalancedCausal.position(half, i)


def _replaced(mask: Mask, change: Callable[[Mask, Call], Mask], call: Call) -> Mask:
    if isinstance(mask, And | Or):
        return type(mask)(_replaced(mask.left, change, call), _replaced(mask.right, change, call))
    return change(mask, call)


def _each(kind: type[Mask], change: Callable[[Any, Call], Mask]) -> PlainSteps:
    """The kernel that takes every mask of a kind for another mask."""

    def replace(mask: Mask, call: Call) -> Mask:
        return change(mask, call) if type(mask) is kind else mask

    return _dense(lambda mask, call: _replaced(mask, replace, call).dense(call.q_length, call.kv_length))


def _dense(mask: Callable[[Mask, Call], Any]) -> PlainSteps:
    return PlainSteps(mask=mask)


def _whole(change: Callable[[Mask, Call], Mask]) -> PlainSteps:
    """The kernel that takes the mask as a whole for another."""
    return _dense(lambda mask, call: change(mask, call).dense(call.q_length, call.kv_length))


def _pairs(change: Callable[[np.ndarray], np.ndarray]) -> PlainSteps:
    """The kernel that gets other booleans `[b, n, T, S]`."""
    return _dense(lambda mask, call: change(mask.dense(call.q_length, call.kv_length)))


def _in_backward(change: Callable[[Mask, Call], Mask]) -> BackwardSteps:
    """The backward pass with another mask on top of the right one."""

    def p(saved: Saved) -> Array:
        call = saved.call
        return jnp.where(change(call.mask, call).dense(call.q_length, call.kv_length), saved.probabilities, 0)

    return BackwardSteps(p=p)


def _unaligned(mask: Mask, call: Call) -> Mask:
    return Causal() if isinstance(mask, Causal) else mask


def _rows_moved_up(allowed: np.ndarray) -> np.ndarray:
    """Rows that see nothing vanish, and later ones move up into their place."""
    moved = np.zeros_like(allowed)
    for b, n in np.ndindex(allowed.shape[:2]):
        live = allowed[b, n][allowed[b, n].any(axis=-1)]
        moved[b, n, : len(live)] = live
    return moved


def _tail_rows_unmasked(allowed: np.ndarray) -> np.ndarray:
    changed = allowed.copy()
    changed[:, :, allowed.shape[2] // 8 * 8 :] = True
    return changed


def _keys_past_512_hidden(allowed: np.ndarray) -> np.ndarray:
    changed = allowed.copy()
    changed[..., 512:] = False
    return changed


def _is(spec: str) -> Trigger:
    return lambda case: case.mask == spec


def _starts(prefix: str, *, offset: bool = False) -> Trigger:
    return lambda case: case.mask.startswith(prefix) and (not offset or "-o" in case.mask)


def _unequal(case: Case) -> bool:
    return case.q_length != case.kv_length


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "causal-without-effect",
        kind="causal.noop",
        reference="jax issue 19237",
        shows=_FORWARD,
        trigger=_is("causal"),
        steps=_each(Causal, lambda mask, call: Full()),
    ),
    _bug(
        "causal-hides-own-position",
        kind="causal.boundary",
        reference="inferred from MoBA issue 25, > for >=",
        shows=_FORWARD,
        trigger=_is("causal"),
        steps=_each(Causal, lambda mask, call: Causal(mask.offset - 1)),
    ),
    _bug(
        "causal-at-top-left",
        kind="causal.bottom-right",
        reference="cutlass issue 2336; pytorch issue 103082",
        shows=_FORWARD,
        trigger=_starts("causal-o"),
        steps=_each(Causal, _unaligned),
    ),
    _bug(
        "causal-at-bottom-right",
        kind="causal.bottom-right",
        reference="onnxruntime issue 29020; flash-attention issue 1778",
        shows=_FORWARD,
        trigger=both(_is("causal"), _unequal),
        steps=_each(Causal, lambda mask, call: mask if mask.offset else Causal(call.kv_length - call.q_length)),
    ),
    _bug(
        "causal-at-bottom-right-for-more-queries-than-keys",
        kind="causal.bottom-right",
        reference="mlx issues 2835, 2836, 2967",
        shows=_FORWARD,
        trigger=both(_is("causal"), lambda case: case.q_length > case.kv_length),
        steps=_each(Causal, lambda mask, call: Causal(min(mask.offset, call.kv_length - call.q_length))),
    ),
    _bug(
        "causal-drops-the-other-mask",
        kind="mask.causal-and-bool",
        reference="tokamax commit 5de3e74",
        shows=_FORWARD,
        trigger=_starts("causal_and"),
        steps=_whole(lambda mask, call: mask.left if isinstance(mask, And) else mask),
    ),
    _bug(
        "padding-drops-causal",
        kind="mask.padding-replaces-causal",
        reference="unsloth-zoo PR 963",
        shows=_FORWARD,
        trigger=_starts("causal_and"),
        steps=_whole(lambda mask, call: mask.right if isinstance(mask, And) else mask),
    ),
    _bug(
        "backward-always-causal",
        kind="bwd.noncausal-masked",
        reference="triton issues 4174, 4541, 5660, 7216",
        shows=_GRADIENTS,
        trigger=both(trains(), _is("full")),
        back=_in_backward(lambda mask, call: Causal()),
    ),
    _bug(
        "backward-causal-at-top-left",
        kind="bwd.causal-square-align",
        reference="ffpa-attn PR 300",
        shows=_GRADIENTS,
        trigger=both(trains(), _starts("causal-o")),
        back=_in_backward(_unaligned),
    ),
    _bug(
        "full-becomes-causal",
        kind="cp.full-gets-causal",
        reference="MaxText commit b4e047211",
        shows=_FORWARD,
        trigger=_is("full"),
        steps=_whole(lambda mask, call: Causal() if mask == Full() else mask),
    ),
    _bug(
        "window-one-key-too-many",
        kind="window.off-by-one",
        reference="MaxText commit 4cb305191; transformers issues 29623, 39408",
        shows=_FORWARD,
        trigger=_window,
        steps=_each(Window, lambda mask, call: dataclasses.replace(mask, left=mask.left + 1)),
    ),
    _bug(
        "window-one-key-too-few",
        kind="window.off-by-one",
        reference="zml issue 763",
        shows=_FORWARD,
        trigger=_window,
        steps=_each(Window, lambda mask, call: dataclasses.replace(mask, left=max(0, mask.left - 1))),
    ),
    _bug(
        "window-without-other-mask-ignored",
        kind="mask.window-ignored-nomask",
        reference="jax commit 099f0a1708",
        shows=_FORWARD,
        trigger=_window,
        steps=_whole(lambda mask, call: Full() if isinstance(mask, Window) else mask),
    ),
    _bug(
        "window-left-side-ignored",
        kind="window.sign",
        reference="hippogriff issue 7; keras-hub issue 2186",
        shows=_FORWARD,
        trigger=_window,
        steps=_each(Window, lambda mask, call: dataclasses.replace(mask, left=None)),
    ),
    _bug(
        "window-right-side-ignored",
        kind="window.right",
        reference="inferred from ejkernel commit 3ed3b1f",
        shows=_FORWARD,
        trigger=_starts("window-l17-r5"),
        steps=_each(Window, lambda mask, call: dataclasses.replace(mask, right=None)),
    ),
    _bug(
        "window-both-sides-alike",
        kind="window.right",
        reference="inferred from ejkernel commit 549a408",
        shows=_FORWARD,
        trigger=_window,
        steps=_each(Window, lambda mask, call: dataclasses.replace(mask, right=mask.left)),
    ),
    _bug(
        "window-zero-is-unbounded",
        kind="window.sentinel-mixup",
        reference="inferred from TransformerEngine issue 3528",
        shows=_FORWARD,
        trigger=both(_window, lambda case: "-r0" in case.mask),
        steps=_each(Window, lambda mask, call: dataclasses.replace(mask, right=mask.right or None)),
    ),
    _bug(
        "window-without-offset",
        kind="decode.window-q-offset",
        reference="MaxText commit 8f82f2d02",
        shows=_FORWARD,
        trigger=_starts("window", offset=True),
        steps=_each(Window, lambda mask, call: dataclasses.replace(mask, offset=0)),
    ),
    _bug(
        "window-without-offset-in-decode",
        kind="decode.window-q-offset",
        reference="MaxText commit 8f82f2d02",
        shows=_FORWARD,
        trigger=both(_starts("window", offset=True), one_query),
        steps=_each(Window, lambda mask, call: mask if call.q_length > 1 else dataclasses.replace(mask, offset=0)),
    ),
    _bug(
        "window-leaks-into-full",
        kind="window.leak-to-global",
        reference="MaxText commit b2530831d",
        shows=_FORWARD,
        trigger=both(_is("full"), lambda case: case.kv_length > 128),
        steps=_whole(lambda mask, call: Window(127, None) if mask == Full() else mask),
    ),
    _bug(
        "chunk-without-offset",
        kind="chunk.local-vs-abs",
        reference="vllm issue 47300, PR 47332",
        shows=_FORWARD,
        trigger=_starts("chunked", offset=True),
        steps=_each(Chunked, lambda mask, call: dataclasses.replace(mask, offset=0)),
    ),
    _bug(
        "chunk-boundary-one-late",
        kind="chunk.boundary",
        reference="inferred from MaxText commit 8bb104777",
        shows=_FORWARD,
        trigger=_starts("chunked"),
        steps=_each(Chunked, lambda mask, call: _ChunkedFromZero(mask.size, mask.offset)),
    ),
    _bug(
        "chunk-as-window",
        kind="chunk.boundary",
        reference="inferred from MaxText commit 8f82f2d02",
        shows=_FORWARD,
        trigger=_starts("chunked"),
        steps=_each(Chunked, lambda mask, call: Window(mask.size - 1, 0, mask.offset)),
    ),
    _bug(
        "span-end-included",
        kind="mask.span-end",
        reference="inferred from vllm PR 47332, which masks image tokens",
        shows=_FORWARD,
        trigger=has("bidirectional"),
        steps=_each(Bidirectional, lambda mask, call: _InclusiveSpans(mask.spans)),
    ),
    _bug(
        "spans-ignored",
        kind="mask.span-ignored",
        reference="inferred from vllm PR 47332, which masks image tokens",
        shows=_FORWARD,
        trigger=has("bidirectional"),
        steps=_whole(lambda mask, call: mask.left if isinstance(mask, Or) else mask),
    ),
    _bug(
        "union-taken-for-intersection",
        kind="mask.causal-and-bool",
        reference="inferred from tokamax commit 5de3e74",
        shows=_FORWARD,
        trigger=has("bidirectional"),
        steps=_whole(lambda mask, call: And(mask.left, mask.right) if isinstance(mask, Or) else mask),
    ),
    _bug(
        "balanced-order-ignored",
        kind="cp.local-not-reordered",
        reference="MaxText commit 90b0395e1",
        shows=_FORWARD,
        trigger=has("balanced"),
        steps=_each(LoadBalancedCausal, lambda mask, call: Causal()),
    ),
    _bug(
        "balanced-with-half-the-chunks",
        kind="cp.load-balance-pair",
        reference="inferred from MaxText commit b4e047211",
        shows=_FORWARD,
        trigger=has("balanced"),
        steps=_each(LoadBalancedCausal, lambda mask, call: _UnpairedChunks(mask.cp_size, mask.length)),
    ),
    _bug(
        "lengths-include-one-key-more",
        kind="lengths.boundary",
        reference="inferred from maskings written as arange <= length",
        shows=_FORWARD,
        trigger=has("lengths"),
        steps=_each(Lengths, lambda mask, call: Lengths(tuple(min(n + 1, call.kv_length) for n in mask.lengths))),
    ),
    _bug(
        "length-of-first-row-for-all",
        kind="mask.per-batch",
        reference="ejkernel commits 3ed3b1f, 549a408",
        shows=_FORWARD,
        trigger=both(has("lengths"), lambda case: case.batch > 1),
        steps=_each(Lengths, lambda mask, call: Lengths(mask.lengths[:1] * len(mask.lengths))),
    ),
    _bug(
        "mask-of-first-row-for-all",
        kind="mask.per-batch",
        reference="inferred from masks shared across the batch",
        shows=_FORWARD,
        trigger=both(has("dense_batch"), lambda case: case.batch > 1),
        steps=_pairs(lambda allowed: allowed[:1]),
    ),
    _bug(
        "rows-after-an-empty-row-move-up",
        kind="mask.empty-row-info",
        reference="jax commit 55c9ed614c",
        shows=_FORWARD,
        trigger=empty_rows,
        steps=_pairs(_rows_moved_up),
    ),
    _bug(
        "last-rows-not-masked",
        kind="pad.q8",
        reference="inferred from tokamax commits e1ab701, 2a6963a",
        shows=_FORWARD,
        trigger=both(masked, lambda case: case.q_length % 8 != 0),
        steps=_pairs(_tail_rows_unmasked),
    ),
    _bug(
        "keys-past-512-hidden",
        kind="flex.blockmask-shorter",
        reference="attention-gym issues 31, 34",
        shows=_FORWARD,
        trigger=lambda case: case.kv_length > 512,
        steps=_pairs(_keys_past_512_hidden),
    ),
)
