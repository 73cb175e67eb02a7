"""Register this package's three commands and its measurements of compiled programs with the core.

The core finds `EXTENSION` by `conformance.extensions`. Every process imports this module before JAX, so this module
must import nothing heavy.
"""

from __future__ import annotations

from conformance.cost import command_line
from conformance.extensions import Command, Extension

EXTENSION = Extension(
    commands=(
        # Commands that time programs need JAX's default flags, since users run kernels with them.
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
            needs_default_flags=lambda arguments: not arguments.static,  # with `--static` it only compiles
        ),
        Command(
            name="cycles",
            add_parser=command_line.add_cycles,
            function="conformance.cost.commands.cycles:run_cycles",
        ),
    ),
    program_observer="conformance.cost.compiled_programs:OBSERVER",
)
