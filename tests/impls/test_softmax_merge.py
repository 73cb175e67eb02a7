"""Merging parts: the laws of a merge, empty parts, very different maxima, and gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.masks import Dense
from cases.operand_values import Cotangent, Problem
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.roundoff import U
from impls import softmax_merge
from impls.softmax_merge import Normalised, Part
from tests.comparison_asserts import assert_right, compute_expected

QUERIES, KEYS, DEPTH = 2, 5, 3
NOTHING = Part(*(jnp.full((QUERIES, n), x, np.float32) for n, x in ((DEPTH, 0.0), (1, -np.inf), (1, 0.0))))


def part_of(logits: np.ndarray, values: np.ndarray) -> Part:
    """Build a part over keys with `logits [T, S]`, -inf for hidden ones, and `values [S, V]`."""
    top = logits.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    found = Part(weights @ values, top, weights.sum(axis=1, keepdims=True))
    return Part(*(x.astype(np.float32) for x in found))


def attention(logits: np.ndarray, values: np.ndarray, cotangent: Cotangent | None = None) -> dict[str, Bounded]:
    """By the oracle, whose q and k are zeros and whose bias are these logits: attention of one head in f32.

    Logits are `[T, S]` or, with values of its own for each batch row, `[B, T, S]`; -inf for a key that is not seen. The
    oracle gets their distances from the largest, since that is what merging rounds: the logits are given exactly.
    """
    logits, values = (x if x.ndim == 3 else x[None] for x in (logits, values))
    seen, top = np.isfinite(logits), logits.max(axis=-1, keepdims=True).astype(np.float64)
    top = np.where(np.isfinite(top), top, 0.0)
    q, k = (np.zeros((len(logits), length, 1, 1), np.float32) for length in logits.shape[1:])
    bias = np.where(seen, logits - top, 0.0).astype(np.float32)
    problem = Problem(q, k, values[:, :, None].astype(np.float32), Dense(seen[:, None]), bias=bias[:, None])
    found = compute_expected(problem, cotangent, rounds_out=False)
    for name in ("logsumexp", "max_logits"):
        value = found[name].value + top[:, None, :, 0]
        moved = np.where(np.isfinite(value), np.abs(value), 0.0)
        found[name] = Bounded(value, found[name].bound + (U * moved if name == "logsumexp" else 0.0))
    return {
        name: Bounded(
            *(np.squeeze(y, axis=1 if x.value.ndim == 3 or name == "dbias" else 2) for y in (x.value, x.bound))
        )
        for name, x in found.items()
    }


def row(expected: dict[str, Bounded], number: int = 0) -> dict[str, Bounded]:
    """Select one batch row."""
    return {name: Bounded(x.value[number], x.bound[number]) for name, x in expected.items()}


def assert_part(part: Part, expected: dict[str, Bounded]) -> None:
    """What a part stands for, in float64: `out / sum`, `max + log(sum)`, and the value it is shifted by."""
    out, top, total = (np.asarray(x, np.float64) for x in part)
    np.testing.assert_array_equal(top[:, 0], expected["max_logits"].value)
    assert (out[total[:, 0] == 0] == 0).all()
    with np.errstate(divide="ignore"):
        logsumexp = np.where(total == 0, -np.inf, np.where(total == 0, 0.0, top) + np.log(total))[:, 0]
    assert_right({"out": out / np.where(total == 0, 1.0, total), "logsumexp": logsumexp}, expected)


def assert_normalised(found: Normalised, expected: dict[str, Bounded]) -> None:
    assert_right(found._asdict(), expected)


@st.composite
def keys(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw logits of any magnitude, some hidden, and values."""
    finite = st.floats(-1, 1, width=32, allow_subnormal=False)  # XLA counts subnormals as zero on a CPU
    logit = st.one_of(finite, st.just(-np.inf), st.sampled_from([-3e4, -200.0, 0.0, 90.0, 3e4]))
    logits = np.array(draw(st.lists(logit, min_size=QUERIES * KEYS, max_size=QUERIES * KEYS)), np.float32)
    values = np.array(draw(st.lists(finite, min_size=KEYS * DEPTH, max_size=KEYS * DEPTH)), np.float32)
    return logits.reshape(QUERIES, KEYS), values.reshape(KEYS, DEPTH)


def normalised(part: Part) -> Normalised:
    return softmax_merge.normalise(Part(*map(jnp.asarray, part)))


two = jax.jit(lambda a, b: softmax_merge.merge([a, b]))
three = jax.jit(lambda a, b, c: softmax_merge.merge([a, b, c]))
three_normalised = jax.jit(lambda a, b, c: softmax_merge.merge_normalised([a, b, c]))


@settings(max_examples=60, deadline=None)
@given(st.lists(keys(), min_size=3, max_size=3))
def test_merged_parts_are_attention_over_all_keys(given: list[tuple[np.ndarray, np.ndarray]]) -> None:
    logits = np.concatenate([x for x, _ in given], axis=1).astype(np.float64)
    values = np.concatenate([x for _, x in given]).astype(np.float64)
    want = row(attention(logits, values))
    parts = [part_of(*x) for x in given]
    assert_part(three(*parts), want)
    assert_normalised(normalised(three(*parts)), want)
    # A weight is the exponential of a logsumexp, which has the rounding error of its own size.
    out, lse = want["out"], want["logsumexp"]
    of_out, of_lse = out.bound.copy(), lse.bound.copy()
    for part in (row(attention(*x)) for x in given):
        there = np.isfinite(part["logsumexp"].value)
        apart = np.where(there, part["logsumexp"].value - np.where(there, lse.value, 0.0), -np.inf)
        error = np.exp(apart) * (part["logsumexp"].bound + U * np.where(there, np.abs(apart), 0.0))
        of_lse += error
        of_out += error[:, None] * (np.abs(part["out"].value) + np.abs(out.value))
    wider = {"out": Bounded(out.value, of_out), "logsumexp": Bounded(lse.value, of_lse)}
    assert_normalised(three_normalised(*(normalised(part) for part in parts)), wider)


@settings(max_examples=60, deadline=None)
@given(st.lists(keys(), min_size=3, max_size=3), st.permutations(range(3)))
def test_a_merge_is_associative_and_in_any_order(given: list[tuple[np.ndarray, np.ndarray]], order: list[int]) -> None:
    parts = [part_of(*x) for x in given]
    a, b, c = parts
    want = row(attention(np.concatenate([x for x, _ in given], axis=1), np.concatenate([x for _, x in given])))
    for merged in (three(a, b, c), two(two(a, b), c), two(a, two(b, c)), three(*(parts[n] for n in order))):
        assert_part(merged, want)


@settings(max_examples=40, deadline=None)
@given(keys(), st.sampled_from([-np.inf, -1e30, 0.0, 1e30, np.nan]), st.sampled_from([0.0, 7.0, np.nan]))
def test_a_part_over_no_keys_changes_nothing(
    given: tuple[np.ndarray, np.ndarray], max_of_nothing: float, out_of_nothing: float
) -> None:
    part = part_of(*given)
    some = part.sum != 0
    want = Part(jnp.where(some, part.out, 0), jnp.where(some, part.max, -jnp.inf), part.sum)
    nothing = Part(jnp.full_like(part.out, out_of_nothing), jnp.full_like(part.max, max_of_nothing), 0 * part.sum)
    for merged in (two(part, nothing), two(nothing, part), softmax_merge.merge([Part(*map(jnp.asarray, part))])):
        for x, y in zip(merged, want, strict=True):
            np.testing.assert_array_equal(x, y)  # times the exponential of zero


def test_any_number_of_parts_along_an_axis() -> None:
    rng = np.random.default_rng(0)
    logits, values = rng.normal(size=(QUERIES, 12)).astype(np.float32), rng.normal(size=(12, DEPTH)).astype(np.float32)
    parts = [part_of(logits[:, n : n + 1], values[n : n + 1]) for n in range(12)]
    along = Part(*(jnp.stack(x, axis=1) for x in zip(*parts, strict=True)))
    assert_normalised(normalised(softmax_merge.merge_axis(along, axis=1)), row(attention(logits, values)))


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="parts must hold at least one part"):
        softmax_merge.merge([])


def test_a_sink_is_a_part_with_no_value() -> None:
    rng = np.random.default_rng(1)
    logits, values = rng.normal(size=(QUERIES, KEYS)).astype(np.float32), rng.normal(size=(KEYS, DEPTH))
    values = values.astype(np.float32)
    logits[1] = -np.inf
    part = Part(*(jnp.asarray(x)[None, None] for x in part_of(logits, values)))  # [B, T, N, .]
    sinks = jnp.array([0.5, 2.0])
    found = softmax_merge.normalise(softmax_merge.merge([part, softmax_merge.build_sink_part(sinks)]))
    as_a_key = np.concatenate([logits, sinks[:, None]], axis=1), np.concatenate([values, np.zeros((1, DEPTH))])
    assert_right({"out": found.out[0, 0], "logsumexp": found.logsumexp[0, 0]}, row(attention(*as_a_key)))
    assert not found.out[0, 0, 1].any()
    assert found.logsumexp[0, 0, 1] == 2.0
    without = softmax_merge.merge([part, softmax_merge.build_sink_part(jnp.full(2, -jnp.inf))])
    for x, y in zip(without, part, strict=True):
        np.testing.assert_array_equal(x, y)


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

    return softmax_merge.normalise(softmax_merge.merge([part(*x) for x in given]))


def _by_logsumexp(given: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    def part(logits: jax.Array, values: jax.Array) -> Normalised:
        seen = (logits > -jnp.inf).any(axis=1, keepdims=True)
        safe = jnp.where(seen, logits, 0.0)
        logsumexp = jax.nn.logsumexp(safe, axis=1)
        return Normalised(
            jnp.where(seen, jax.nn.softmax(safe, axis=1) @ values, 0.0), jnp.where(seen[:, 0], logsumexp, -jnp.inf)
        )

    return softmax_merge.merge_normalised([part(*x) for x in given])


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

    def in_parts(given: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        out, logsumexp = merged(given)
        return (d_out * out).sum() + d_lse @ logsumexp

    got = jax.grad(in_parts)(given)
    logits, values = (np.concatenate([x[n] for x in given], axis=1 - n) for n in range(2))
    cotangent = Cotangent("both", np.asarray(d_out)[None, :, None], np.asarray(d_lse)[None, None])
    d_logits, d_values = (np.concatenate([x[n] for x in got], axis=1 - n) for n in range(2))
    assert_right({"dbias": d_logits, "dv": d_values}, row(attention(logits, values, cotangent)))
    assert not got[2][0].any()
    assert not got[2][1].any()


def test_no_gradient_is_nan_where_every_part_is_empty() -> None:
    nothing = Part(*(jnp.asarray(x, jnp.float32) for x in NOTHING))

    def loss(parts: list[Part]) -> jax.Array:
        found = softmax_merge.normalise(softmax_merge.merge(parts))
        return found.out.sum() + jnp.where(found.logsumexp == -jnp.inf, 0.0, found.logsumexp).sum()

    for gradient in jax.tree.leaves(jax.grad(loss)([nothing, nothing])):
        assert not gradient.any()
    empty = Normalised(nothing.out, nothing.max[..., 0])
    for gradient in jax.tree.leaves(jax.grad(lambda x: softmax_merge.merge_normalised(x).out.sum())([empty, empty])):
        assert not gradient.any()


def test_forward_and_reverse_mode_are_those_of_attention_over_the_parts() -> None:
    """A part is a key, with its logsumexp as the logit and its `out` as the value; every query has keys of its own."""
    rng = np.random.default_rng(3)

    def part() -> Normalised:
        drawn = rng.normal(size=(QUERIES, DEPTH)), rng.normal(size=QUERIES)
        return Normalised(*(jnp.asarray(x, jnp.float32) for x in drawn))

    def merged(*parts: Normalised) -> Normalised:
        return softmax_merge.merge_normalised(parts)

    parts, tangents = (part(), part()), (part(), part())
    logits, values = (np.stack(x, axis=1) for x in ([p.logsumexp for p in parts], [p.out for p in parts]))
    moved_logits, moved = (np.stack(x, axis=1) for x in ([t.logsumexp for t in tangents], [t.out for t in tangents]))
    _, pull = jax.vjp(merged, *parts)
    _, forward = jax.jvp(merged, parts, tangents)
    # One result of every query at a time, the last of them its logsumexp.
    for number in range(DEPTH + 1):
        d_out = np.zeros((QUERIES, 1, 1, DEPTH), np.float32)
        d_out[..., number : number + 1] = 1.0
        d_lse = np.full((QUERIES, 1, 1), float(number == DEPTH), np.float32)
        want = attention(logits[:, None], values, Cotangent("one", d_out, d_lse))
        d_logits, d_values = want["dbias"], want["dv"]
        back = pull(Normalised(jnp.asarray(d_out[:, 0, 0]), jnp.asarray(d_lse[:, 0, 0])))
        got = {"dbias": np.stack([p.logsumexp for p in back], 1)[:, None], "dv": np.stack([p.out for p in back], 1)}
        assert_right(got, want)
        along, bound = (
            (logits_part[:, 0] * weight(moved_logits)).sum(-1) + (values_part * weight(moved)).sum((-2, -1))
            for logits_part, values_part, weight in (
                (d_logits.value, d_values.value, np.asarray),
                (d_logits.bound, d_values.bound, np.abs),
            )
        )
        found = forward.logsumexp if number == DEPTH else forward.out[:, number]
        assert_right({"out": found}, {"out": Bounded(along, bound)})


def assert_all(found: Normalised, out: float, logsumexp: float) -> None:
    """Exactly: beside the larger part the other is nothing, and the exponential and the logarithm are of 0 and 1."""
    np.testing.assert_array_equal(found.out, np.full((QUERIES, DEPTH), out))
    np.testing.assert_array_equal(found.logsumexp, np.full(QUERIES, logsumexp, np.float32))


@pytest.mark.parametrize("gap", [80.0, 200.0, 3e4, 1e30])
def test_parts_with_very_different_maxima(gap: float) -> None:
    low = part_of(np.full((QUERIES, 1), -gap), np.ones((1, DEPTH)))
    high = part_of(np.full((QUERIES, 1), gap), np.full((1, DEPTH), 2.0))
    for merged in (two(low, high), two(high, low)):
        assert_all(normalised(merged), 2.0, gap)
    assert_all(normalised(two(low, NOTHING)), 1.0, -gap)


@pytest.mark.parametrize("gap", [80.0, 200.0, 3e4, 1e30])
def test_normalised_parts_with_very_different_maxima(gap: float) -> None:
    def part(value: float, logsumexp: float) -> Normalised:
        return Normalised(jnp.full((QUERIES, DEPTH), value), jnp.full(QUERIES, logsumexp))

    def total(parts: list[Normalised]) -> jax.Array:
        found = softmax_merge.merge_normalised(parts)
        return found.out.sum() + found.logsumexp.sum()

    low, high, nothing = part(1.0, -gap), part(2.0, gap), part(np.nan, -np.inf)
    for parts in ([low, high], [high, nothing, low]):
        assert_all(softmax_merge.merge_normalised(parts), 2.0, gap)
        of_out, of_lse = jax.grad(total)(parts)[0]
        assert np.isfinite(of_out).all()
        assert np.isfinite(of_lse).all()
    assert_all(softmax_merge.merge_normalised([low, nothing]), 1.0, -gap)
