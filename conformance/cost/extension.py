"""What this package adds to the core (`conformance.extensions`): three commands, and figures of compiled programs.

Every process imports this module before JAX, so it imports nothing heavy.
"""

from __future__ import annotations

import argparse

from conformance.cost import command_line
from conformance.extensions import Command, Extension


def _is_timed_tuning(arguments: argparse.Namespace) -> bool:
    """Check whether `tune` times programs; with `--static` it only compiles them."""
    return not arguments.static


EXTENSION = Extension(
    commands=(
        # Programs are timed under JAX's default flags, as users run them.
        Command(
            name="bench",
            add_parser=command_line.add_bench,
            function="conformance.cost.commands.bench:run_bench",
            needs_default_flags=lambda arguments: True,
        ),
        Command(
            name="tune",
            add_parser=command_line.add_tune,
            function="conformance.cost.commands.tune:run_tune",
            needs_default_flags=_is_timed_tuning,
        ),
        Command(
            name="cycles",
            add_parser=command_line.add_cycles,
            function="conformance.cost.commands.cycles:run_cycles",
        ),
    ),
    program_observer="conformance.cost.compiled_programs:OBSERVER",
)
