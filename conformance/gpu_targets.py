"""GPUs to compile for on a machine without one: their figures, and the topology that XLA's compiler takes.

XLA compiles for a GPU from a description of it (`GpuTargetConfigProto`), given the optional wheels of the extra
`gpu-compile`: the CUDA plugin, `ptxas` and `libdevice`. Programs are compiled to machine code and never run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

EXTRA = "gpu-compile"
# Modules of the wheels: the PJRT plugin, its Python half with the Triton and Mosaic bindings.
_PLUGIN_MODULES = ("jax_plugins.xla_cuda13", "jax_cuda13_plugin")


class CompilerMissing(Exception):  # noqa: N818 -- a statement, as the message is
    """The wheels that compile for a GPU are not installed; the message says which, and how to get them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """What the compiler wants to know of a GPU.

    Figures are of the CUDA C++ programming guide, "Compute capabilities" (threads, registers, shared memory), and of
    the maker's data sheets (cores, memory). Shared memory is what a kernel is checked against; the speeds only steer
    XLA's own choices.

    Attributes:
      name: `"a100"`, `"h100"`, `"b200"`.
      major: of the compute capability; the minor is 0 in all of them.
      architecture: as `ptxas` names it.
      core_count: multiprocessors.
      fpus_per_core: f32 units of a multiprocessor.
      shared_memory_per_core: bytes.
      shared_memory_per_block: bytes a block may ask for at most.
      l2_cache: bytes.
      memory: bytes.
      bandwidth: bytes a second.
      clock_ghz: boost clock.
    """

    name: str
    major: int
    architecture: str
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    l2_cache: int
    memory: int
    bandwidth: int
    clock_ghz: float

    @property
    def config(self) -> str:
        """The `GpuTargetConfigProto` as text."""
        # From compute capability 9 on, matrix instructions are in the architecture-specific set only ("sm_90a").
        extension = "ACCELERATED_FEATURES" if self.architecture.endswith("a") else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block_optin: {self.shared_memory_per_block}
  core_count: {self.core_count}
  fpus_per_core: {self.fpus_per_core}
  l2_cache_size: {self.l2_cache}
  memory_bandwidth: {self.bandwidth}
  device_memory_size: {self.memory}
  clock_rate_ghz: {self.clock_ghz}
  cuda_compute_capability {{ major: {self.major} minor: 0 feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


_KIB = 1024
TARGETS: tuple[GpuTarget, ...] = (
    GpuTarget(
        name="a100",
        major=8,
        architecture="sm_80",
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_core=164 * _KIB,
        shared_memory_per_block=163 * _KIB,
        l2_cache=40 * _KIB**2,
        memory=80 * 10**9,
        bandwidth=2_039 * 10**9,
        clock_ghz=1.41,
    ),
    GpuTarget(
        name="h100",
        major=9,
        architecture="sm_90a",
        core_count=132,
        fpus_per_core=128,
        shared_memory_per_core=228 * _KIB,
        shared_memory_per_block=227 * _KIB,
        l2_cache=50 * _KIB**2,
        memory=80 * 10**9,
        bandwidth=3_350 * 10**9,
        clock_ghz=1.98,
    ),
    GpuTarget(
        name="b200",
        major=10,
        architecture="sm_100a",
        core_count=148,
        fpus_per_core=128,
        shared_memory_per_core=228 * _KIB,
        shared_memory_per_block=227 * _KIB,
        l2_cache=126 * _KIB**2,
        memory=180 * 10**9,
        bandwidth=7_700 * 10**9,
        clock_ghz=1.965,
    ),
)


def missing() -> str | None:
    """Why this machine cannot compile for GPUs, or None if it can."""
    absent = [name for name in _PLUGIN_MODULES if not _found(name)]
    if not absent and _toolkit() is None:
        absent = ["ptxas and libdevice"]
    if not absent:
        return None
    return f"{', '.join(absent)} not installed: compiling for GPUs needs the extra {EXTRA} (CUDA 13)"


def sharding(target: GpuTarget) -> NamedSharding:
    """A sharding on one device of the target, for the `jax.ShapeDtypeStruct`s of what is to be compiled.

    Kernels are cached in a process regardless of architecture (Mosaic GPU): take one process for each target.

    Raises:
      CompilerMissing: if the wheels are not installed.
    """
    if (reason := missing()) is not None:
        raise CompilerMissing(reason)
    toolkit = _toolkit()
    assert toolkit is not None  # or `missing` had said so
    _tell_xla(toolkit)
    description: Any = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=target.config)
    mesh = topologies.make_mesh(topo=description, mesh_shape=(1,), axis_names=("x",))
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]  # untyped upstream


def arguments(target: GpuTarget, tree: Any) -> Any:
    """Shapes and dtypes of `tree`'s arrays, placed on the target, to call `jax.jit(f).lower` with."""
    where = sharding(target)

    def place(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)  # type: ignore[no-untyped-call]  # likewise

    return jax.tree.map(place, tree)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def _toolkit() -> Path | None:
    """The folder with `bin/ptxas` and `nvvm/libdevice`: `CUDA_HOME`, the usual place, or the wheels'."""
    places = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places.append(Path("/usr/local/cuda"))
    if (package := importlib.util.find_spec("nvidia")) is not None:
        places += [Path(place) / "cu13" for place in package.submodule_search_locations or ()]
    return next((p for p in places if (p / "bin/ptxas").is_file() and (p / "nvvm/libdevice").is_dir()), None)


def _tell_xla(toolkit: Path) -> None:
    """XLA looks for the toolkit in one folder of its flags, and for `ptxas` on the path."""
    if "xla_gpu_cuda_data_dir" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={toolkit}".strip()
    if str(toolkit / "bin") not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([str(toolkit / "bin"), os.environ.get("PATH", "")])
