"""Define the hook by which optional packages measure programs that are compiled for absent accelerators.

`conformance.accelerators.compilation` compiles a program and decides whether it compiles. An observer can ask the
compiler to write additional files, and reads measurements from these files. Measurements are stored in records beside
the verdict, and never change the verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from conformance.accelerators.targets import CompileTarget
from conformance.extensions import load_attribute, load_extensions


@dataclasses.dataclass(frozen=True)
class CompilerRequests:
    """Compiler options and environment variables that an observer needs for one compilation."""

    # Compiler options by name, as for `jax.stages.Lowered.compile`.
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Environment variables that are set while the compiler of Mosaic GPU kernels runs.
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ObservedProgram:
    """A program compiled for an absent accelerator, in all its stages."""

    target: CompileTarget
    traced: Any
    lowered: Any
    compiled: Any
    folder: Path  # a temporary folder with the files that an observer asked the compiler to write
    printed: list[str]  # lines that the compiler of Mosaic GPU kernels printed
    # The head dimensions of keys and of values (H, V), if the program is attention; otherwise None.
    depths: tuple[int, int] | None


class ProgramObserver(Protocol):
    """Interface of an object that measures programs compiled for absent accelerators."""

    def prepare(self, target: CompileTarget, folder: Path) -> CompilerRequests:
        """Return the options and variables that this observer needs; called before each compilation.

        Args:
          folder: an empty temporary folder for the compiler's files, which is removed after `measure`.
        """
        ...

    def measure(self, program: ObservedProgram) -> Mapping[str, float]:
        """Return measurements of a compiled program by name; each becomes a field of a record."""
        ...


def load_observers() -> list[ProgramObserver]:
    """Load the observers of all optional packages that are installed."""
    return [load_attribute(one.program_observer) for one in load_extensions() if one.program_observer]
