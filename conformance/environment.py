"""Set XLA flags before JAX is imported, and describe the machine for reports."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from packaging.version import Version

# Compiling dominates on CPU. These flags cut a forward plus VJP of a new shape from 150 to 80 ms, and keep several
# processes from competing for cores. They should change which instructions run, and not the results. But XLA has
# computed correct programs wrongly under them, and rightly under JAX's own flags. So they never decide a verdict: what
# fails under them is judged again under JAX's own flags (`build_default_options`, `build_default_flags`,
# `conformance.judging.rejudgement`).
_FAST_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Compiler options of one program that undo these flags: XLA's defaults, as its dump of debug options shows them.
_DEFAULT_OPTIONS: dict[str, bool | int] = {
    "--xla_backend_optimization_level=0": 3,
    "--xla_cpu_multi_thread_eigen=false": True,
    "--xla_cpu_parallel_codegen_split_count=1": 32,
    "--xla_cpu_use_fusion_emitters=false": True,
    "--xla_gpu_autotune_level=0": 4,
}
# On x86, use no fused multiply-add. Without optimisation XLA fuses a product and a sum in some loops of a program and
# not in others. Then a value that is computed twice differs from itself. The gradient of a maximum looks for the
# elements equal to it, finds none, and divides by zero. No option of one program undoes this flag; another process
# can do without it (`build_default_flags`).
_NO_FMA = ("--xla_cpu_max_isa=AVX",)
_X86 = ("x86_64", "AMD64")
# XLA's YNN fusions compute some programs wrongly on CPU: jax-ml/jax#39103 from jaxlib 0.10.2 on, and in 0.12.0.1 a sum
# of bf16 products over axes of size 1 and a longer axis reads uninitialised memory. Kernels are judged, and not XLA.
# Matrix products alone keep YNN: without it, XLA does not compile the gradient of a BF16_BF16_F32 product of one row.
_AVOID_MISCOMPILES = ("--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",)
# Virtual devices on CPU, for the sharding check. Programs for one device are not affected.
_VIRTUAL_DEVICES = ("--xla_force_host_platform_device_count=4",)
# XLA aborts the process for an unknown flag, and jaxlib 0.11 dropped this one.
_FAST_COMPILE_BEFORE_0_11 = ("--xla_cpu_use_fusion_emitters=false",)
# The number of threads in XLA's pool on CPU, by default one a core. Four virtual devices that wait for each other
# deadlock on fewer threads when a host callback holds one of them.
_THREAD_POOL_SIZE = ("NPROC", "16")
# On a GPU XLA times several algorithms for each product, and takes the fastest. That is three quarters of the compile
# time of a plain function's program, and the choice, with its roundings, differs from run to run.
_NO_AUTOTUNING = ("--xla_gpu_autotune_level=0",)
# Several processes judge on one GPU, so none may preallocate most of its memory.
_SHARED_GPU = ("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
NVIDIA_DRIVER = "/dev/nvidiactl"
# Without a GPU, JAX's CUDA plugin looks for libraries that only running needs. If it finds none, it does not compile
# either, unless this check is skipped.
_COMPILER_ONLY = ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# libtpu reads once, when it is loaded, whether to write the schedules of kernels to files
# (`accelerators.tpu_schedule`). JAX loads it to look for a TPU. With a TPU, it would write every program that runs too.
_LIBTPU_VARIABLE = "LIBTPU_INIT_ARGS"
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
_WRITE_SCHEDULES = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex="
    ".*(packed-bundles-post-ra|pre-delay_hlo-static-per-bundle-utilization).*"
)
_SCHEDULE_FOLDER_PREFIX = "conformance-schedules-"
_OWN_SCHEDULE_FLAGS = re.compile(rf"--xla_jf_dump_to=(\S*{_SCHEDULE_FOLDER_PREFIX}\d+) .*")
_SCHEDULE_FOLDER_NAME = re.compile(rf"{_SCHEDULE_FOLDER_PREFIX}([1-9]\d*)")
# A folder is abandoned if nothing was written to it for so many seconds. A process in another container may share the
# folder of temporary files and cannot be seen from here; it writes every few seconds while it compiles.
_ABANDONED_SECONDS = 3600
_SINGLE_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
# Values that JAX reads as true in environment variables.
_TRUE_VALUES = ("y", "yes", "t", "true", "on", "1")
# Python collects cyclic garbage after so many new objects, in place of 700. Tracing and lowering create millions of
# objects, few of them in cycles, and collecting so often takes 6% of the time of judging a Pallas kernel.
_GC_THRESHOLD = 20_000


def prepare_environment(*, timing: bool = False) -> None:
    """Set XLA's flags for judging, unless JAX is already imported. Call this before importing JAX.

    Args:
      timing: whether programs are timed. Then nothing is set, so that they are compiled with every optimisation, as JAX
        compiles them by default. On a GPU programs are optimised in any case, since the level of optimisation there
        concerns the kernels too.
    """
    if not ("jax" in sys.modules or timing):
        set_flags()


def set_flags() -> None:
    """Set the flags that the user has not set. XLA reads them when JAX first computes."""
    os.environ.setdefault(
        "XLA_FLAGS",
        " ".join(_NO_AUTOTUNING + _AVOID_MISCOMPILES + _VIRTUAL_DEVICES if _has_gpu() else _build_cpu_flags()),
    )
    for name in _SINGLE_THREAD_VARIABLES:
        os.environ.setdefault(name, "1")
    os.environ.setdefault(*_THREAD_POOL_SIZE)
    os.environ.setdefault(*_SHARED_GPU)
    if not os.path.exists(NVIDIA_DRIVER):
        os.environ.setdefault(*_COMPILER_ONLY)
    if importlib.util.find_spec("libtpu") is not None and not any(map(os.path.exists, _TPU_DEVICES)):
        # Drop the folder of the process that started this one: each process has its own.
        theirs = _OWN_SCHEDULE_FLAGS.sub("", os.environ.get(_LIBTPU_VARIABLE, "")).strip()
        folder = os.path.join(tempfile.gettempdir(), f"{_SCHEDULE_FOLDER_PREFIX}{os.getpid()}")
        _remove_abandoned_folders(Path(tempfile.gettempdir()))
        os.environ[_LIBTPU_VARIABLE] = f"{theirs} --xla_jf_dump_to={folder} {_WRITE_SCHEDULES}".strip()


def find_schedule_folder() -> Path | None:
    """Return the folder where libtpu writes the schedules of kernels compiled here; None if it writes none."""
    found = _OWN_SCHEDULE_FLAGS.search(os.environ.get(_LIBTPU_VARIABLE, ""))
    return Path(found[1]) if found else None


def _remove_abandoned_folders(home: Path) -> None:
    """Remove this user's schedule folders in `home` whose processes were killed before they could.

    A folder stays while a process with its number is alive, even if the number was given to another process since.
    """
    for folder in home.glob(f"{_SCHEDULE_FOLDER_PREFIX}*"):
        number = _SCHEDULE_FOLDER_NAME.fullmatch(folder.name)
        try:
            found = folder.lstat()
        except OSError:  # another process was faster
            continue
        if number is None or found.st_uid != os.getuid():
            continue
        if time.time() - found.st_mtime > _ABANDONED_SECONDS and not _is_alive(int(number[1])):
            shutil.rmtree(folder, ignore_errors=True)  # it removes nothing that is no folder, such as a link


def _is_alive(number: int) -> bool:
    """Tell whether a process of this number is alive, be it another user's."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process; a number that no process can have
        return True
    return True


def collect_garbage_rarely() -> None:
    """Have Python collect cyclic garbage less often, and never among the objects of this moment."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])


def _has_gpu() -> bool:
    """Tell whether JAX will compute on an NVIDIA GPU, as far as is known before it is imported."""
    asked = os.environ.get("JAX_PLATFORMS", "cuda")
    return os.path.exists(NVIDIA_DRIVER) and any(name in asked for name in ("cuda", "gpu"))


def _build_cpu_flags() -> tuple[str, ...]:
    flags: tuple[str, ...] = _FAST_COMPILE + _AVOID_MISCOMPILES + _VIRTUAL_DEVICES
    if platform.machine() in _X86:
        flags += _NO_FMA
    if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):
        return flags + _FAST_COMPILE_BEFORE_0_11
    return flags


def find_disabled_jit() -> str | None:
    """Say why JAX compiles nothing in this environment; None if it compiles."""
    jax = sys.modules.get("jax")
    set_so = os.environ.get("JAX_DISABLE_JIT", "").lower() in _TRUE_VALUES
    if not (set_so or (jax is not None and jax.config.jax_disable_jit)):
        return None
    return "JAX_DISABLE_JIT is set: kernels would be judged without being compiled, as nobody runs them"


def build_default_options() -> dict[str, bool | int]:
    """Return the compiler options that compile one program as JAX does by default; empty if no flag differs.

    Three things stay: the flags that avoid wrong programs (`_AVOID_MISCOMPILES`), the flags that the user has set, and
    on x86 the instruction set, which no option of a program extends.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        flag.removeprefix("--").partition("=")[0]: value for flag, value in _DEFAULT_OPTIONS.items() if flag in flags
    }


def build_default_flags() -> str:
    """Return the `XLA_FLAGS` under which a process compiles as JAX does by default."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if flag not in _DEFAULT_OPTIONS and flag not in _NO_FMA)


def start_backends(flags: str | None) -> None:
    """Start JAX's backends under these XLA flags, and restore the environment.

    XLA reads `XLA_FLAGS` once, when the first backend starts, so the environment does not show later what XLA has read.

    Args:
      flags: for XLA; None for those that the environment has.
    """
    import jax  # imported late: `prepare` must come first

    shown = os.environ.get("XLA_FLAGS")
    if flags is not None:
        os.environ["XLA_FLAGS"] = flags
    try:
        jax.devices()
    finally:
        os.environ.pop("XLA_FLAGS", None)
        if shown is not None:
            os.environ["XLA_FLAGS"] = shown


def find_timing_distortion() -> str | None:
    """Say which flags make programs slower in this process, so that timings say little; None if none does."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    wrong = [flag for flag in flags if flag in _FAST_COMPILE + _NO_FMA + _NO_AUTOTUNING]
    return f"XLA_FLAGS has {' '.join(wrong)}, under which programs are slower" if wrong else None


def describe_environment() -> dict[str, str]:
    """Return versions, devices and flags, as reports show them."""
    import jax  # imported late: `prepare` must come first

    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in ("attention-conformance", "jax", "jaxlib", "libtpu", "numpy", "ml_dtypes"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["backend"] = jax.default_backend()
    found["devices"] = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    found["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    return found
