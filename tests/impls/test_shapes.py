"""The shapes and dtypes in signatures of `impls` hold at run time: every call below is traced under a type checker."""

from __future__ import annotations

import subprocess
import sys

import pytest

# jaxtyping's import hook only checks modules that are imported under it, so the calls are traced in a fresh process.
_SCRIPT = """
from jaxtyping import TypeCheckError, install_import_hook

with install_import_hook("impls", "beartype.beartype"):
    from impls import block_flash, dot_product, flash_gpu, splash_tpu
    from impls.block_flash.block_flash_latent import latent_attention
    from impls.flash_gpu.implementation import build_uniform_sizes

import jax
import jax.numpy as jnp

from cases.masks import Causal, Full

SPLASH = splash_tpu.BlockSizes.uniform(128, 128)
GPU = build_uniform_sizes(16, 16)
ids = jnp.zeros((2, 24), jnp.int32), jnp.zeros((2, 40), jnp.int32)
q, k, v, sinks = jnp.zeros((2, 24, 4, 8)), jnp.zeros((2, 40, 2, 8)), jnp.zeros((2, 40, 2, 6)), jnp.zeros(4)
bias, slopes = jnp.zeros((1, 4, 24, 40)), jnp.zeros(4)
borders = {"cu_q_lens": jnp.array([0, 9, 24]), "cu_kv_lens": jnp.array([0, 19, 40]), "num_seqs": jnp.array([2])}


def trace(attention, *operands, **options):
    def loss(*operands):
        names = ("sinks",) if len(operands) == 4 else ("sinks", "bias") if len(operands) == 5 else ()
        named = dict(zip(names, operands[3:], strict=True))
        arrays = operands[:3] if names else operands
        out, residuals = attention(*arrays, **named, **options, save_residuals=True)
        return out.sum() + residuals["logsumexp"].sum()

    jax.eval_shape(jax.grad(loss, tuple(range(len(operands)))), *operands)


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
}
for call in CALLS.values():
    call()
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
