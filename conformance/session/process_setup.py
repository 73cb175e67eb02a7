"""Prepare a process that is to judge, before JAX is loaded in it."""

from __future__ import annotations

from collections.abc import Iterable

from conformance import environment, packages
from conformance.fork_server import forked_process
from conformance.session.failures import CannotJudge


def prepare_process(*, timing: bool = False, judging: bool = True, alone: bool = False) -> None:
    """Set JAX's environment, and have `cases`, `impls` and `reports` mean ours.

    Args:
      timing: whether programs are timed, so that JAX's own flags stay.
      judging: whether kernels are judged, which JAX must compile.
      alone: whether nothing but this project has a part in this process.

    Raises:
      CannotJudge: where JAX compiles nothing.
      packages.NameTaken: where a module of the user has the name of a package of ours.
    """
    environment.prepare_environment(timing=timing)
    packages.claim_names(alone=alone)
    if judging and (reason := environment.find_disabled_jit()) is not None:
        raise CannotJudge(reason)


def start_fork_server_for(implementations: Iterable[str], *, in_process: bool, workers: bool = False) -> None:
    """Start the fork server where kernels or workers will need it: it loads JAX while this process does.

    A name with a colon is a kernel of the user, which has a process of its own unless `in_process` is set.
    """
    kernels = any(":" in name for name in implementations) and not in_process
    if workers or kernels:
        forked_process.start_server()
