"""The process environment: XLA flags that make compiling cheap on CPU, and what a report says about the machine."""

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

# Compiling dominates on CPU. These flags cut a forward plus VJP of a new shape from 150 to 80 ms and keep several
# processes from fighting over cores. They are meant to change which instructions run and not what is computed, but XLA
# has computed correct programs wrongly under them that it computes rightly under JAX's own: so they never decide. What
# fails under them is judged again under JAX's own (`build_default_options`, `build_default_flags`, `conformance.judging.rejudgement`).
_FAST_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# The options of one program that undo these flags: XLA's own defaults, as its dump of debug options shows them.
_DEFAULT_OPTIONS: dict[str, bool | int] = {
    "--xla_backend_optimization_level=0": 3,
    "--xla_cpu_multi_thread_eigen=false": True,
    "--xla_cpu_parallel_codegen_split_count=1": 32,
    "--xla_cpu_use_fusion_emitters=false": True,
    "--xla_gpu_autotune_level=0": 4,
}
# On x86, no instructions that multiply and add with one rounding. Without optimisation XLA contracts a product and a
# sum to one in some loops of a program and not in others: then a value that is computed twice is not equal to itself,
# and the gradient of a maximum, which looks for the elements equal to it, finds none and divides by zero. No option of
# one program undoes this; a process can (`build_default_flags`).
_NO_FMA = ("--xla_cpu_max_isa=AVX",)
_X86 = ("x86_64", "AMD64")
# XLA's YNN fusions compute some programs wrongly on CPU: jax-ml/jax#39103 from jaxlib 0.10.2 on, and in 0.12.0.1 a sum
# of bf16 products over axes of size 1 beside a longer one reads memory that nothing wrote. Kernels are judged, not XLA.
# Matrix products by themselves stay: without YNN, XLA does not compile the gradient of a BF16_BF16_F32 one of one row.
_AVOID_MISCOMPILES = ("--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",)
# Virtual devices on CPU, for the sharding check; programs for one device run as before.
_VIRTUAL_DEVICES = ("--xla_force_host_platform_device_count=4",)
# XLA aborts the process for a flag that it does not know; this one is gone from jaxlib 0.11 on.
_FAST_COMPILE_BEFORE_0_11 = ("--xla_cpu_use_fusion_emitters=false",)
# Threads of XLA's pool on CPU, which otherwise has one a core: four virtual devices that wait for each other on fewer
# threads, one of them held by a host callback, wait for ever.
_THREAD_POOL_SIZE = ("NPROC", "16")
# On a GPU XLA times several ways to compute each product, and takes the fastest. That is three quarters of the time
# that a plain function's program takes to compile, and what is taken, with its roundings, differs from run to run.
_NO_AUTOTUNING = ("--xla_gpu_autotune_level=0",)
# Several processes judge on one GPU: none takes most of its memory at its start.
_SHARED_GPU = ("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
NVIDIA_DRIVER = "/dev/nvidiactl"
# Where there is no GPU, JAX's CUDA plugin looks for libraries that only running needs, finds none, and does not come up
# as a compiler either.
_COMPILER_ONLY = ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# libtpu reads once, as it is loaded, whether to write down the schedules of kernels (`accelerators.tpu_schedule`), and
# JAX loads it to look for a TPU. Where there is one, everything that runs would be written down as well.
_LIBTPU_VARIABLE = "LIBTPU_INIT_ARGS"
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
_WRITE_SCHEDULES = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex="
    ".*(packed-bundles-post-ra|pre-delay_hlo-static-per-bundle-utilization).*"
)
_SCHEDULE_FOLDER_PREFIX = "conformance-schedules-"
_OWN_SCHEDULE_FLAGS = re.compile(rf"--xla_jf_dump_to=(\S*{_SCHEDULE_FOLDER_PREFIX}\d+) .*")
_SCHEDULE_FOLDER_NAME = re.compile(rf"{_SCHEDULE_FOLDER_PREFIX}([1-9]\d*)")
# Seconds in which nothing was written to a folder before it may be called abandoned. A process in another container
# that shares the folder of temporary files cannot be seen from here; while it compiles, it writes every few seconds.
_ABANDONED_SECONDS = 3600
_SINGLE_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
# What JAX takes for true in its environment.
_TRUE_VALUES = ("y", "yes", "t", "true", "on", "1")
# New objects after which Python looks for cycles among them, in place of 700. Tracing and lowering make objects by the
# million, few of them in cycles: looking so often takes 6% of the time of judging a Pallas kernel.
_GC_THRESHOLD = 20_000


def prepare_environment(*, timing: bool = False) -> None:
    """Set the flags, unless JAX is already imported or the user has set `XLA_FLAGS`. Call before importing JAX.

    For `timing` nothing is set: programs are compiled as JAX compiles them for everybody, with every optimisation. So
    are those that are judged on a GPU, where the level of optimisation is one for kernels too.
    """
    if not ("jax" in sys.modules or timing):
        set_flags()


def set_flags() -> None:
    """Set the flags that the user has not set, where XLA has not read them yet: it does when JAX first computes."""
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
        # The process that began this one has a folder of its own.
        theirs = _OWN_SCHEDULE_FLAGS.sub("", os.environ.get(_LIBTPU_VARIABLE, "")).strip()
        folder = os.path.join(tempfile.gettempdir(), f"{_SCHEDULE_FOLDER_PREFIX}{os.getpid()}")
        _remove_abandoned_folders(Path(tempfile.gettempdir()))
        os.environ[_LIBTPU_VARIABLE] = f"{theirs} --xla_jf_dump_to={folder} {_WRITE_SCHEDULES}".strip()


def find_schedule_folder() -> Path | None:
    """The folder into which libtpu writes the schedules of the kernels that this process compiles, if it does."""
    found = _OWN_SCHEDULE_FLAGS.search(os.environ.get(_LIBTPU_VARIABLE, ""))
    return Path(found[1]) if found else None


def _remove_abandoned_folders(home: Path) -> None:
    """Remove this user's folders of schedules in `home` whose process was killed before it could.

    A folder stays as long as there is a process of its number, were it another one that was given that number later.
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
            shutil.rmtree(folder, ignore_errors=True)  # of what is no folder, a link among them, it removes nothing


def _is_alive(number: int) -> bool:
    """Whether there is a process of this number, be it another user's."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no number of a process
        return True
    return True


def collect_garbage_rarely() -> None:
    """Have Python look for cycles less often, and never again among the objects that there are now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])


def _has_gpu() -> bool:
    """Whether JAX will compute on an NVIDIA GPU, as far as can be said before it is imported."""
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
    """Why what runs in this environment are no programs, or None: then nothing is judged that users run."""
    jax = sys.modules.get("jax")
    set_so = os.environ.get("JAX_DISABLE_JIT", "").lower() in _TRUE_VALUES
    if not (set_so or (jax is not None and jax.config.jax_disable_jit)):
        return None
    return "JAX_DISABLE_JIT is set: kernels would be judged without being compiled, as nobody runs them"


def build_default_options() -> dict[str, bool | int]:
    """Return the compiler options that compile one program as JAX does by default; empty if no flag differs.

    Three things stay: what keeps XLA from computing wrongly by default (`_SOUND`), what the user has set, and on x86
    the instruction set, which no option of a program extends.
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
    """Start JAX's backends under these XLA flags, and leave the environment as it was.

    XLA reads `XLA_FLAGS` once, when the first backend starts. Whoever looks at the environment later cannot tell from
    it which flags XLA has read.

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
    """Why what is timed in this process says little, or None: XLA was told not to optimise."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    wrong = [flag for flag in flags if flag in _FAST_COMPILE + _NO_FMA + _NO_AUTOTUNING]
    return f"XLA_FLAGS has {' '.join(wrong)}, under which programs are slower" if wrong else None


def describe_environment() -> dict[str, str]:
    """Versions, devices and flags, for the report."""
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
