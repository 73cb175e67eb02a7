"""Define kernels with one to three faults each, and the findings that must name them.

The first ten were written before the method was fitted to anything. The last five were written after the first ten had
led to corrections. Beside each fault stands its finding: the kind, a result, and levels of a case.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from reports.causes.finding import BEHIND_MASK, CHECK, FORWARD, GRADIENTS

_HERE = Path(__file__).parent
_DEFAULTS = {"causal": "False", "save_residuals": "False"}
_SPOILED = '''

def spoiled(change: Any) -> Any:
    """Return the identity with a changed cotangent."""

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
    return same
'''
_TOP = "F32 = jnp.float32\n"
_CALL = "    out, saved = forward("
_SCALE = "    scale = h**-0.5 if scale is None else scale\n"
_OUT = "    out = out.astype(q.dtype)\n"
_CAP = "        x = soft_cap * jnp.tanh(x / soft_cap)\n"
_VALUES = "jnp.where(seen, v.astype(F32), 0.0)"
_GRADIENT = (_TOP, _TOP + _SPOILED)
_KEPT = "F32), kf, vf, sinks, bias, ok, soft_cap, scale)\n"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault as a finding should name it.

    Attributes:
      kind: of the finding.
      result: one that is wrong.
      levels: those that a case needs to fail.
    """

    kind: str
    result: str
    levels: frozenset[str]


@dataclasses.dataclass(frozen=True)
class FaultyKernel:
    """A correct kernel with passages of its source changed.

    Attributes:
      name: of the kernel.
      base: the module of the correct kernel.
      options: the parameters that it takes; empty for all.
      faults: what the changes make wrong.
      changes: passages of the source with their replacements.
    """

    name: str
    base: str
    options: tuple[str, ...]
    faults: tuple[Fault, ...]
    changes: tuple[tuple[str, str], ...]

    @property
    def source(self) -> str:
        """The source of the kernel, in which it is called `attention`."""
        text = (_HERE / f"{self.base}.py").read_text(encoding="utf-8")
        for before, after in self.changes:
            if before not in text:
                raise ValueError(f"{self.base} has no passage {before!r}")
            text = text.replace(before, after)
        if not self.options:
            return text
        taken = ", ".join(f"{name}={_DEFAULTS.get(name)}" for name in self.options)
        passed = ", ".join(f"{name}={name}" for name in self.options)
        call = f'\n\nwhole = attention\n\n\n@declare(empty_rows="zero")\ndef attention(q, k, v, *, {taken}):\n'
        return f"{text}{call}    return whole(q, k, v, {passed})\n"


def _create_fault(kind: str, result: str, *levels: str) -> Fault:
    return Fault(kind, result, frozenset(levels))


def _create_kernel(
    name: str, base: str, options: str, faults: tuple[Fault, ...], *changes: tuple[str, str]
) -> FaultyKernel:
    return FaultyKernel(name, base, tuple(options.split()), faults, changes)


_SINK = "        m = jnp.maximum(m, sink)\n"
_CAPPED_SINK = "        if soft_cap is not None:\n            sink = soft_cap * jnp.tanh(sink / soft_cap)\n"
_LSE = "    lse = jnp.where(sums == 0, -jnp.inf, m + jnp.log(full))\n"
_OWN_LSE = """    own = p.sum(-1, keepdims=True)
    lse = jnp.where(own == 0, -jnp.inf, m + jnp.log(jnp.where(own == 0, 1.0, own)))
"""
_LOW = ("ok: Any, soft_cap: Any, scale: Any) -> Any:", "ok: Any, soft_cap: Any, scale: Any, low: Any) -> Any:")
_SUMS = "    sums = p.sum(-1, keepdims=True)\n"
_LOW_SUMS = (
    "    sums = jnp.cumsum(p.astype(jnp.bfloat16), -1)[..., -1:].astype(F32) if low else p.sum(-1, keepdims=True)\n"
)
_VMAPPED = """

@jax.custom_batching.custom_vmap
def own_values(v):
    return v + 0.0


@own_values.def_vmap
def _rule_of_values(size, batched, v):
    return jnp.flip(v, 0) if batched[0] else v, batched[0]


@jax.custom_vjp
def values_of(v):
    return own_values(v)


values_of.defvjp(lambda v: (own_values(v), None), lambda _, g: (g,))
"""
_PRODUCT = '    x = jnp.einsum("tkgh'

TEN = (
    _create_kernel(
        "capped_sinks_and_scale_in_f16",
        "dense_attention",
        "",
        (_create_fault(FORWARD, "out", "sinks", "soft_cap"), _create_fault(FORWARD, "out", "f16", "scale")),
        (_SINK, _CAPPED_SINK + _SINK),
        (_SCALE, "    scale = h**-0.5 if scale is None or q.dtype == jnp.float16 else scale\n"),
    ),
    _create_kernel(
        "last_key_of_a_part_block_and_values_behind_the_mask",
        "dense_attention",
        "causal window",
        (_create_fault(FORWARD, "out", "S % 64"), _create_fault(BEHIND_MASK, "out")),
        (_CALL, "    if s % 64:\n        ok = ok & (jnp.arange(s) < s - 1)\n" + _CALL),
        (_VALUES, "v.astype(F32)"),
    ),
    _create_kernel(
        "three_gradients",
        "dense_attention",
        "soft_cap sinks bias",
        (
            _create_fault(GRADIENTS, "dv", "groups"),
            _create_fault(GRADIENTS, "dsinks", "sinks"),
            _create_fault(GRADIENTS, "dbias", "bias", "soft_cap"),
        ),
        _GRADIENT,
        (
            _CALL,
            """    if n != kv_heads:
        vf = spoiled(lambda g: g * (kv_heads / n))(vf)
    if sinks is not None:
        sinks = spoiled(lambda g: 0.5 * g)(sinks)
    if bias is not None and soft_cap is not None:
        bias = spoiled(lambda g: 1.5 * g)(bias)
"""
            + _CALL,
        ),
    ),
    _create_kernel(
        "residuals_alone",
        "dense_attention",
        "causal soft_cap sinks save_residuals",
        (_create_fault(FORWARD, "logsumexp", "sinks"), _create_fault(FORWARD, "max_logits", "soft_cap")),
        (_LSE, _OWN_LSE),
        (
            "    if soft_cap is not None:\n",
            "    uncapped = jnp.where(ok, x, -jnp.inf).max(-1, keepdims=True)\n    if soft_cap is not None:\n",
        ),
        ('"max_logits": top[..., 0]', '"max_logits": uncapped[..., 0]'),
    ),
    _create_kernel(
        "one_query_and_the_right_side_of_a_window",
        "dense_attention",
        "causal window",
        (_create_fault(FORWARD, "out", "K > 1", "T = 1"), _create_fault(FORWARD, "out", "right side")),
        (
            "            ok &= j <= i + right\n",
            "            ok &= (j < i + right) | (j <= i if right == 0 else False)\n",
        ),
        (_CALL, "    if t == 1 and kv_heads > 1:\n        kf = jnp.roll(kf, 1, axis=2)\n" + _CALL),
    ),
    _create_kernel(
        "dq_of_segments_a_depth_and_sums_in_bf16",
        "dense_attention",
        "causal segment_ids",
        (
            _create_fault(FORWARD, "out", "H % 32"),
            _create_fault(GRADIENTS, "dq", "segment_ids"),
            _create_fault(FORWARD, "out", "bf16"),
        ),
        _GRADIENT,
        _LOW,
        (_SUMS, _LOW_SUMS),
        (_KEPT, _KEPT.replace("scale)", "scale, low=q.dtype == jnp.bfloat16)")),
        (
            _CALL + "q.astype(F32)",
            """    qf = q.astype(F32)
    if segment_ids is not None:
        qf = spoiled(lambda g: 2.0 * g)(qf)
    if h % 32:
        kf = kf.at[..., -1].set(0.0)
"""
            + _CALL
            + "qf.astype(F32)",
        ),
    ),
    _create_kernel(
        "values_under_vmap",
        "dense_attention",
        "causal sinks",
        (_create_fault(CHECK, "transforms"),),
        (_TOP, _TOP + _VMAPPED),
        (_VALUES, "jnp.where(seen, values_of(v.astype(F32)), 0.0)"),
    ),
    _create_kernel(
        "paged_window_and_sinks_of_the_key_head",
        "paged_attention",
        "",
        (_create_fault(FORWARD, "out", "left side"), _create_fault(FORWARD, "out", "groups", "sinks")),
        (
            "        ok &= j >= position[:, None] - window[0]\n",
            "        ok &= j > position[:, None] - window[0] - (window[0] == 0)\n",
        ),
        (
            "        sink = sinks.astype(F32)[None, :, None]\n",
            "        sink = sinks.astype(F32)[jnp.arange(n) // group][None, :, None]\n",
        ),
    ),
    _create_kernel(
        "packed_cap_under_a_window_and_dk_of_groups",
        "packed_attention",
        "",
        (_create_fault(FORWARD, "out", "soft_cap", "left side"), _create_fault(GRADIENTS, "dk", "groups")),
        _GRADIENT,
        (_CAP, "        x = soft_cap * jnp.tanh(x / soft_cap) if window is None else x\n"),
        (_PRODUCT, "    if group > 1:\n        kf = spoiled(lambda g: g / group)(kf)\n" + _PRODUCT),
    ),
    _create_kernel(
        "bias_of_one_head_segments_under_a_window_and_the_depth_of_v",
        "dense_attention",
        "causal window segment_ids bias",
        (
            _create_fault(FORWARD, "out", "a bias that is the same for all heads"),
            _create_fault(FORWARD, "out", "segment_ids", "window"),
            _create_fault(FORWARD, "out", "V != H"),
        ),
        (
            "        x = x + bias.astype(F32)\n",
            """        add = bias.astype(F32)
        if bias.shape[1] == 1 and n > 1:
            add = jnp.concatenate([add, jnp.zeros((add.shape[0], n - 1, *add.shape[2:]), F32)], 1)
        x = x + add
""",
        ),
        (
            "    if segment_ids is not None:\n        q_ids",
            "    if segment_ids is not None and window is None:\n        q_ids",
        ),
        (_SCALE, "    scale = v.shape[-1] ** -0.5 if scale is None else scale\n"),
    ),
)

FIVE = (
    _create_kernel(
        "dk_of_segments_in_f16_and_the_last_column_of_v",
        "dense_attention",
        "causal segment_ids",
        (_create_fault(GRADIENTS, "dk", "segment_ids", "f16"), _create_fault(FORWARD, "out", "V != H")),
        _GRADIENT,
        (
            _CALL,
            """    if v.shape[-1] != h:
        vf = vf.at[..., -1].set(0.0)
    if segment_ids is not None and q.dtype == jnp.float16:
        kf = spoiled(lambda g: 0.8 * g)(kf)
"""
            + _CALL,
        ),
    ),
    _create_kernel(
        "cap_left_out_in_bf16_and_logsumexp_of_many_keys",
        "dense_attention",
        "causal soft_cap save_residuals",
        (_create_fault(FORWARD, "out", "bf16", "soft_cap"), _create_fault(FORWARD, "logsumexp", "S > 512")),
        _LOW,
        (_KEPT, _KEPT.replace("scale)", "scale, low=q.dtype == jnp.bfloat16)")),
        (_CAP, "        x = soft_cap * jnp.tanh(x / soft_cap) if not low else x\n"),
        (_LSE, _LSE + "    if s > 512:\n        lse = lse - 1.0\n"),
    ),
    _create_kernel(
        "dsinks_under_a_window_and_more_queries_than_keys",
        "dense_attention",
        "window sinks",
        (_create_fault(GRADIENTS, "dsinks", "sinks", "window"), _create_fault(FORWARD, "out", "T > S")),
        _GRADIENT,
        (
            _CALL,
            "    if sinks is not None and window is not None:\n"
            "        sinks = spoiled(lambda g: 0.0 * g)(sinks)\n" + _CALL,
        ),
        (_OUT, "    out = out * (jnp.arange(t) < s)[None, :, None, None]\n" + _OUT),
    ),
    _create_kernel(
        "packed_scale_of_deep_heads_and_sinks_in_bf16",
        "packed_attention",
        "",
        (_create_fault(FORWARD, "out", "H > 64"), _create_fault(FORWARD, "out", "bf16", "sinks")),
        (_SCALE, _SCALE + "    scale = scale * 1.1 if h > 64 else scale\n"),
        (
            "        sink = sinks.astype(F32)[:, None, None]\n",
            "        sink = sinks.astype(F32)[:, None, None] * (0.5 if q.dtype == jnp.bfloat16 else 1.0)\n",
        ),
    ),
    _create_kernel(
        "bias_under_causal_values_behind_the_mask_and_dv_of_one_key_head",
        "dense_attention",
        "causal bias",
        (
            _create_fault(FORWARD, "out", "bias", "causal"),
            _create_fault(BEHIND_MASK, "out"),
            _create_fault(GRADIENTS, "dv", "mqa"),
        ),
        _GRADIENT,
        (_VALUES, "v.astype(F32)"),
        (
            _CALL,
            """    if causal:
        bias = None
    if kv_heads == 1 < n:
        vf = spoiled(lambda g: 0.5 * g)(vf)
"""
            + _CALL,
        ),
    ),
)
