"""Judge a lightning indexer, a function `(q, k, weights, *, top_k, causal=False) -> indices`, as attention.

The indexer's lists become the mask of attention, whose `out` then shows which keys were chosen. A list that is no list
of distinct places, padded with -1, makes `out` NaN. An indexer with a parameter `return_scores` returns
`(indices, scores)` with it, and the check `index_scores` judges these.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from cases.case import Case
from cases.lightning_mask import Lightning, split_indexer_operands
from cases.masks import Mask
from cases.operand_registry import REMOVABLE
from conformance.execution import kernel_errors
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation


def is_indexer(signature: inspect.Signature) -> bool:
    """Return whether a function with this signature is an indexer: it takes `weights` third, and `top_k`."""
    names = list(signature.parameters)
    return names[:3] == ["q", "k", "weights"] and "top_k" in names


def build_indexer(function: Callable[..., Any], name: str, signature: inspect.Signature) -> Implementation:
    """Build the implementation of an indexer; without a parameter `causal` it is judged on all keys only."""
    has_causal = "causal" in signature.parameters

    def supports_case(case: Case) -> str | None:
        if not case.mask.startswith("lightning-") or case.num_kv_heads != 1 or case.storage is not None:
            return "lightning: the function is an indexer, and this case is none of one"
        return None if has_causal or "causal" not in case.mask else "causal: the function has no parameter 'causal'"

    return Implementation(
        name=name,
        call=IndexerCall(function, "return_scores" in signature.parameters),
        description=(inspect.getdoc(function) or "").split("\n")[0],
        offers=frozenset({"lightning"}),
        unsupported={
            "train": "an indexer chooses keys, and has no gradients",
            **{operand.name: "an indexer has no such operand" for operand in REMOVABLE},
        },
        supports_case=supports_case,
        arithmetic=Arithmetic(),
        residuals=frozenset(),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="zero",
        behind_mask="any",
        lower_mask=_lower_mask,
    )


def _lower_mask(
    mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
    if not isinstance(mask, Lightning):
        raise NotImplementedError("lightning: the function is an indexer, and this mask is none of one")
    return {"top_k": mask.topk, "causal": mask.causal}, {}


@dataclasses.dataclass(frozen=True)
class IndexerCall:
    """Attention to the keys that an indexer lists."""

    function: Callable[..., Any]
    returns_scores: bool  # whether the function has a parameter `return_scores`

    def __call__(self, q: Any, k: Any, v: Any, *, top_k: int, causal: bool, **others: Any) -> Any:
        """Return `out [B, T, N, V]` of attention to the listed keys, NaN where a list is wrong.

        Raises:
          NotImplementedError: an optional operand of attention is given.
          WrongReturn: the function does not return integers `[B, T, top_k]`.
        """
        import jax.numpy as jnp  # imported late, since plain functions are also read without JAX

        if given := [name for name, value in others.items() if value is not None]:
            raise NotImplementedError(f"{given[0]}: an indexer has no such operand")
        weights, own, keys = split_indexer_operands(q, k)
        options = {"causal": True} if causal else {}
        indices = _check_lists(self.function(own, keys, weights, top_k=top_k, **options), q, top_k)
        kv_length = k.shape[1]
        named = (indices[..., None] == jnp.arange(kv_length)).sum(axis=2)  # how often each key is listed, [B, T, S]
        is_wrong = (named > 1).any(axis=-1) | ((indices < -1) | (indices >= kv_length)).any(axis=-1)
        seen = (named > 0)[:, None]
        live = seen.any(axis=(1, 2))[:, :, None, None]
        k, v = (jnp.where(live, x, 0).astype(jnp.float32) for x in (k, v))
        logits = jnp.einsum("btnh,bsh->bnts", q.astype(jnp.float32), k[:, :, 0], precision="highest")
        logits = jnp.where(seen, logits * q.shape[-1] ** -0.5, -jnp.inf)
        top = logits.max(axis=-1, keepdims=True)
        p = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0)), 0)
        total = p.sum(axis=-1, keepdims=True)
        p = p / jnp.where(total == 0, 1, total)
        out = jnp.einsum("bnts,bsv->btnv", p, v[:, :, 0], precision="highest")
        return jnp.where(is_wrong[..., None, None], jnp.nan, out).astype(q.dtype)

    def score(self, q: Any, k: Any, weights: Any, *, top_k: int, causal: bool) -> tuple[Any, Any]:
        """Call the indexer with `return_scores=True`, and return lists and scores, `[B, T, top_k]` each.

        Raises:
          WrongReturn: the function does not return integers and f32 numbers of this shape.
        """
        options = {"causal": True} if causal else {}
        returned = self.function(q, k, weights, top_k=top_k, return_scores=True, **options)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise kernel_errors.WrongReturn(
                f"an indexer must return (indices, scores) with return_scores, got {type(returned).__name__}"
            )
        indices, scores = _check_lists(returned[0], q, top_k), returned[1]
        if getattr(scores, "shape", None) != indices.shape or str(scores.dtype) != "float32":
            raise kernel_errors.WrongReturn(f"scores must be float32 {list(indices.shape)}, got {_describe(scores)}")
        return indices, scores


def _check_lists(indices: Any, q: Any, top_k: int) -> Any:
    """Return the lists of an indexer; raise `WrongReturn` unless they are integers `[B, T, top_k]`."""
    import jax.numpy as jnp  # imported late, since plain functions are also read without JAX

    shape = (*q.shape[:2], top_k)
    if getattr(indices, "shape", None) != shape or not jnp.issubdtype(indices.dtype, jnp.signedinteger):
        raise kernel_errors.WrongReturn(
            f"an indexer must return signed integers {list(shape)}, got {_describe(indices)}"
        )
    return indices


def _describe(x: Any) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)} {list(getattr(x, 'shape', ()))}"
