"""Set XLA's flags for judging before JAX is imported, and describe the machine for reports.

The flags make compiling fast and avoid known wrong compilations. Every process of the judge calls `prepare_environment`
before it imports JAX.
"""

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
# processes from competing for cores. They should not change results. But XLA has computed correct programs wrongly
# under these flags, and rightly under JAX's own flags. So they never decide a verdict: a result that fails under them
# is judged again under JAX's own flags (`build_default_options`, `build_default_flags`,
# `conformance.judging.rejudgement`).
_FAST_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# For each flag, the value of the compiler option that undoes it for one program: XLA's default, as its dump of debug
# options shows it.
_DEFAULT_OPTIONS: dict[str, bool | int] = {
    "--xla_backend_optimization_level=0": 3,
    "--xla_cpu_multi_thread_eigen=false": True,
    "--xla_cpu_parallel_codegen_split_count=1": 32,
    "--xla_cpu_use_fusion_emitters=false": True,
    "--xla_gpu_autotune_level=0": 4,
}
# The flags of `_FAST_COMPILE` as compiler options of one program.
_FAST_COMPILE_OPTIONS: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_multi_thread_eigen": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# On x86, use no fused multiply-add. Without optimisation XLA fuses a product and a sum in some loops of a program and
# not in others. Then two computations of one value can differ. The gradient of a maximum looks for the elements equal
# to the maximum, finds none, and divides by zero. No option of one program undoes this flag; another process can do
# without it (`build_default_flags`).
_NO_FMA = ("--xla_cpu_max_isa=AVX",)
_X86 = ("x86_64", "AMD64")
# XLA's YNN fusions compute some programs wrongly on CPU: jax-ml/jax#39103 from jaxlib 0.10.2 on, and in 0.12.0.1 a sum
# of bf16 products over axes of size 1 and a longer axis reads uninitialised memory. The judge must not blame kernels
# for errors of XLA. Only matrix products keep YNN: without it, XLA does not compile the gradient of a BF16_BF16_F32
# product of one row.
_AVOID_MISCOMPILES = ("--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",)
# Virtual devices on CPU, for the sharding check. Programs for one device are not affected.
_VIRTUAL_DEVICES = ("--xla_force_host_platform_device_count=4",)
# XLA aborts the process for an unknown flag, and jaxlib 0.11 dropped this one.
_FAST_COMPILE_BEFORE_0_11 = ("--xla_cpu_use_fusion_emitters=false",)
# The number of threads in XLA's pool on CPU, by default one per core. Four virtual devices that wait for each other
# deadlock on fewer threads when a host callback holds one of them.
_THREAD_POOL_SIZE = ("NPROC", "16")
# On a GPU, XLA times several algorithms for each matrix product, and takes the fastest. For attention in plain JAX this
# takes three quarters of the compile time. And the choice of algorithm, and so the rounding, differs from run to run.
_NO_AUTOTUNING = ("--xla_gpu_autotune_level=0",)
# Several processes judge on one GPU, so none may preallocate most of its memory.
_SHARED_GPU = ("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
NVIDIA_DRIVER = "/dev/nvidiactl"
# Without a GPU, JAX's CUDA plugin looks for libraries that are needed only to run programs. If it finds none, it
# refuses to compile too, unless this variable skips the check.
_COMPILER_ONLY = ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# libtpu reads once, when it is loaded, whether to write the schedules of kernels to files
# (`accelerators.tpu_schedule`). JAX loads libtpu to look for a TPU. On a machine with a TPU, libtpu would also write
# the schedule of every program that runs, so the flags are set only on machines without one.
_LIBTPU_VARIABLE = "LIBTPU_INIT_ARGS"
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
_WRITE_SCHEDULES = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex="
    ".*(packed-bundles-post-ra|pre-delay_hlo-static-per-bundle-utilization).*"
)
_SCHEDULE_FOLDER_PREFIX = "conformance-schedules-"
_OWN_SCHEDULE_FLAGS = re.compile(rf"--xla_jf_dump_to=(\S*{_SCHEDULE_FOLDER_PREFIX}\d+) .*")
_SCHEDULE_FOLDER_NAME = re.compile(rf"{_SCHEDULE_FOLDER_PREFIX}([1-9]\d*)")
# A schedule folder counts as abandoned if nothing was written to it for this many seconds. The process that writes it
# may run in another container and be invisible from here. While it compiles, it writes every few seconds.
_ABANDONED_SECONDS = 3600
_SINGLE_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
# Values that JAX reads as true in environment variables.
_TRUE_VALUES = ("y", "yes", "t", "true", "on", "1")
# The number of new objects after which Python collects cyclic garbage, instead of the default 700. Tracing and lowering
# create millions of objects, few of them in cycles. With the default, collecting takes 6% of the time of judging a
# Pallas kernel.
_GC_THRESHOLD = 20_000


def prepare_environment(*, timing: bool = False) -> None:
    """Set XLA's flags for judging, unless JAX is already imported. Call this before importing JAX.

    Args:
      timing: whether programs are timed. Then no flag is set, so that programs are compiled with every optimisation, as
        JAX compiles them by default. (On a GPU no flag lowers the optimisation level, since that would change the
        kernels too.)
    """
    if not ("jax" in sys.modules or timing):
        set_flags()


def set_flags() -> None:
    """Set the flags and variables that the user has not set. XLA reads the flags when JAX first computes."""
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
        # Drop the schedule folder of the parent process from the variable: each process has its own folder.
        theirs = _OWN_SCHEDULE_FLAGS.sub("", os.environ.get(_LIBTPU_VARIABLE, "")).strip()
        folder = os.path.join(tempfile.gettempdir(), f"{_SCHEDULE_FOLDER_PREFIX}{os.getpid()}")
        _remove_abandoned_folders(Path(tempfile.gettempdir()))
        os.environ[_LIBTPU_VARIABLE] = f"{theirs} --xla_jf_dump_to={folder} {_WRITE_SCHEDULES}".strip()


def find_schedule_folder() -> Path | None:
    """Return the folder where libtpu writes the schedules of kernels compiled in this process; None if it does not."""
    found = _OWN_SCHEDULE_FLAGS.search(os.environ.get(_LIBTPU_VARIABLE, ""))
    return Path(found[1]) if found else None


def _remove_abandoned_folders(home: Path) -> None:
    """Remove this user's schedule folders in `home` unless a process with the id in the folder's name is alive."""
    for folder in home.glob(f"{_SCHEDULE_FOLDER_PREFIX}*"):
        number = _SCHEDULE_FOLDER_NAME.fullmatch(folder.name)
        try:
            found = folder.lstat()
        except OSError:  # another process was faster
            continue
        if number is None or found.st_uid != os.getuid():
            continue
        if time.time() - found.st_mtime > _ABANDONED_SECONDS and not _is_alive(int(number[1])):
            shutil.rmtree(folder, ignore_errors=True)  # a link is not followed and stays


def _is_alive(number: int) -> bool:
    """Check whether a process with this id is alive, whichever user it belongs to."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process; a number that no process can have
        return True
    return True


def collect_garbage_rarely() -> None:
    """Make Python collect cyclic garbage less often, and never check the objects that exist at this moment."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])


def _has_gpu() -> bool:
    """Predict whether JAX, which is not imported yet, will compute on an NVIDIA GPU."""
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
    """Return a sentence that JIT compilation is disabled in this environment; None if JAX compiles."""
    jax = sys.modules.get("jax")
    set_so = os.environ.get("JAX_DISABLE_JIT", "").lower() in _TRUE_VALUES
    if not (set_so or (jax is not None and jax.config.jax_disable_jit)):
        return None
    return "JAX_DISABLE_JIT is set: kernels would be judged without being compiled, unlike in real use"


def build_default_options() -> dict[str, bool | int]:
    """Return the compiler options that compile one program as JAX does by default; empty if no flag differs.

    Three settings stay as they are: the flags that avoid wrong compilations (`_AVOID_MISCOMPILES`), the flags that the
    user has set, and on x86 the restricted instruction set, which no option of a single program can extend.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        flag.removeprefix("--").partition("=")[0]: value for flag, value in _DEFAULT_OPTIONS.items() if flag in flags
    }


def build_fast_options() -> dict[str, bool | int]:
    """Return compiler options that make compiling fast in a process whose XLA flags do not; empty on accelerators.

    They stand for the flags of `_FAST_COMPILE`, which XLA reads only once, when the first backend starts.
    """
    import jax  # imported late: `prepare_environment` must run first

    flags = os.environ.get("XLA_FLAGS", "")
    if jax.default_backend() != "cpu" or any(flag in flags for flag in _FAST_COMPILE):
        return {}
    return dict(_FAST_COMPILE_OPTIONS)


def build_default_flags() -> str:
    """Return the `XLA_FLAGS` under which a process compiles as JAX does by default."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if flag not in _DEFAULT_OPTIONS and flag not in _NO_FMA)


def start_backends(flags: str | None) -> None:
    """Start JAX's backends under `flags`, or the environment's if None, then restore the variable `XLA_FLAGS`.

    XLA reads the variable once, when the first backend starts, so restoring it does not change XLA's flags.
    """
    import jax  # imported late: `prepare_environment` must run first

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
    """Return a sentence on flags that slow programs down in this process, and distort timings; None without any."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    wrong = [flag for flag in flags if flag in _FAST_COMPILE + _NO_FMA + _NO_AUTOTUNING]
    return f"XLA_FLAGS has {' '.join(wrong)}, under which programs are slower" if wrong else None


def describe_environment() -> dict[str, str]:
    """Return versions, devices and flags by name, as reports show them."""
    import jax  # imported late: `prepare_environment` must run first

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
