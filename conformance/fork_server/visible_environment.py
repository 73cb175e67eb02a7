"""Define which environment variables a kernel's process gets: settings of libraries, and no secrets of a CI job.

The fork server itself starts with only these variables, since every forked process can read the server's variables in
its `/proc/self/environ`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_VARIABLES_TEXT = """
PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM COLUMNS LINES NO_COLOR FORCE_COLOR TMPDIR NPROC VIRTUAL_ENV
CONDA_PREFIX CONDA_DEFAULT_ENV CC CXX CFLAGS CXXFLAGS LDFLAGS ROCM_PATH
"""
_VARIABLES = frozenset(_VARIABLES_TEXT.split())
_VARIABLE_PREFIXES_TEXT = """
LC_ LD_ PYTHON JAX_ JAXTYPING_ XLA_ LIBTPU_ TPU_ PJRT_ TF_CPP_ TF_XLA_ TF_GPU_ CUDA_ NVIDIA_ NVCC_ NVTE_
CUDNN_ CUBLAS_ NCCL_ HIP_ HSA_ MOSAIC_ TRITON_ TOKAMAX_ PALLAS_ FLAX_ KERAS_ EQX_ EQUINOX_ OMP_ KMP_ MKL_
OPENBLAS_ NUMEXPR_ NUMBA_ NPY_ MALLOC_ GLIBC_ MPL XDG_
"""
_VARIABLE_PREFIXES = tuple(_VARIABLE_PREFIXES_TEXT.split())


def filter_environment(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that a kernel's process may read: those of the allow-list, and `more`."""
    names = {*_VARIABLES, *more}
    return {name: value for name, value in environment.items() if name in names or name.startswith(_VARIABLE_PREFIXES)}
