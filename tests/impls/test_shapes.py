"""The shapes and dtypes in signatures of `impls` hold at run time: every call below is traced under a type checker."""

from __future__ import annotations

import subprocess
import sys

import pytest

# jaxtyping's import hook only checks modules that are imported under it, so the calls are traced in a fresh process.
_SCRIPT = """
import functools

from jaxtyping import TypeCheckError, install_import_hook

with install_import_hook("impls", "beartype.beartype"):
    from impls import auto, block_flash, dot_product, flash_gpu, moba, paged, quantized_kv, ragged, splash_tpu
    from impls.block_flash.attention import latent_attention
    from impls.flash_gpu.implementation import build_uniform_sizes

import jax
import jax.numpy as jnp

from cases import mask_spec
from cases.masks import Causal, Full

SPLASH = splash_tpu.BlockSizes.uniform(128, 128)
GPU = build_uniform_sizes(16, 16)
ids = jnp.zeros((2, 24), jnp.int32), jnp.zeros((2, 40), jnp.int32)
q, k, v, sinks = jnp.zeros((2, 24, 4, 8)), jnp.zeros((2, 40, 2, 8)), jnp.zeros((2, 40, 2, 6)), jnp.zeros(4)
bias, slopes = jnp.zeros((1, 4, 24, 40)), jnp.zeros(4)
lengths = jnp.array([30, 40])
tables = {
    "kv_lens": jnp.array([3, 5]),
    "page_indices": jnp.zeros((2, 2), jnp.int32),
    "cu_q_lens": jnp.array([0, 1, 2]),
    "num_seqs": jnp.array([2]),
}
pages, latents = jnp.zeros((6, 4, 2, 8)), jnp.zeros((6, 4, 8))
blocks = mask_spec.build_mask("moba-8-2-o16", 2, 4, 24, 40, 0)
borders = {"cu_q_lens": jnp.array([0, 9, 24]), "cu_kv_lens": jnp.array([0, 19, 40]), "num_seqs": jnp.array([2])}


def trace(attention, *operands, **options):
    def loss(*operands):
        names = ("sinks",) if len(operands) == 4 else ("sinks", "bias") if len(operands) == 5 else ()
        named = dict(zip(names, operands[3:], strict=True))
        arrays = operands[:3] if names else operands
        out, residuals = attention(*arrays, **named, **options, save_residuals=True)
        return out.sum() + residuals["logsumexp"].sum()

    jax.eval_shape(jax.grad(loss, tuple(range(len(operands)))), *operands)


def run(attention, *operands, **options):
    jax.eval_shape(lambda *operands: attention(*operands, **options, save_residuals=True), *operands)


dense = {"mask": Causal(16), "segment_ids": ids, "soft_cap": 5.0}
CALLS = {
    "dot_product": lambda: trace(dot_product.attention, q, k, v, sinks, bias, alibi_slopes=slopes, **dense),
    "block_flash": lambda: trace(
        block_flash.attention, q, k, v, sinks, bias, alibi_slopes=slopes, block_q=16, block_kv=16, **dense
    ),
    "block_flash_packed": lambda: trace(
        block_flash.packed_attention, q[0], k[0], v[0], sinks, causal=True, block_q=16, block_kv=16, **borders
    ),
    "block_flash_latent": lambda: trace(latent_attention, q, k[:, :, 0], value_dim=6, scale=0.3, mask=Causal(16)),
    "splash_tpu": lambda: trace(splash_tpu.attention, q, k, v, sinks, block_sizes=SPLASH, **dense),
    "splash_tpu_packed": lambda: trace(
        splash_tpu.packed_attention, q[0], k[0], v[0], sinks, causal=True, block_sizes=SPLASH, **borders
    ),
    "flash_gpu": lambda: trace(flash_gpu.attention, q, k, v, sinks, bias, block_sizes=GPU, **dense),
    "flash_gpu_packed": lambda: trace(
        flash_gpu.packed_attention, q[0], k[0], v[0], sinks, causal=True, block_sizes=GPU, **borders
    ),
    "moba": lambda: trace(moba.attention, q, k, v, sinks, bias, mask=blocks),
    "moba_tpu": lambda: trace(moba.attention, q, k, v, sinks, mask=blocks, backend="tpu"),
    "moba_dense": lambda: trace(moba.dense_attention, q, k, v, sinks, bias, mask=blocks),
    "auto": lambda: trace(auto.attention, q, k, v, sinks, bias, **dense),
    "quantized_kv": lambda: run(
        quantized_kv.attention,
        q,
        *(x.astype(jnp.int8) for x in (k, v)),
        kv_scales=(jnp.ones((2, 40, 2)), jnp.ones((2, 40, 2))),
        mask=Causal(16),
    ),
    **{
        f"ragged_{backend}": functools.partial(
            run, ragged.attention, q[:, :2], k, v, mask=Causal(30), lengths=lengths, backend=backend, block_kv=16
        )
        for backend in ("portable", "tpu", "gpu")
    },
    **{
        f"paged_{backend}": functools.partial(
            run, paged.attention, q[0, :2], pages, pages, backend=backend, block_q=8, block_kv=16, **tables
        )
        for backend in ("portable", "tpu", "gpu")
    },
    "paged_latent": lambda: run(paged.latent_attention, q[0, :2], latents, value_dim=6, scale=0.3, **tables),
    "paged_update": lambda: run(
        paged.attention_with_update, q[0, :2], k[0, :2], k[0, :2], pages, pages, **tables
    ),
}
for name, call in CALLS.items():
    try:
        call()
    except Exception as error:
        error.add_note(f"in the call of {name}")
        raise
try:
    block_flash.attention(q.astype(jnp.int32), k, v, mask=Full())
except TypeCheckError:
    print("checked")
"""


@pytest.mark.long
def test_arrays_have_the_shapes_and_dtypes_of_the_signatures() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "checked\n"  # so the hook was at work
