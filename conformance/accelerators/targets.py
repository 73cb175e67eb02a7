"""Accelerators that kernels are compiled for without one: data, and whether this machine has the compiler.

A platform's compiler comes with packages of its own, and describes the chips that it compiles for as topologies
(`jax.experimental.topologies`). Another platform is another `Toolchain` and its `CompileTarget`s.
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
    """What compiles for a platform.

    Attributes:
      platform: as implementations name it (`Accelerator.platform`).
      topologies: the name of the platform in `jax.experimental.topologies`.
      modules: the importable modules that bring the compiler.
      install: the command that installs it.
      environment: variables that the compiler needs on a machine without the accelerator.
      programs: finds the folder with the programs that the compiler calls; none if it calls none.
      programs_are: what is missing where that folder is not found.
      folder_option: the compiler option that takes the folder.
      flags: more compiler options.
      slow: True if a program takes seconds, so that of each case only the plainest and the fullest are compiled.
    """

    platform: str
    topologies: str
    modules: tuple[str, ...]
    install: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    programs: Callable[[], Path | None] | None = None
    programs_are: str = ""
    folder_option: str = ""
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    slow: bool = False

    @property
    def missing(self) -> str | None:
        """Why nothing can be compiled here, or None if the compiler is there."""
        absent = [module for module in self.modules if not _is_importable(module)]
        if not absent and self.programs is not None and self.programs() is None:
            absent = [self.programs_are]
        if not absent:
            return None
        return f"the {self.platform.upper()} compiler is not installed ({', '.join(absent)}): {self.install}"

    @property
    def options(self) -> dict[str, str]:
        """Options of each compilation (`jax.stages.Lowered.compile`)."""
        folder = self.programs() if self.programs is not None else None
        return {**self.flags, **({} if folder is None else {self.folder_option: str(folder)})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """A generation of an accelerator.

    Attributes:
      name: how records name it.
      toolchain: what compiles for it.
      topology: arguments of `jax.experimental.topologies.get_topology_desc`, beside the platform.
    """

    name: str
    toolchain: Toolchain
    topology: Mapping[str, str] = dataclasses.field(hash=False)


def find_cuda_toolkit() -> Path | None:
    """The folder with `bin/ptxas` and `nvvm/libdevice`: `CUDA_HOME`, the usual place, or that of the wheels."""
    places = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places += [Path("/usr/local/cuda"), *_list_wheel_folders()]
    return next((p for p in places if (p / "bin/ptxas").is_file() and (p / "nvvm/libdevice").is_dir()), None)


def find_disassembler() -> Path | None:
    """`nvdisasm`: of the toolkit, of the wheels, or wherever programs are found."""
    places = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places += [Path("/usr/local/cuda"), *_list_wheel_folders()]
    found = next((place / "bin/nvdisasm" for place in places if (place / "bin/nvdisasm").is_file()), None)
    elsewhere = shutil.which("nvdisasm")
    return found or (Path(elsewhere) if elsewhere else None)


def _list_wheel_folders() -> list[Path]:
    package = importlib.util.find_spec("nvidia")
    return [] if package is None else [Path(place) / "cu13" for place in package.submodule_search_locations or ()]


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


TPU = Toolchain(
    platform="tpu",
    topologies="tpu",
    modules=("libtpu",),
    install='pip install "attention-conformance[tpu]"',
    environment={
        # The metadata server, which says what chips a cloud machine has, is not asked: without a TPU it would be
        # waited for.
        "TPU_SKIP_MDS_QUERY": "1",
        # A chip belongs to one process, so a second one that loads the library aborts; without a chip any number may.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
)
GPU = Toolchain(
    platform="gpu",
    topologies="cuda",
    modules=("jax_plugins.xla_cuda13", "jax_cuda13_plugin"),  # the compiler; the bindings of Triton and Mosaic
    install='pip install "attention-conformance[gpu-compile]" (CUDA 13)',
    programs=find_cuda_toolkit,
    programs_are="ptxas and libdevice",
    folder_option="xla_gpu_cuda_data_dir",
    # As users compile, whatever the gate saves on the CPU (`conformance.environment`).
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
    """The targets of kernels that are written for `platform`; none for portable code."""
    return tuple(target for target in TARGETS if target.toolchain.platform == platform)
