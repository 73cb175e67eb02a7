import jax
import jax.numpy as jnp

HI = jax.lax.Precision.HIGHEST
F32 = jnp.float32

_PROGRAMS = {}


def _build(scale, causal, mask_mod, score_mod):
    def run(q, k, v):
        b, t, n, h = q.shape
        s, heads = k.shape[1:3]
        at = jnp.ogrid[:b, :n, :t, :s]
        see = jnp.ones((1, 1, 1, 1), bool)
        if causal:
            see = see & (at[3] <= at[2])
        if mask_mod is not None:
            see = see & mask_mod(*at)
        see = jnp.broadcast_to(see, (b, n, t, s))
        live = see.reshape(b, heads, -1, s).any(axis=2).swapaxes(1, 2)[..., None]
        k, v = (jnp.repeat(jnp.where(live, x, 0).astype(F32), n // heads, axis=2) for x in (k, v))
        z = jnp.einsum("btnh,bsnh->bnts", q.astype(F32), k, precision=HI) * scale
        if score_mod is not None:
            z = score_mod(z, *at)
        z = jnp.where(see, z, -jnp.inf)
        m = jax.lax.stop_gradient(z.max(axis=-1, keepdims=True))
        m = jnp.where(jnp.isfinite(m), m, 0)
        w = jnp.exp(z - m)
        total = w.sum(axis=-1, keepdims=True)
        safe = jnp.where(total == 0, 1, total)
        out = jnp.einsum("bnts,bsnv->btnv", w / safe, v, precision=HI).astype(q.dtype)
        return out, jnp.where(total == 0, -jnp.inf, m + jnp.log(safe))[..., 0]

    return jax.jit(run)


def _code(function):
    return getattr(function, "__code__", function)


def attention(q, k, v, *, causal=False, mask_mod=None, score_mod=None, scale=None, save_residuals=False):
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    key = (scale, bool(causal), _code(mask_mod), _code(score_mod))
    if key not in _PROGRAMS:
        _PROGRAMS[key] = _build(scale, bool(causal), mask_mod, score_mod)
    out, lse = _PROGRAMS[key](q, k, v)
    return (out, {"logsumexp": lse}) if save_residuals else out
