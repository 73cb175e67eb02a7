"""Turn parsed arguments into objects that several commands need: kernel options, output files, the command line."""

from __future__ import annotations

import argparse
import shlex
import sys

from conformance.sandbox.kernel_options import KernelOptions
from conformance.session import project_lookup, run_outputs
from conformance.session.run_outputs import Outputs


def format_command_line() -> str:
    """Return the command line of this process as text, quoted so that it can be repeated in a shell."""
    words = " ".join(["python -m conformance", *map(shlex.quote, sys.argv[1:])])
    return words.encode(errors="backslashreplace").decode()  # a path may have bytes that are not UTF-8


def build_kernel_options(arguments: argparse.Namespace) -> KernelOptions:
    """Build the kernel options of a command that judges one kernel. Raises `CannotJudge`."""
    named = (getattr(arguments, option, None) for option in ("report", "json"))
    return project_lookup.build_kernel_options(
        products=arguments.products,
        in_process=arguments.in_process,
        timeout=arguments.timeout,
        memory=arguments.memory,
        sandbox_read=arguments.sandbox_read,
        sandbox_env=arguments.sandbox_env,
        require_sandbox=arguments.require_sandbox,
        hidden_files=[path for path in named if path],
    )


def check_outputs(arguments: argparse.Namespace) -> Outputs:
    """Check, before any work is done, that a command can write its output files. Raises `CannotJudge`."""
    markdown = getattr(arguments, "markdown", None)
    return run_outputs.check_outputs(report=arguments.report, json=getattr(arguments, "json", None), markdown=markdown)
