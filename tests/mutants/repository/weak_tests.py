"""Twelve tests as authors write them: few sizes, wide tolerances, and gradients that nothing is compared with."""

import jax
import jax.numpy as jnp
import numpy as np
from flash import flash_attention


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def operands(length=64, heads=2, kv_heads=2, dtype=jnp.float32, kv_length=None):
    shapes = (length, heads), (kv_length or length, kv_heads), (kv_length or length, kv_heads)
    return [draw(1, t, n, 16, seed=seed, dtype=dtype) for seed, (t, n) in enumerate(shapes)]


def naive(q, k, v, ok=None, cap=None):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
    x = x if cap is None else cap * jnp.tanh(x / cap)
    p = jax.nn.softmax(x if ok is None else jnp.where(ok, x, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", p, v)


def test_full():
    q, k, v = operands()
    np.testing.assert_allclose(flash_attention(q, k, v), naive(q, k, v), atol=1e-4)


def test_causal():
    q, k, v = operands()
    ok = jnp.tril(jnp.ones((64, 64), bool))
    np.testing.assert_allclose(flash_attention(q, k, v, is_causal=True), naive(q, k, v, ok), atol=1e-4)


def test_causal_ignores_the_future():
    q, k, v = operands()
    one = flash_attention(q, k, v, is_causal=True)
    other = flash_attention(q, k.at[:, 40:].set(9.0), v, is_causal=True)
    np.testing.assert_allclose(one[:, :40], other[:, :40], atol=1e-6)


def test_grouped_heads_have_a_shape():
    assert flash_attention(*operands(heads=4)).shape == (1, 64, 4, 16)


def test_bf16_is_close():
    q, k, v = operands(dtype=jnp.bfloat16)
    found = flash_attention(q, k, v).astype(jnp.float32)
    np.testing.assert_allclose(found, naive(*(x.astype(jnp.float32) for x in (q, k, v))), atol=0.1)


def test_window_is_finite():
    assert jnp.isfinite(flash_attention(*operands(), window_size=(8, 0))).all()


def test_soft_cap_changes_something():
    q, k, v = operands()
    assert not np.allclose(flash_attention(q, k, v, softcap=1.0), flash_attention(q, k, v))


def test_sinks_shrink_the_output():
    q, k, v = operands()
    assert jnp.abs(flash_attention(q, k, v, sinks=jnp.full(2, 9.0))).max() < jnp.abs(flash_attention(q, k, v)).max()


def test_mask():
    q, k, v = operands()
    ok = jnp.asarray(np.random.default_rng(5).random((1, 1, 64, 64)) < 0.7)
    np.testing.assert_allclose(flash_attention(q, k, v, ok), naive(q, k, v, ok), atol=0.05)


def test_logsumexp():
    q, k, v = operands()
    _, lse = flash_attention(q, k, v, return_lse=True)
    x = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
    np.testing.assert_allclose(lse, jax.nn.logsumexp(x, axis=-1), rtol=1e-3)


def test_one_query():
    q, k, v = operands(length=1, kv_length=50)
    np.testing.assert_allclose(flash_attention(q, k, v), naive(q, k, v), atol=1e-2)


def test_gradients_are_finite():
    q, k, v = operands()
    grads = jax.grad(lambda *x: flash_attention(*x, is_causal=True).sum(), (0, 1, 2))(q, k, v)
    assert all(jnp.isfinite(x).all() for x in grads)
