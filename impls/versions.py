"""What differs between the versions of JAX, and between the backends a process may run on.

Tested with jax 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from types import ModuleType
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from conformance.contract import Products


def pallas_gpu_attention() -> ModuleType:
    """`jax.experimental.pallas.ops.gpu.attention`, without the deprecation warning it has from jax 0.11 on."""
    name = "jax.experimental.pallas.ops.gpu.attention"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"{name} is deprecated", category=DeprecationWarning)
        return importlib.import_module(name)


def tpu_interpreter(interpret: Any) -> contextlib.AbstractContextManager[None]:
    """A context that traces Pallas TPU kernels with this `interpret=`; one that changes nothing if it is false.

    `True` selects the fast interpreter although `force_tpu_interpret_mode` is annotated for `InterpretParams` only: its
    value becomes `pallas_call`'s `interpret`, in both versions.
    """
    return pltpu.force_tpu_interpret_mode(interpret) if interpret else contextlib.nullcontext()


def runs_on(platform: str) -> bool:
    """Whether this process computes on `platform` (`"cpu"`, `"gpu"`, `"tpu"`)."""
    return jax.default_backend() == platform


def interpret_or(interpret: Any, platform: str) -> Any:
    """`interpret`, or by default the fast interpreter wherever the process does not compute on `platform`."""
    return not runs_on(platform) if interpret is None else interpret


def default_products() -> Products:
    """How this process multiplies f32 operands at JAX's default precision."""
    return {"tpu": "bf16", "gpu": "tf32"}.get(jax.default_backend(), "exact")  # type: ignore[return-value] # literals
