"""Register the command `mutants` with the core, which finds `EXTENSION` by `conformance.extensions`.

Every process imports this module before JAX, so this module must import nothing heavy.
"""

from __future__ import annotations

from conformance.extensions import Command, Extension
from conformance.mutation import command_line

EXTENSION = Extension(
    commands=(
        Command(
            name="mutants",
            add_parser=command_line.add_mutants,
            function="conformance.mutation.mutants_command:run_mutants",
            keeps_environment=True,
        ),
    )
)
