"""Dropout of attention weights: the statistics of its masks, and that kernels compute them, with right gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.masks import Causal, Full, Mask
from impls import block_flash, dot_product, flash_gpu, splash_tpu
from impls.dropout_bits import compute_keep_factor, count_dropped, draw_kept
from impls.flash_gpu.implementation import build_uniform_sizes

SPLASH = splash_tpu.BlockSizes.uniform(128, 128)
FUSED = splash_tpu.BlockSizes.uniform(256, 256, 128, 128, fused_backward=True)
RATE = 0.25
KEY = jax.random.PRNGKey(3)
CALLS: dict[str, Callable[..., Any]] = {
    "dot_product": dot_product.attention,
    "block_flash": block_flash.attention,
    "block_flash_small": lambda *x, **named: block_flash.attention(*x, **named, block_q=80, block_kv=24),
    "flash_gpu": functools.partial(flash_gpu.attention, block_sizes=build_uniform_sizes(64, 32)),
    "splash_tpu": functools.partial(splash_tpu.attention, block_sizes=SPLASH),
    "splash_tpu_fused": functools.partial(splash_tpu.attention, block_sizes=FUSED),
}


def compute_dense(x: dict[str, jax.Array], kept: jax.Array, mask: Mask, soft_cap: float) -> tuple[Any, Any]:
    """Compute `out` and `logsumexp` with all logits in memory, from a mask of dropout."""
    q, k, v = x["q"], x["k"], x["v"]
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(y, group, axis=2) for y in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / math.sqrt(q.shape[-1])
    logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(mask.dense(q.shape[1], k.shape[1]), logits, -jnp.inf)
    sinks = jnp.broadcast_to(x["sinks"][:, None, None], (*logits.shape[:3], 1))
    joined = jnp.concatenate([logits, sinks], axis=-1)
    p = jnp.where(kept, jax.nn.softmax(joined)[..., :-1] * compute_keep_factor(RATE), 0.0)
    return jnp.einsum("bnts,bsnv->btnv", p, v, precision="highest"), jax.nn.logsumexp(joined, axis=-1)


def draw_operands() -> dict[str, jax.Array]:
    shapes = {"q": (2, 150, 4, 32), "k": (2, 130, 2, 32), "v": (2, 130, 2, 16), "sinks": (4,)}
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_the_mask(name: str) -> None:
    x, mask, soft_cap = draw_operands(), Causal(3), 4.0
    kept = draw_kept(KEY, RATE, (2, 4, 150, 130))

    def run(x: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Any]:
        options = {"mask": mask, "soft_cap": soft_cap, "dropout_rate": RATE, "dropout_key": key}
        out, residuals = CALLS[name](**x, **options, save_residuals=True)
        return out, residuals["logsumexp"]

    want, pull_want = jax.vjp(lambda x: compute_dense(x, kept, mask, soft_cap), x)
    got, pull = jax.vjp(jax.jit(run), x, KEY)
    cotangents = jax.tree.map(lambda y: jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape), want)
    gradients, of_key = pull(cotangents)
    assert of_key.dtype == jax.dtypes.float0
    # f32 sums of 150 terms of either order differ by less than 150 roundings of the largest.
    for found, wanted in zip(
        jax.tree.leaves((got, gradients)), jax.tree.leaves((want, *pull_want(cotangents))), strict=True
    ):
        limit = 150 * 2.0**-24 * float(jnp.abs(wanted).max()) * 4
        np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)


def read_mask(call: Callable[..., Any], key: Any, q_length: int, kv_length: int) -> np.ndarray:
    """Read the mask of a call from its results: equal weights, and values that are the unit vectors."""
    q = jnp.zeros((2, q_length, 4, 32), jnp.float32)
    k = jnp.zeros((2, kv_length, 2, 32), jnp.float32)
    v = jnp.broadcast_to(jnp.eye(kv_length)[:, None], (2, kv_length, 2, kv_length))
    out = call(q, k, v, dropout_rate=RATE, dropout_key=key)
    return np.asarray(out).transpose(0, 2, 1, 3) > 0


@pytest.mark.parametrize("name", CALLS)
def test_the_mask_depends_on_key_and_indices_only(name: str) -> None:
    want = np.asarray(draw_kept(KEY, RATE, (2, 4, 130, 160)))
    for q_length, kv_length in ((130, 100), (70, 160)):
        key = KEY if q_length > 100 else jax.random.key(3)
        found = read_mask(CALLS[name], key, q_length, kv_length)
        np.testing.assert_array_equal(found, want[:, :, :q_length, :kv_length])


@pytest.mark.parametrize("name", CALLS)
def test_a_rate_of_zero_is_the_call_without_dropout(name: str) -> None:
    x = draw_operands()

    def trace(**options: Any) -> str:
        return str(jax.make_jaxpr(lambda x: CALLS[name](**x, mask=Causal(), **options))(x))

    assert trace() == trace(dropout_rate=0.0, dropout_key=KEY) == trace(dropout_rate=0)


@pytest.mark.parametrize("name", CALLS)
def test_wrong_rates_and_keys_are_refused(name: str) -> None:
    x = draw_operands()
    for rate in (-0.1, 1.0, math.nan, "0.1", jnp.float32(0.1), True):
        with pytest.raises(ValueError, match="dropout_rate"):
            CALLS[name](**x, dropout_rate=rate, dropout_key=KEY)
    for key in (None, 3, jnp.zeros(3, jnp.uint32), jnp.zeros(2, jnp.float32)):
        with pytest.raises(ValueError, match="dropout_key"):
            CALLS[name](**x, dropout_rate=0.1, dropout_key=key)


@pytest.mark.parametrize("name", CALLS)
def test_a_row_without_kept_weights_has_zero_output(name: str) -> None:
    rate = 1 - 2.0**-32
    out, residuals = CALLS[name](
        **draw_operands(), mask=Full(), dropout_rate=rate, dropout_key=KEY, save_residuals=True
    )
    assert count_dropped(rate) == 2**32 - 1
    assert (out == 0).all()
    assert np.isfinite(residuals["logsumexp"]).all()


def list_scores(kept: np.ndarray, rate: float) -> dict[str, np.ndarray]:
    """List statistics of masks `[X, T, S]` that are about standard normal if all weights are independent."""
    x = (~kept - rate) / math.sqrt(rate * (1 - rate))
    others, queries, keys = x.shape
    found = {
        "all": np.asarray([x.sum() / math.sqrt(x.size)]),
        "rows": x.sum(-1) / math.sqrt(keys),
        "columns": x.sum(-2) / math.sqrt(queries),
        "blocks": x.reshape(others, queries // 16, 16, keys // 16, 16).sum((2, 4)) / 16,
        "between": np.stack([(x[a] * x[b]).sum() for a in range(others) for b in range(a)]) / math.sqrt(queries * keys),
    }
    for axis, y in (("pairs of rows", x), ("pairs of columns", x.swapaxes(1, 2))):
        length, above = y.shape[2], (slice(None), *np.triu_indices(y.shape[1], 1))
        sums = (y @ y.swapaxes(1, 2))[above]  # of the products of two rows
        found[axis] = sums / math.sqrt(length)
        found[f"sum of {axis}"] = sums.sum(-1) / math.sqrt(length * sums.shape[1])
        # Twice the sum of the products of the four places that two rows and two columns share.
        fours = sums**2 - (y**2 @ (y**2).swapaxes(1, 2))[above]
        found[f"fours of {axis}"] = fours.sum(-1) / math.sqrt(2 * length * (length - 1) * sums.shape[1])
    return found


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_weights_are_dropped_independently(rate: float) -> None:
    """Batch rows, heads and keys that follow each other are compared as well as rows and columns."""
    kept = np.concatenate([draw_kept(jax.random.PRNGKey(seed), rate, (2, 2, 512, 512)) for seed in range(3)], axis=0)
    scores = list_scores(kept.reshape(-1, 512, 512), rate)
    for name, score in scores.items():
        # The largest of n standard normal values is below sqrt(2 log(n / p)) with probability 1 - p. Sums of few rare
        # events have heavier tails.
        tail = 1 if name.startswith("sum") or rate == 0.5 else 1.4
        assert np.abs(score).max() < tail * math.sqrt(2 * math.log(score.size * 1e5)), name
        if score.size > 100:
            # A normal value has a square of variance 2.
            assert abs((score**2).mean() - 1) < 5 * math.sqrt(2.5 / score.size) + 12 / 512, name


def test_mosaic_does_not_drop_weights() -> None:
    x: dict[str, Any] = {name: y.astype(jnp.bfloat16) for name, y in draw_operands().items() if name != "sinks"}
    with pytest.raises(NotImplementedError, match="dropout"):
        flash_gpu.attention(**x, backend="mosaic", dropout_rate=RATE, dropout_key=KEY)
