"""Turn parsed arguments into objects that several commands need: kernel options, output files, the command line."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from conformance.session import run_outputs
from conformance.session.run_outputs import Outputs
from conformance.session.run_spec import DECLARED, OPTIONS, WHERE, build_spec

if TYPE_CHECKING:
    from conformance.sandbox.kernel_options import KernelOptions


def format_command_line() -> str:
    """Return the command line of this process as text, quoted so that it can be repeated in a shell."""
    words = " ".join(["python -m conformance", *map(shlex.quote, sys.argv[1:])])
    return words.encode(errors="backslashreplace").decode()  # a path may have bytes that are not UTF-8


def build_kernel_options(arguments: argparse.Namespace) -> KernelOptions:
    """Build the kernel options of a command that judges one kernel. Raises `CannotJudge`."""
    from conformance.session import project_lookup  # imported late: it loads JAX

    given = {key: vars(arguments).get(key) for key in ("report", "json")}
    kernel = {each.key: getattr(arguments, each.key) for each in OPTIONS.values() if each.group in (DECLARED, WHERE)}
    return project_lookup.build_kernel_options(build_spec(given | kernel, implementations=(arguments.impl,)))


def check_outputs(arguments: argparse.Namespace) -> Outputs:
    """Check, before any work is done, that a command can write its output files. Raises `CannotJudge`."""
    markdown = getattr(arguments, "markdown", None)
    return run_outputs.check_outputs(report=arguments.report, json=getattr(arguments, "json", None), markdown=markdown)
