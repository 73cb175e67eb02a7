"""The chips that kernels are compiled for on a machine without them, and the compilers that this needs.

Each platform has a compiler in packages of its own, which describes chips as topologies
(`jax.experimental.topologies`). To add a platform, add a `Toolchain` and its `CompileTarget`s.
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
    """The compiler of a platform.

    Attributes:
      platform: the platform as implementations name it (`Accelerator.platform`).
      topologies: the platform as `jax.experimental.topologies` names it.
      modules: the modules to import that contain the compiler.
      install: the command that installs the compiler.
      environment: environment variables that the compiler needs on a machine without the accelerator.
      programs: finds the folder of the programs that the compiler calls; None if it calls none.
      programs_are: names of these programs, for the message that they are missing.
      folder_option: the compiler option that takes the folder.
      flags: further compiler options.
      slow: whether a program takes seconds. Then only the plainest and the fullest program of each case are compiled.
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
        """Why this machine cannot compile for the platform; None if it can."""
        absent = [module for module in self.modules if not _is_importable(module)]
        if not absent and self.programs is not None and self.programs() is None:
            absent = [self.programs_are]
        if not absent:
            return None
        return f"the {self.platform.upper()} compiler is not installed ({', '.join(absent)}): {self.install}"

    @property
    def options(self) -> dict[str, str]:
        """Compiler options of every compilation (`jax.stages.Lowered.compile`)."""
        folder = self.programs() if self.programs is not None else None
        return {**self.flags, **({} if folder is None else {self.folder_option: str(folder)})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """A chip to compile for.

    Attributes:
      name: its name in records.
      toolchain: its platform's compiler.
      topology: arguments of `jax.experimental.topologies.get_topology_desc`, beside the platform.
    """

    name: str
    toolchain: Toolchain
    topology: Mapping[str, str] = dataclasses.field(hash=False)


def find_cuda_toolkit() -> Path | None:
    """Find the folder with `bin/ptxas` and `nvvm/libdevice`: in `CUDA_HOME`, `/usr/local/cuda` or the wheels."""
    places = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places += [Path("/usr/local/cuda"), *_list_wheel_folders()]
    return next((p for p in places if (p / "bin/ptxas").is_file() and (p / "nvvm/libdevice").is_dir()), None)


def find_disassembler() -> Path | None:
    """Find `nvdisasm`: in the CUDA toolkit, in the wheels, or on `PATH`."""
    places = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places += [Path("/usr/local/cuda"), *_list_wheel_folders()]
    found = next((place / "bin/nvdisasm" for place in places if (place / "bin/nvdisasm").is_file()), None)
    elsewhere = shutil.which("nvdisasm")
    return found or (Path(elsewhere) if elsewhere else None)


def _list_wheel_folders() -> list[Path]:
    """List the folders of NVIDIA's wheels for CUDA 13."""
    package = importlib.util.find_spec("nvidia")
    return [] if package is None else [Path(place) / "cu13" for place in package.submodule_search_locations or ()]


def _is_importable(module: str) -> bool:
    """Check whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


TPU = Toolchain(
    platform="tpu",
    topologies="tpu",
    modules=("libtpu",),
    install='pip install "attention-conformance[tpu]"',
    environment={
        # Do not ask the metadata server which chips a cloud machine has: without a TPU the library waits for it.
        "TPU_SKIP_MDS_QUERY": "1",
        # A chip belongs to one process, so a second process that loads the library aborts. Without a chip that is
        # needless.
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
    # Compile as users do, although the checks lower this level on the CPU (`conformance.environment`).
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
    """List the chips that kernels written for `platform` are compiled for; none for portable code."""
    return tuple(target for target in TARGETS if target.toolchain.platform == platform)
