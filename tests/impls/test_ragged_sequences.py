"""Decode attention over whole sequences: chunks and then tokens, and caches that are merged, are one pass."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.masks import Causal, Chunked, Lengths, Mask, Window
from cases.operand_values import Problem, draw_problem
from conformance.truth.rounding_bounds import compute_expectation
from impls import ragged, softmax_merge
from impls.ragged.attention import Backend
from tests.comparison_asserts import assert_right
from tests.impls.test_ragged import IMPLEMENTATIONS, OPTIONS, int32, sinks_of

MASKS = {
    "causal": Causal(),
    "window": Window(11, 0),
    "chunked": Chunked(16),
    "window and chunked": Window(11, 0) & Chunked(16),
}


def whole_sequence(mask: Mask) -> tuple[Problem, dict[str, Any]]:
    problem = dataclasses.replace(
        draw_problem(parse_case_id("train/f32/B2.T50.S50.N4.K2.H16.V24/causal/sinks/normal/s1")), mask=mask
    )
    return problem, dict(compute_expectation(problem, IMPLEMENTATIONS["ragged"].arithmetic).forward)


@pytest.mark.parametrize("backend", OPTIONS)
@pytest.mark.parametrize("name", MASKS)
def test_chunks_of_a_prompt_then_every_token_are_one_causal_pass(backend: Backend, name: str) -> None:
    """A cache longer than the sequence, filled as tokens come; one program for chunks and one for tokens."""
    problem, truth = whole_sequence(MASKS[name])

    @functools.partial(jax.jit, static_argnames="queries")
    def step(q: jax.Array, k: jax.Array, v: jax.Array, start: Any, queries: int) -> jax.Array:
        filled = jnp.arange(60)[:, None, None] < start + queries
        cache = (jnp.where(filled, jnp.pad(x, ((0, 0), (0, 10), (0, 0), (0, 0))), jnp.nan) for x in (k, v))
        lengths = jnp.full(2, start + queries, jnp.int32)
        return ragged.attention(
            jax.lax.dynamic_slice_in_dim(q, start, queries, axis=1),
            *cache,
            mask=MASKS[name],
            lengths=lengths,
            positions=lengths - queries,
            sinks=sinks_of(problem),
            backend=backend,
            **OPTIONS[backend],
        )

    starts = [(0, 12), (12, 12), *((n, 1) for n in range(24, 50))]
    pieces = [step(problem.q, problem.k, problem.v, jnp.int32(n), queries=count) for n, count in starts]
    assert_right({"out": np.concatenate(pieces, axis=1)}, truth)


@pytest.mark.parametrize("backend", OPTIONS)
def test_a_prompts_cache_and_what_was_generated_since_merge_to_one_pass(backend: Backend) -> None:
    """Two caches with lengths of their own, either of which may be empty; the sink is counted with one of them."""
    problem = draw_problem(parse_case_id("decode/f32/B4.T1.S60.N4.K2.H16.V24/full/sinks/large/s2"))
    prompt, since = [0, 32, 7, 0], [28, 0, 21, 0]
    total = [a + b for a, b in zip(prompt, since, strict=True)]
    x: dict[str, Any] = {"backend": backend, **OPTIONS[backend]}
    # Keys of the whole sequence, wherever they are kept.
    caches = [np.full((4, size, *a.shape[2:]), np.nan, np.float32) for size in (32, 28) for a in (problem.k, problem.v)]
    for row, (a, b) in enumerate(zip(prompt, since, strict=True)):
        for number, array in enumerate((problem.k, problem.v)):
            caches[number][row, :a] = array[row, :a]
            caches[2 + number][row, :b] = array[row, a : a + b]
    q, k_prompt, v_prompt, k_since, v_since = map(jnp.asarray, (problem.q, *caches))
    first = ragged.compute_parts(q, k_prompt, v_prompt, lengths=int32(*prompt), **x)
    second = ragged.compute_parts(q, k_since, v_since, lengths=int32(*since), sinks=sinks_of(problem), **x)
    truth = compute_expectation(
        dataclasses.replace(problem, mask=Lengths(tuple(total))), IMPLEMENTATIONS["ragged"].arithmetic
    )
    for parts in ([first, second], [second, first]):
        found = softmax_merge.normalise(softmax_merge.merge(parts))
        assert_right({"out": found.out, "logsumexp": np.asarray(found.logsumexp).swapaxes(1, 2)}, truth.forward)
