"""Merging parts: the laws of a merge, empty parts, very different maxima, and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from impls import merging
from impls.merging import Normalised, Part

QUERIES, KEYS, DEPTH = 2, 5, 3
NOTHING = Part(*(np.full((QUERIES, n), x, np.float32) for n, x in ((DEPTH, 0.0), (1, -np.inf), (1, 0.0))))


def part_of(logits: np.ndarray, values: np.ndarray) -> Part:
    """Over keys with `logits [T, S]`, -inf for those that are not seen, and `values [S, V]`."""
    top = logits.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    found = Part(weights @ values, top, weights.sum(axis=1, keepdims=True))
    return Part(*(x.astype(np.float32) for x in found))


def attention(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`out [T, V]` and `logsumexp [T]` in float64, zero and -inf where no key is seen."""
    top = np.where(np.isfinite(logits.max(axis=1)), logits.max(axis=1), 0.0)
    weights = np.exp(logits - top[:, None])
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        logsumexp = top + np.log(total)
    return (weights @ values) / np.where(total == 0, 1, total)[:, None], logsumexp


@st.composite
def keys(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Logits of any size, hidden ones among them, and values."""
    finite = st.floats(-1, 1, width=32, allow_subnormal=False)  # XLA counts subnormals as zero on a CPU
    logit = st.one_of(finite, st.just(-np.inf), st.sampled_from([-3e4, -200.0, 0.0, 90.0, 3e4]))
    logits = np.array(draw(st.lists(logit, min_size=QUERIES * KEYS, max_size=QUERIES * KEYS)), np.float32)
    values = np.array(draw(st.lists(finite, min_size=KEYS * DEPTH, max_size=KEYS * DEPTH)), np.float32)
    return logits.reshape(QUERIES, KEYS), values.reshape(KEYS, DEPTH)


def close(one: Sequence[jax.Array], other: Sequence[jax.Array], within: float = 1e-5) -> None:
    for x, y in zip(one, other, strict=True):
        np.testing.assert_allclose(x, y, rtol=within, atol=within / 10)


def normalised(part: Part) -> Normalised:
    return merging.normalise(Part(*map(jnp.asarray, part)))


two = jax.jit(lambda a, b: merging.merge([a, b]))
three = jax.jit(lambda a, b, c: merging.merge([a, b, c]))
three_normalised = jax.jit(lambda a, b, c: merging.merge_normalised([a, b, c]))


@settings(max_examples=60, deadline=None)
@given(st.lists(keys(), min_size=3, max_size=3))
def test_merged_parts_are_attention_over_all_keys(given: list[tuple[np.ndarray, np.ndarray]]) -> None:
    logits = np.concatenate([x for x, _ in given], axis=1).astype(np.float64)
    values = np.concatenate([x for _, x in given]).astype(np.float64)
    want = attention(logits, values)
    parts = [part_of(*x) for x in given]
    close(normalised(three(*parts)), want)
    # A weight is the exponential of a logsumexp, which has the rounding error of its own size.
    highest = np.abs(want[1], where=np.isfinite(want[1]), out=np.zeros_like(want[1])).max()
    close(three_normalised(*(normalised(part) for part in parts)), want, within=1e-5 + 4 * 2.0**-24 * highest)


@settings(max_examples=60, deadline=None)
@given(st.lists(keys(), min_size=3, max_size=3), st.permutations(range(3)))
def test_a_merge_is_associative_and_in_any_order(given: list[tuple[np.ndarray, np.ndarray]], order: list[int]) -> None:
    parts = [part_of(*x) for x in given]
    a, b, c = parts
    at_once = three(a, b, c)
    close(two(two(a, b), c), at_once)
    close(two(a, two(b, c)), at_once)
    close(three(*(parts[n] for n in order)), at_once)


@settings(max_examples=40, deadline=None)
@given(keys(), st.sampled_from([-np.inf, -1e30, 0.0, 1e30, np.nan]), st.sampled_from([0.0, 7.0, np.nan]))
def test_a_part_over_no_keys_changes_nothing(
    given: tuple[np.ndarray, np.ndarray], max_of_nothing: float, out_of_nothing: float
) -> None:
    part = part_of(*given)
    some = part.sum != 0
    want = Part(np.where(some, part.out, 0), np.where(some, part.max, -np.inf), part.sum)
    nothing = Part(np.full_like(part.out, out_of_nothing), np.full_like(part.max, max_of_nothing), 0 * part.sum)
    for merged in (two(part, nothing), two(nothing, part), merging.merge([Part(*map(jnp.asarray, part))])):
        np.testing.assert_array_equal(merged.max, want.max)
        close(merged, want)


def test_any_number_of_parts_along_an_axis() -> None:
    rng = np.random.default_rng(0)
    logits, values = rng.normal(size=(QUERIES, 12)), rng.normal(size=(12, DEPTH))
    parts = [part_of(logits[:, n : n + 1], values[n : n + 1]) for n in range(12)]
    along = Part(*(jnp.stack(x, axis=1) for x in zip(*parts, strict=True)))
    close(normalised(merging.merge_axis(along, axis=1)), attention(logits, values))


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="parts must hold at least one part"):
        merging.merge([])


def test_a_sink_is_a_part_with_no_value() -> None:
    rng = np.random.default_rng(1)
    logits, values = rng.normal(size=(QUERIES, KEYS)), rng.normal(size=(KEYS, DEPTH))
    logits[1] = -np.inf
    part = Part(*(jnp.asarray(x)[None, None] for x in part_of(logits, values)))  # [B, T, N, .]
    sinks = jnp.array([0.5, 2.0])
    found = merging.normalise(merging.merge([part, merging.of_sinks(sinks)]))
    want = np.exp(logits[0]) @ values / (np.exp(logits[0]).sum() + np.exp(0.5))
    np.testing.assert_allclose(found.out[0, 0], [want, np.zeros(DEPTH)], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.logsumexp[0, 0, 1], 2.0, rtol=1e-6)
    without = merging.merge([part, merging.of_sinks(jnp.full(2, -jnp.inf))])
    close(without, part)


def test_a_value_that_is_no_number_shows() -> None:
    """Only what an empty part holds is ignored: NaN in a part with keys is an error that must not vanish."""
    part = part_of(np.zeros((QUERIES, KEYS)), np.ones((KEYS, DEPTH)))
    for field in Part._fields:
        wrong = part._replace(**{field: np.full_like(getattr(part, field), np.nan)})
        assert not np.isfinite(normalised(two(wrong, part)).out).any(), field


Merge = Callable[[list[tuple[jax.Array, jax.Array]]], tuple[jax.Array, jax.Array]]


def _by_sums(given: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    def part(logits: jax.Array, values: jax.Array) -> Part:
        top = jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
        weights = jnp.exp(logits - jnp.where(top == -jnp.inf, 0.0, top))
        return Part(weights @ values, top, weights.sum(axis=1, keepdims=True))

    return merging.normalise(merging.merge([part(*x) for x in given]))


def _by_logsumexp(given: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    def part(logits: jax.Array, values: jax.Array) -> Normalised:
        seen = (logits > -jnp.inf).any(axis=1, keepdims=True)
        safe = jnp.where(seen, logits, 0.0)
        logsumexp = jax.nn.logsumexp(safe, axis=1)
        return Normalised(
            jnp.where(seen, jax.nn.softmax(safe, axis=1) @ values, 0.0), jnp.where(seen[:, 0], logsumexp, -jnp.inf)
        )

    return merging.merge_normalised([part(*x) for x in given])


@pytest.mark.parametrize("merged", [_by_sums, _by_logsumexp])
def test_gradients_are_those_of_attention_over_all_keys(merged: Merge) -> None:
    rng = np.random.default_rng(2)
    sizes = (KEYS, 2, 3)
    given = [
        (jnp.asarray(rng.normal(size=(QUERIES, n)), jnp.float32), jnp.asarray(rng.normal(size=(n, DEPTH)), jnp.float32))
        for n in sizes
    ]
    given[1] = (given[1][0].at[0].set(-jnp.inf), given[1][1])  # no key of the second part for the first query
    given[2] = (jnp.full((QUERIES, 3), -jnp.inf), given[2][1])  # none of the third for any
    d_out, d_lse = jnp.asarray(rng.normal(size=(QUERIES, DEPTH))), jnp.asarray(rng.normal(size=QUERIES))

    def whole(given: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        logits, values = jnp.concatenate([x for x, _ in given], axis=1), jnp.concatenate([x for _, x in given])
        return (d_out * (jax.nn.softmax(logits, axis=1) @ values)).sum() + d_lse @ jax.nn.logsumexp(logits, axis=1)

    def in_parts(given: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        out, logsumexp = merged(given)
        return (d_out * out).sum() + d_lse @ logsumexp

    got, want = jax.grad(in_parts)(given), jax.grad(whole)(given)
    for (d_logits, d_values), (logits, values) in zip(got, want, strict=True):
        np.testing.assert_allclose(d_logits, logits, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(d_values, values, rtol=1e-4, atol=1e-6)
    assert not got[2][0].any()
    assert not got[2][1].any()


def test_no_gradient_is_nan_where_every_part_is_empty() -> None:
    nothing = Part(*(jnp.asarray(x, jnp.float32) for x in NOTHING))

    def loss(parts: list[Part]) -> jax.Array:
        found = merging.normalise(merging.merge(parts))
        return found.out.sum() + jnp.where(found.logsumexp == -jnp.inf, 0.0, found.logsumexp).sum()

    for gradient in jax.tree.leaves(jax.grad(loss)([nothing, nothing])):
        assert not gradient.any()
    empty = Normalised(nothing.out, nothing.max[..., 0])
    for gradient in jax.tree.leaves(jax.grad(lambda x: merging.merge_normalised(x).out.sum())([empty, empty])):
        assert not gradient.any()


def test_forward_and_reverse_mode_agree_with_differences() -> None:
    rng = np.random.default_rng(3)

    def part() -> Normalised:
        return Normalised(jnp.asarray(rng.normal(size=(QUERIES, DEPTH))), jnp.asarray(rng.normal(size=QUERIES)))

    check_grads(functools.partial(lambda *x: merging.merge_normalised(x)), (part(), part()), order=1, eps=1e-2)


@pytest.mark.parametrize("gap", [80.0, 200.0, 3e4, 1e30])
def test_parts_with_very_different_maxima(gap: float) -> None:
    low = part_of(np.full((QUERIES, 1), -gap), np.ones((1, DEPTH)))
    high = part_of(np.full((QUERIES, 1), gap), np.full((1, DEPTH), 2.0))
    for merged in (two(low, high), two(high, low)):
        close(normalised(merged), (np.full((QUERIES, DEPTH), 2.0), np.full(QUERIES, gap)))
    close(normalised(two(low, NOTHING)), (np.ones((QUERIES, DEPTH)), np.full(QUERIES, -gap)))


@pytest.mark.parametrize("gap", [80.0, 200.0, 3e4, 1e30])
def test_normalised_parts_with_very_different_maxima(gap: float) -> None:
    def part(value: float, logsumexp: float) -> Normalised:
        return Normalised(jnp.full((QUERIES, DEPTH), value), jnp.full(QUERIES, logsumexp))

    def total(parts: list[Normalised]) -> jax.Array:
        found = merging.merge_normalised(parts)
        return found.out.sum() + found.logsumexp.sum()

    low, high, nothing = part(1.0, -gap), part(2.0, gap), part(np.nan, -np.inf)
    for parts in ([low, high], [high, nothing, low]):
        close(merging.merge_normalised(parts), (np.full((QUERIES, DEPTH), 2.0), np.full(QUERIES, gap)))
        of_out, of_lse = jax.grad(total)(parts)[0]
        assert np.isfinite(of_out).all()
        assert np.isfinite(of_lse).all()
    close(merging.merge_normalised([low, nothing]), (np.ones((QUERIES, DEPTH)), np.full(QUERIES, -gap)))
