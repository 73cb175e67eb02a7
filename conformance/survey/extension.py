"""Register the command `survey` with the core, which finds `EXTENSION` by `conformance.extensions`.

Every process imports this module before JAX, so this module must import nothing heavy.
"""

from __future__ import annotations

from conformance.extensions import Command, Extension
from conformance.survey import command_line

EXTENSION = Extension(
    commands=(
        Command(
            name="survey",
            add_parser=command_line.add_survey,
            function="conformance.survey.survey_command:run_survey",
            keeps_environment=True,
        ),
    )
)
