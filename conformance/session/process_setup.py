"""Prepare a process for judging, before JAX is loaded: JAX's environment, package names and the fork server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from conformance import environment, packages
from conformance.fork_server import forked_process
from conformance.session.failures import CannotJudge


def prepare_process(*, timing: bool = False, judging: bool = True, alone: bool = False) -> None:
    """Set JAX's environment variables, and make imports of `cases`, `impls` and `reports` find this project's packages.

    Args:
      timing: whether programs are timed. If so, JAX's own compiler flags stay in force.
      judging: whether kernels are judged. If so, JAX must be able to compile.
      alone: whether no code but this project's runs in this process.

    Raises:
      CannotJudge: if JAX's compilation is disabled.
      packages.NameTaken: if a module of the user has the name of one of this project's packages.
    """
    environment.prepare_environment(timing=timing)
    packages.claim_names(alone=alone)
    if judging and (reason := environment.find_disabled_jit()) is not None:
        raise CannotJudge(reason)


@contextlib.contextmanager
def isolate_settings() -> Iterator[None]:
    """Judge in the block under JAX's and NumPy's default settings, and restore the caller's after it.

    The process may be that of a user, who has set `jax_enable_x64` or the NaN checks. A kernel may have set the
    precision of products as it was imported, which its callers do not.
    """
    import jax  # imported late: `prepare_process` must run first
    import numpy as np

    with (
        jax.enable_x64(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.default_matmul_precision(None),
        jax.default_prng_impl("threefry2x32"),
        np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"),
    ):
        yield


def start_fork_server_for(implementations: Iterable[str], *, in_process: bool, workers: bool = False) -> None:
    """Start the fork server if kernels or workers will need it, so that it loads JAX while this process does.

    A name with a colon is a kernel of the user. It runs in a process of its own, unless `in_process` is set.
    """
    kernels = any(":" in name for name in implementations) and not in_process
    if workers or kernels:
        forked_process.start_server()
