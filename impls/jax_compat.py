"""Hide from the kernels what differs between versions of JAX, and between the backends that a process may run on.

Tested with jax 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

from impls.contract.declarations import Products

Ref = Any
"""A reference to memory inside a Pallas kernel; JAX's type of it is private."""
Scalar = Any
"""An integer inside a kernel: a traced int32 scalar, or an int where it is static."""
Interpret = Any
"""The `interpret` of `pallas_call`: a bool, or the parameters of an interpreter."""


def load_pallas_gpu_attention() -> ModuleType:
    """Load `jax.experimental.pallas.ops.gpu.attention`, without its deprecation warning of jax 0.11."""
    name = "jax.experimental.pallas.ops.gpu.attention"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"{name} is deprecated", category=DeprecationWarning)
        return importlib.import_module(name)


def use_tpu_interpreter(interpret: Interpret) -> contextlib.AbstractContextManager[None]:
    """Return a context that traces Pallas TPU kernels with this `interpret=`; it does nothing if `interpret` is false.

    `True` selects the fast interpreter although `force_tpu_interpret_mode` is annotated for `InterpretParams` only: its
    value becomes `pallas_call`'s `interpret`, in both versions.
    """
    return pltpu.force_tpu_interpret_mode(interpret) if interpret else contextlib.nullcontext()


def build_triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    in_specs: Any,
    out_shapes: Any,
    out_specs: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> Callable[..., Any]:
    """Build a `pallas_call` with the Triton back end, whose inputs are one tree and whose outputs are another.

    From jax 0.11 on it warns when it is lowered for a GPU, after our call has returned. Code that turns warnings into
    errors must exclude `The Pallas Triton backend is deprecated`, as this project's pytest settings do.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=[in_specs],
        out_shape=out_shapes,
        out_specs=out_specs,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )


def build_mosaic_call(
    body: Callable[..., None],
    *,
    name: str,
    grid: Mapping[str, int],
    warpgroups: int,
    outputs: tuple[Any, ...],
    scratch: Mapping[str, Any],
    approximate: bool,
    interpret: Interpret,
    reduction_bytes: int = 2048,
) -> Callable[..., tuple[Any, ...]]:
    """Build a Mosaic GPU kernel that runs `body(*inputs, *outputs, **scratch)` in every warpgroup of every program.

    A program finds its ids by `lax.axis_index` of the grid's names and of `"warpgroup"`. The compiler infers register
    layouts (warpgroup semantics) in all versions; this is JAX's default only from 0.11 on.

    `approximate` selects the GPU's own instructions for functions. Powers of two then flush subnormal results to 0.
    Hyperbolic tangents and logarithms have errors that are too large for an exact kernel.

    `reduction_bytes` of shared memory are reserved for reductions. Those over the columns of an accumulator need none,
    and a kernel with another reduction does not compile without.
    """
    run: Callable[..., tuple[Any, ...]] = plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=dict(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=LoweringSemantics.Warpgroup,
            approx_math=approximate,
            reduction_scratch_bytes=reduction_bytes,
        ),
        interpret=build_gpu_interpreter_params() if interpret is True else interpret,
    )
    return run


def load_device_vector(ref: Ref, interpret: Interpret) -> jax.Array:
    """Load an array from device memory inside a Mosaic GPU kernel, in any register layout.

    Without `optimized=False` only layouts that need no unaligned access are allowed. The interpreter of jax 0.10.2 has
    no such load; there, the second argument is required.
    """
    if interpret:
        return ref[...]
    indexed = inspect.signature(plgpu.load).parameters.get("idx")
    where = () if indexed is None or indexed.default is not inspect.Parameter.empty else (...,)
    found: jax.Array = plgpu.load(ref, *where, optimized=False)
    return found


def build_gpu_interpreter_params(**options: Any) -> Any:
    """Build the parameters of JAX's CPU interpreter of Mosaic GPU kernels, which is public from jax 0.12 on."""
    public = hasattr(plgpu, "InterpretGPUParams")
    home: Any = plgpu if public else importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    return home.InterpretGPUParams(**options)


def get_device_kind(platform: str) -> str:
    """Return the `device_kind` of the mesh in scope, else of this process; empty if it is not of `platform`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform in (platform, {"gpu": "cuda"}.get(platform)):
        return str(device.device_kind)
    return jax.devices()[0].device_kind if runs_on(platform) else ""


def runs_on(platform: str) -> bool:
    """Return whether this process computes on `platform` (`"cpu"`, `"gpu"`, `"tpu"`)."""
    return jax.default_backend() == platform


def widen_int4(stored: jax.Array) -> jax.Array:
    """Convert an int4 array to f32 on a GPU, where XLA computes other values from int4; return others as they are.

    In jax 0.11.2 on an H100, XLA's Triton code is wrong where a conversion from int4 is fused with a transpose or with
    a matrix product: relative errors of 1 (`docs/upstream/jax-gpu-int4-transpose.md`). The barrier keeps the conversion
    apart. No version without the fault is known.
    """
    if stored.dtype != jnp.int4 or not runs_on("gpu"):
        return stored
    widened: jax.Array = jax.lax.optimization_barrier(stored.astype(jnp.float32))
    return widened


def count_multiprocessors() -> int:
    """Count the multiprocessors of the target GPU (see `get_device_kind`); 132, as on an H100 or H200, if unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.num_cores:
        return int(device.num_cores)
    return int(getattr(jax.devices()[0], "core_count", 132))


def get_compute_capability() -> tuple[int, ...] | None:
    """Return the compute capability of this process's first GPU, `(9, 0)` for Hopper; None without a GPU."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return None if capability is None else tuple(int(part) for part in str(capability).split("."))


def get_cuda_version() -> int:
    """Return the version of CUDA that JAX's plugin uses, `1000 * major + 10 * minor`; 0 without a plugin."""
    versions: Any = importlib.import_module("jax._src.lib").cuda_versions
    return 0 if versions is None else int(versions.cuda_runtime_get_version())


def resolve_interpret(interpret: Interpret, platform: str) -> Any:
    """Return `interpret`, or by default True unless the process computes on `platform`."""
    return not runs_on(platform) if interpret is None else interpret


def find_tpu_vmem() -> tuple[str, int] | None:
    """Find generation and VMEM bytes per core of the TPU of the mesh in scope, else of the process; None if unknown."""
    try:
        info = pltpu.get_tpu_info()
    except (ValueError, RuntimeError):  # another platform, or a chip that JAX does not know
        return None
    return str(info.chip_version), int(info.vmem_capacity_bytes)


def count_tpu_cores() -> int:
    """Count the cores that share a call on the target TPU (see `find_tpu_vmem`); 1 if there is none."""
    try:
        return int(pltpu.get_tpu_info().num_cores)
    except (ValueError, RuntimeError):  # another platform, or a chip that JAX does not know
        return 1


def get_default_products() -> Products:
    """Return how this process multiplies f32 operands at JAX's default precision."""
    return {"tpu": "bf16", "gpu": "tf32"}.get(jax.default_backend(), "exact")  # type: ignore[return-value] # literals
