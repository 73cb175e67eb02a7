"""Adapt the Triton attention kernels of the gpuemu corpus, so that the gate judges them on a CPU.

The corpus (https://github.com/sarkar-dipankar/gpuemu-corpus, arXiv:2606.20128) has two attention kernels and a wrong
copy of each. Its files are read from a clone, and run in Triton's interpreter:

    export GPUEMU_CORPUS=CLONE/gpuemu_corpus/data TRITON_INTERPRET=1     # needs torch and triton
    python -m conformance run --in-process --impl=docs/judge_gpuemu.py:flash_attention_triton_buggy
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from conformance import declare

# The kernels hold one head, forward only; their `meta.json` names the dtypes.
_UNSUPPORTED = {
    "train": "forward only",
    "bf16": "float32 and float16 only",
    "v_head_dim": "values have the depth of keys",
    **dict.fromkeys(("gqa", "mqa"), "one head"),
}


def _load_kernel(name: str) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """Load `run` of a corpus kernel, with its tensors on the CPU."""
    torch.cuda.is_available = lambda: True  # the kernel is defined only then
    path = Path(os.environ["GPUEMU_CORPUS"]) / name / "kernel.py"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    code = compile(path.read_text(encoding="utf-8").replace('device="cuda"', 'device="cpu"'), str(path), "exec")
    exec(code, module.__dict__)
    run: Callable[[dict[str, np.ndarray]], np.ndarray] = module.run
    return run


def _adapt(name: str) -> Callable[..., jax.Array]:
    """Make a function of `[B, T, N, H]` operands that calls the kernel for each head of each batch row."""
    run = _load_kernel(name)

    def compute(q: Any, k: Any, v: Any) -> np.ndarray:
        out = np.empty(q.shape, q.dtype)
        for b, n in np.ndindex(q.shape[0], q.shape[2]):
            out[b, :, n] = run({name: np.asarray(x)[b, :, n] for name, x in (("q", q), ("k", k), ("v", v))})
        return out

    @declare(unsupported=_UNSUPPORTED)
    def attention(q: Any, k: Any, v: Any) -> jax.Array:
        return jax.pure_callback(compute, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v)

    return attention


attention_triton = _adapt("attention_triton")
attention_triton_buggy = _adapt("attention_triton_buggy")
flash_attention_triton = _adapt("flash_attention_triton")
flash_attention_triton_buggy = _adapt("flash_attention_triton_buggy")
