"""List the chips that kernels can be compiled for without the chip, and find the compiler for each platform.

A platform's compiler comes in separate packages (libtpu, or JAX's CUDA plugin). It describes chips as topologies
(`jax.experimental.topologies`). `conformance.accelerators.compilation` compiles for a `CompileTarget` from this module.
To add a platform, add a `Toolchain` and its `CompileTarget`s.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from conformance.accelerators.gpus import GPUS
from conformance.accelerators.tpus import TPUS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toolchain:
    """The compiler of one platform: where it is, and how to call it."""

    platform: str  # name of the platform in implementations (`Accelerator.platform`): `"tpu"` or `"gpu"`
    topologies: str  # name of the platform in `jax.experimental.topologies`: `"tpu"` or `"cuda"`
    modules: tuple[str, ...]  # Python modules that must be importable for the compiler to work
    install: str  # the command that installs the compiler
    # Environment variables that the compiler needs on a machine without the accelerator.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    # Function that finds the folder of external programs that the compiler calls, such as `ptxas`; None if the compiler
    # calls no such programs.
    programs: Callable[[], Path | None] | None = None
    programs_are: str = ""  # names of these external programs, for the message that they are missing
    folder_option: str = ""  # the compiler option that takes the folder of these external programs
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)  # further compiler options, by name
    # Whether compiling a program takes seconds. Then only two programs of each case are compiled: the one with the
    # fewest features and the one with the most.
    slow: bool = False

    @property
    def missing(self) -> str | None:
        """The reason why this machine cannot compile for the platform; None if it can."""
        absent = [module for module in self.modules if not _is_importable(module)]
        if not absent and self.programs is not None and self.programs() is None:
            absent = [self.programs_are]
        if not absent:
            return None
        return f"the {self.platform.upper()} compiler is not installed ({', '.join(absent)}): {self.install}"

    @property
    def options(self) -> dict[str, str]:
        """Options to pass to the compiler in every compilation (`jax.stages.Lowered.compile`)."""
        folder = self.programs() if self.programs is not None else None
        return {**self.flags, **({} if folder is None else {self.folder_option: str(folder)})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """A chip to compile for; `topology` has further arguments of `jax.experimental.topologies.get_topology_desc`."""

    name: str
    toolchain: Toolchain
    topology: Mapping[str, str] = dataclasses.field(hash=False)


def find_cuda_toolkit() -> Path | None:
    """Find the folder with `bin/ptxas` and `nvvm/libdevice`: in `CUDA_HOME`, `/usr/local/cuda` or NVIDIA's wheels."""
    places = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places += [Path("/usr/local/cuda"), *_list_wheel_folders()]
    return next((p for p in places if (p / "bin/ptxas").is_file() and (p / "nvvm/libdevice").is_dir()), None)


def find_disassembler() -> Path | None:
    """Find the path of `nvdisasm`: in the CUDA toolkit, in NVIDIA's Python wheels, or on `PATH`."""
    places = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places += [Path("/usr/local/cuda"), *_list_wheel_folders()]
    found = next((place / "bin/nvdisasm" for place in places if (place / "bin/nvdisasm").is_file()), None)
    elsewhere = shutil.which("nvdisasm")
    return found or (Path(elsewhere) if elsewhere else None)


def _list_wheel_folders() -> list[Path]:
    """List the folders where NVIDIA's Python wheels for CUDA 13 are installed."""
    package = importlib.util.find_spec("nvidia")
    return [] if package is None else [Path(place) / "cu13" for place in package.submodule_search_locations or ()]


def _is_importable(module: str) -> bool:
    """Check whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # `find_spec` raises if a parent package is missing
        return False


TPU = Toolchain(
    platform="tpu",
    topologies="tpu",
    modules=("libtpu",),
    install='pip install "attention-conformance[tpu]"',
    environment={
        # Do not ask the cloud's metadata server for the machine's chips: without a TPU, libtpu waits for the server.
        "TPU_SKIP_MDS_QUERY": "1",
        # A TPU chip belongs to one process, so libtpu aborts in a second process. Without a chip, several processes may
        # load it.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
)
GPU = Toolchain(
    platform="gpu",
    topologies="cuda",
    modules=("jax_plugins.xla_cuda13", "jax_cuda13_plugin"),  # the compiler, and the bindings of Triton and Mosaic
    install='pip install "attention-conformance[gpu-compile]" (CUDA 13)',
    programs=find_cuda_toolkit,
    programs_are="ptxas and libdevice",
    folder_option="xla_gpu_cuda_data_dir",
    # Use the default optimization level, as users do. The checks lower the level for the CPU only
    # (`conformance.environment`).
    flags={"xla_backend_optimization_level": "3"},
    slow=True,
)

TARGETS: tuple[CompileTarget, ...] = (
    *(CompileTarget(name=tpu.name, toolchain=TPU, topology={"topology_name": tpu.topology}) for tpu in TPUS),
    *(
        CompileTarget(name=gpu.name, toolchain=GPU, topology={"topology": "1x1x1", "target_config": gpu.config})
        for gpu in GPUS
    ),
)


def list_targets(platform: str | None) -> tuple[CompileTarget, ...]:
    """List the chips of a platform; empty if `platform` is None, as for implementations in portable JAX."""
    return tuple(target for target in TARGETS if target.toolchain.platform == platform)
