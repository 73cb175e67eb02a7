"""Bugs of the masks: what they mean, how they compose, and where they are applied."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from cases.case import Case
from cases.masks import And, Bidirectional, Causal, Full, Lengths, LoadBalancedCausal, Mask, Or
from conformance.mutation.kernels.mask_steps import each, mask_is, mask_starts, pairs, whole
from conformance.mutation.kernels.plain import Array, BackwardSteps, Call, Saved, planted
from conformance.mutation.kernels.triggers import both, empty_rows, has, masked, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "masks")
_FORWARD = "out logsumexp max_logits"
_GRADIENTS = "dq dk dv"


@dataclasses.dataclass(frozen=True)
class _InclusiveSpans(Bidirectional):
    """Spans `[start, stop]`."""

    def allowed(self, i: Any, j: Any) -> Any:
        return Bidirectional(tuple((start, stop + 1) for start, stop in self.spans)).allowed(i, j)


@dataclasses.dataclass(frozen=True)
class _UnpairedChunks(LoadBalancedCausal):
    """The order made with `cp_size` chunks instead of twice as many."""

    def compute_position(self, i: Any) -> Any:
        half = dataclasses.replace(self, cp_size=max(1, self.cp_size // 2))
        return LoadBalancedCausal.compute_position(half, i)


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


def _unequal(case: Case) -> bool:
    return case.q_length != case.kv_length


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "causal-without-effect",
        says="A causal mask has no effect on the logits.",
        kind="causal.noop",
        reference="jax issue 19237",
        shows=_FORWARD,
        trigger=mask_is("causal"),
        steps=each(Causal, lambda mask, call: Full()),
    ),
    _bug(
        "causal-hides-own-position",
        says="A causal mask also hides the key at the position of the query.",
        kind="causal.boundary",
        reference="inferred from MoBA issue 25, > for >=",
        shows=_FORWARD,
        trigger=mask_is("causal"),
        steps=each(Causal, lambda mask, call: Causal(mask.offset - 1)),
    ),
    _bug(
        "causal-at-top-left",
        says="The offset of a causal mask is ignored, so that it starts at the top left.",
        kind="causal.bottom-right",
        reference="cutlass issue 2336; pytorch issue 103082",
        shows=_FORWARD,
        trigger=mask_starts("causal-o"),
        steps=each(Causal, _unaligned),
    ),
    _bug(
        "causal-at-bottom-right",
        says="A causal mask without an offset is aligned to the last key if the lengths differ.",
        kind="causal.bottom-right",
        reference="onnxruntime issue 29020; flash-attention issue 1778",
        shows=_FORWARD,
        trigger=both(mask_is("causal"), _unequal),
        steps=each(Causal, lambda mask, call: mask if mask.offset else Causal(call.kv_length - call.q_length)),
    ),
    _bug(
        "causal-at-bottom-right-for-more-queries-than-keys",
        says="With more queries than keys, a causal mask is aligned to the last key.",
        kind="causal.bottom-right",
        reference="mlx issues 2835, 2836, 2967",
        shows=_FORWARD,
        trigger=both(mask_is("causal"), lambda case: case.q_length > case.kv_length),
        steps=each(Causal, lambda mask, call: Causal(min(mask.offset, call.kv_length - call.q_length))),
    ),
    _bug(
        "causal-drops-the-other-mask",
        says="Of a causal mask and another one that must both hold, only the causal one is applied.",
        kind="mask.causal-and-bool",
        reference="tokamax commit 5de3e74",
        shows=_FORWARD,
        trigger=mask_starts("causal_and"),
        steps=whole(lambda mask, call: mask.left if isinstance(mask, And) else mask),
    ),
    _bug(
        "padding-drops-causal",
        says="Of a causal mask and another one that must both hold, only the other is applied.",
        kind="mask.padding-replaces-causal",
        reference="unsloth-zoo PR 963",
        shows=_FORWARD,
        trigger=mask_starts("causal_and"),
        steps=whole(lambda mask, call: mask.right if isinstance(mask, And) else mask),
    ),
    _bug(
        "backward-always-causal",
        says="The backward pass applies a causal mask even if the call has none.",
        kind="bwd.noncausal-masked",
        reference="triton issues 4174, 4541, 5660, 7216",
        shows=_GRADIENTS,
        trigger=both(trains(), mask_is("full")),
        back=_in_backward(lambda mask, call: Causal()),
    ),
    _bug(
        "backward-causal-at-top-left",
        says="The backward pass ignores the offset of a causal mask.",
        kind="bwd.causal-square-align",
        reference="ffpa-attn PR 300",
        shows=_GRADIENTS,
        trigger=both(trains(), mask_starts("causal-o")),
        back=_in_backward(_unaligned),
    ),
    _bug(
        "full-becomes-causal",
        says="A call without a mask is masked as causal.",
        kind="cp.full-gets-causal",
        reference="MaxText commit b4e047211",
        shows=_FORWARD,
        trigger=mask_is("full"),
        steps=whole(lambda mask, call: Causal() if mask == Full() else mask),
    ),
    _bug(
        "span-end-included",
        says="Spans of bidirectional attention include the position of their end.",
        kind="mask.span-end",
        reference="inferred from vllm PR 47332, which masks image tokens",
        shows=_FORWARD,
        trigger=has("bidirectional"),
        steps=each(Bidirectional, lambda mask, call: _InclusiveSpans(mask.spans)),
    ),
    _bug(
        "spans-ignored",
        says="Bidirectional spans are ignored, so that only the causal mask remains.",
        kind="mask.span-ignored",
        reference="inferred from vllm PR 47332, which masks image tokens",
        shows=_FORWARD,
        trigger=has("bidirectional"),
        steps=whole(lambda mask, call: mask.left if isinstance(mask, Or) else mask),
    ),
    _bug(
        "union-taken-for-intersection",
        says="The union of a causal mask and bidirectional spans is taken for their intersection.",
        kind="mask.causal-and-bool",
        reference="inferred from tokamax commit 5de3e74",
        shows=_FORWARD,
        trigger=has("bidirectional"),
        steps=whole(lambda mask, call: And(mask.left, mask.right) if isinstance(mask, Or) else mask),
    ),
    _bug(
        "balanced-order-ignored",
        says="Queries in load-balanced order are masked as if in their natural order.",
        kind="cp.local-not-reordered",
        reference="MaxText commit 90b0395e1",
        shows=_FORWARD,
        trigger=has("balanced"),
        steps=each(LoadBalancedCausal, lambda mask, call: Causal()),
    ),
    _bug(
        "balanced-with-half-the-chunks",
        says="The load-balanced order of context parallelism is computed with half the chunks.",
        kind="cp.load-balance-pair",
        reference="inferred from MaxText commit b4e047211",
        shows=_FORWARD,
        trigger=has("balanced"),
        steps=each(LoadBalancedCausal, lambda mask, call: _UnpairedChunks(mask.cp_size, mask.length)),
    ),
    _bug(
        "lengths-include-one-key-more",
        says="A batch row sees one key more than its length.",
        kind="lengths.boundary",
        reference="inferred from maskings written as arange <= length",
        shows=_FORWARD,
        trigger=has("lengths"),
        steps=each(Lengths, lambda mask, call: Lengths(tuple(min(n + 1, call.kv_length) for n in mask.lengths))),
    ),
    _bug(
        "length-of-first-row-for-all",
        says="All batch rows use the key length of the first.",
        kind="mask.per-batch",
        reference="ejkernel commits 3ed3b1f, 549a408",
        shows=_FORWARD,
        trigger=both(has("lengths"), lambda case: case.batch > 1),
        steps=each(Lengths, lambda mask, call: Lengths(mask.lengths[:1] * len(mask.lengths))),
    ),
    _bug(
        "mask-of-first-row-for-all",
        says="All batch rows use the mask of the first.",
        kind="mask.per-batch",
        reference="inferred from masks shared across the batch",
        shows=_FORWARD,
        trigger=both(has("dense_batch"), lambda case: case.batch > 1),
        steps=pairs(lambda allowed: allowed[:1]),
    ),
    _bug(
        "rows-after-an-empty-row-move-up",
        says="Rows that see no key vanish from the mask, and later rows move up.",
        kind="mask.empty-row-info",
        reference="jax commit 55c9ed614c",
        shows=_FORWARD,
        trigger=empty_rows,
        steps=pairs(_rows_moved_up),
    ),
    _bug(
        "last-rows-not-masked",
        says="Query rows past the last whole multiple of 8 are not masked.",
        kind="pad.q8",
        reference="inferred from tokamax commits e1ab701, 2a6963a",
        shows=_FORWARD,
        trigger=both(masked, lambda case: case.q_length % 8 != 0),
        steps=pairs(_tail_rows_unmasked),
    ),
    _bug(
        "keys-past-512-hidden",
        says="All keys past the first 512 are masked.",
        kind="flex.blockmask-shorter",
        reference="attention-gym issues 31, 34",
        shows=_FORWARD,
        trigger=lambda case: case.kv_length > 512,
        steps=pairs(_keys_past_512_hidden),
    ),
)
