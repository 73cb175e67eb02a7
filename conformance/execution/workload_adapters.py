"""Adapt functions that take the operands of a named problem to the canonical call.

A named problem is one of the benchmark JAXBench (`cases.named_problems`). A kernel for it is a function `workload` that
takes the benchmark's operands in the benchmark's layouts. An adapter only converts operands and results, and corrects
no errors of the kernel.

The benchmark's own functions read sizes from a dictionary `CONFIG` in their module. If a kernel's module has such a
dictionary, the entries in it are set to the sizes of the case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from cases.front_ends import slice_last_third
from cases.named_problems import index_problems
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from impls.contract.declarations import Products
from impls.contract.implementation import Implementation

Workload = Callable[..., Any]
# The nonzero entries of the projections for latent attention: signed powers of two, so that products with them are
# exact.
_SIGNS = (1.0, -1.0, 2.0, -0.5)


def build_workload_implementation(
    found: Any, name: str, problem: str, *, products: Products | None = None
) -> Implementation:
    """Build an implementation from a function that takes the operands of a named problem.

    `found` may be decorated with `conformance.declare`. Raises `NotAnAttentionFunction` if `found` is not a function.
    """
    if not callable(found) or isinstance(found, Implementation):
        raise NotAnAttentionFunction(
            f"{name} is a {type(found).__name__}: --problem={problem} takes a function of "
            f"{index_problems()[problem].takes}"
        )
    attention = _ADAPTERS[problem](found)
    vars(attention).update({key: value for key, value in _get_attributes(found).items() if key != "__wrapped__"})
    attention.__doc__ = found.__doc__
    implementation = build_implementation(attention, name, products=products)
    # The benchmark needs only `out`: kernels for it have no backward pass and no residuals.
    declines, takes = index_problems()[problem].declines, implementation.supports_case
    implementation = dataclasses.replace(implementation, gradients=frozenset(), supports_case=declines)
    if problem == "mla_attention":
        # The kernel applies its own front end inside.
        return dataclasses.replace(implementation, front_end=lambda steps, q, k, v, **_: (q, k, v))
    assert takes is not None
    return dataclasses.replace(implementation, supports_case=lambda case: declines(case) or takes(case))


def _get_attributes(function: Any) -> Mapping[str, Any]:
    try:
        return vars(function)
    except TypeError:  # a callable need not have attributes
        return {}


def _set_config_sizes(workload: Workload, **sizes: int) -> None:
    config = getattr(workload, "__globals__", {}).get("CONFIG")
    if isinstance(config, dict):
        config.update({name: size for name, size in sizes.items() if name in config})


def _collect_sizes(q: Any, k: Any) -> dict[str, int]:
    """Return the sizes of dense operands `q [B, T, N, H]`, `k [B, T, K, H]`, by the benchmark's names."""
    batch, length, num_q_heads, head_dim = q.shape
    return {
        "batch": batch,
        "seq_len": length,
        "num_heads": num_q_heads,
        "num_query_heads": num_q_heads,
        "num_kv_heads": k.shape[2],
        "head_dim": head_dim,
    }


def _reject_not_causal(causal: bool) -> None:
    if not causal:
        raise NotImplementedError("this problem is causal: causal must be True")


def _swap_heads(x: Any) -> Any:
    """Turn `[B, T, N, H]` into `[B, N, T, H]`, or back."""
    return jnp.swapaxes(x, 1, 2)


def _adapt_flash(workload: Workload) -> Workload:
    def attention(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        _reject_not_causal(causal)
        _set_config_sizes(workload, **_collect_sizes(q, k))
        return _swap_heads(workload(_swap_heads(q), _swap_heads(k), _swap_heads(v)))

    return attention


def _adapt_gqa(workload: Workload) -> Workload:
    def attention(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        _reject_not_causal(causal)
        _set_config_sizes(workload, **_collect_sizes(q, k))
        return workload(q, k, v)

    return attention


def _adapt_sparse(workload: Workload) -> Workload:
    def attention(q: Any, k: Any, v: Any, *, causal: bool, scale: float | None) -> Any:
        _reject_not_causal(causal)
        if scale != 1:
            raise NotImplementedError("in this problem the queries are scaled already: scale must be 1")
        _set_config_sizes(workload, **_collect_sizes(q, k))
        return _swap_heads(workload(_swap_heads(q), _swap_heads(k), _swap_heads(v)))

    return attention


def _adapt_flex(workload: Workload) -> Workload:
    def attention(q: Any, k: Any, v: Any, *, causal: bool, bias: Any) -> Any:
        _reject_not_causal(causal)
        if bias is None or bias.shape != (1, q.shape[2], q.shape[1], k.shape[1]):
            raise NotImplementedError(
                "in this problem the bias must be [1, N, T, S]: a number for each head, query and key"
            )
        _set_config_sizes(workload, **_collect_sizes(q, k))
        return _swap_heads(workload(_swap_heads(q), _swap_heads(k), _swap_heads(v), bias[0]))

    return attention


def _collect_page_sizes(k_pages: Any, page_indices: Any) -> dict[str, int]:
    """Return the sizes of paged operands, by the benchmark's names."""
    _, page_size, num_kv_heads, head_dim = k_pages.shape
    rows, pages_per_seq = page_indices.shape
    return {
        "num_seqs": rows,
        "max_num_seqs": rows,
        "max_seq_len": pages_per_seq * page_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
        "pages_per_seq": pages_per_seq,
    }


def _adapt_paged(workload: Workload) -> Workload:
    """Adapt paged decoding of one query a sequence. Unused table rows get a key, since no sequence may be empty."""

    def attention(
        q: Any, k_pages: Any, v_pages: Any, *, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any
    ) -> Any:
        del cu_q_lens  # every sequence has one query
        rows = kv_lens.shape[0]
        there = jnp.arange(rows) < num_seqs[0]
        sizes = {"num_query_heads": q.shape[1], "num_q_heads": q.shape[1]}
        _set_config_sizes(workload, **_collect_page_sizes(k_pages, page_indices), **sizes)
        queries = jnp.pad(q, ((0, max(0, rows - q.shape[0])), (0, 0), (0, 0)))[:rows]
        out = workload(
            queries,
            k_pages,
            v_pages,
            jnp.where(there, kv_lens, 1),
            _clip_page_indices(page_indices, k_pages),
            jnp.arange(rows + 1, dtype=jnp.int32),
        )
        return jnp.pad(out, ((0, max(0, q.shape[0] - rows)), (0, 0), (0, 0)))[: q.shape[0]]

    return attention


def _adapt_ragged(workload: Workload) -> Workload:
    """Adapt ragged paged attention; table rows past the last sequence have no queries and no keys."""

    def attention(
        q: Any, k_pages: Any, v_pages: Any, *, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any
    ) -> Any:
        pages, page_size, num_kv_heads, head_dim = k_pages.shape
        rows = kv_lens.shape[0]
        sizes = {"num_q_heads": q.shape[1], "max_num_batched_tokens": q.shape[0]}
        _set_config_sizes(workload, **_collect_page_sizes(k_pages, page_indices), **sizes)
        in_turns = jnp.stack([k_pages, v_pages], axis=3).reshape(pages, page_size, 2 * num_kv_heads, head_dim)
        border = jnp.minimum(jnp.arange(rows + 1), num_seqs[0])
        return workload(
            q,
            in_turns,
            jnp.where(jnp.arange(rows) < num_seqs[0], kv_lens, 0),
            _clip_page_indices(page_indices, k_pages),
            cu_q_lens[border],
            num_seqs,
        )

    return attention


def _clip_page_indices(page_indices: Any, pages: Any) -> Any:
    """Clip every entry of the table to the index of an existing page, since the benchmark has no other entries."""
    return jnp.clip(page_indices, 0, pages.shape[0] - 1)


def _adapt_latent(workload: Workload) -> Workload:
    """Adapt latent attention, whose kernel computes queries, keys and values by projections of its input.

    The adapter gives it projections that permute coordinates and multiply them by signed powers of two. They are exact
    in any order of summation. So the attention inside the kernel gets the raw queries, keys and values of the case. The
    latent is as wide as the keys and values of all heads together. The last projection permutes `out`, and the adapter
    undoes it.
    """

    def attention(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        _reject_not_causal(causal)
        batch, length, heads, head_dim = q.shape
        of = slice_last_third(head_dim)
        nope, rope, v_dim = of.start, head_dim - of.start, v.shape[-1]
        ranks = heads * head_dim, heads * (nope + v_dim)
        width = sum(ranks) + rope
        _set_config_sizes(
            workload,
            **_collect_sizes(q, k),
            emb_dim=width,
            q_lora_rank=ranks[0],
            kv_lora_rank=ranks[1],
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=v_dim,
        )
        down_q, up_q = _build_permutation(ranks[0], "q")
        down_kv, up_kv = _build_permutation(ranks[1], "kv")
        out_first, out_back = _build_permutation(heads * v_dim, "out")

        def flat(x: Any) -> Any:
            return x.reshape(batch, length, -1)

        x = jnp.concatenate([flat(q), flat(k[..., :nope]), flat(v), k[:, :, 0, of]], axis=-1)
        kv_down = np.zeros((width, ranks[1] + rope))
        kv_down[ranks[0] : -rope, : ranks[1]] = down_kv
        kv_down[-rope:, ranks[1] :] = np.eye(rope)
        projections = (
            np.pad(down_q, ((0, width - ranks[0]), (0, 0))),
            up_q,
            kv_down,
            up_kv[:, : heads * nope],
            up_kv[:, heads * nope :],
            np.pad(out_first, ((0, 0), (0, width - heads * v_dim))),
        )
        out = workload(x, *(jnp.asarray(projection, q.dtype) for projection in projections))
        moved = out[..., : heads * v_dim] @ jnp.asarray(out_back, out.dtype)
        return moved.reshape(batch, length, heads, v_dim)

    return attention


def _build_permutation(size: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Build a matrix `[size, size]` with one signed power of two in each row and column, and its inverse."""
    rng = np.random.default_rng(list(name.encode()))
    factors = rng.choice(_SIGNS, size)
    there = np.zeros((size, size))
    there[np.arange(size), rng.permutation(size)] = factors
    return there, np.where(there != 0, 1 / np.where(there == 0, 1, there), 0).T


_ADAPTERS: Mapping[str, Callable[[Workload], Workload]] = {
    "flash_attention": _adapt_flash,
    "gqa_attention": _adapt_gqa,
    "mla_attention": _adapt_latent,
    "sparse_attention": _adapt_sparse,
    "flex_attention": _adapt_flex,
    "paged_attention": _adapt_paged,
    "ragged_paged_attention": _adapt_ragged,
}
