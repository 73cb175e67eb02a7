"""The hook by which optional packages measure programs that are compiled for absent accelerators.

`conformance.accelerators.compilation` compiles a program and decides whether it compiles. An observer asks the compiler
to write down more, and reads figures from what the compiler wrote. Figures stand in records beside the verdict and
never change it.
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
    """What an observer asks of the compiler.

    Attributes:
      options: options of this compilation (`jax.stages.Lowered.compile`).
      variables: environment variables that are set while the compiler of Mosaic GPU kernels runs.
    """

    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ObservedProgram:
    """A program that an absent accelerator's compiler has compiled.

    Attributes:
      target: the chip.
      traced: the `jax.stages.Traced`.
      lowered: the `jax.stages.Lowered` that it became.
      compiled: the `jax.stages.Compiled` that this became.
      folder: a temporary folder, which holds what the compiler was asked to write.
      printed: lines that the compiler of Mosaic GPU kernels printed.
      depths: depths of keys and of values if the program is attention, otherwise None.
    """

    target: CompileTarget
    traced: Any
    lowered: Any
    compiled: Any
    folder: Path
    printed: list[str]
    depths: tuple[int, int] | None


class ProgramObserver(Protocol):
    """Measures programs while they are compiled."""

    def prepare(self, target: CompileTarget, folder: Path) -> CompilerRequests:
        """Say what the compiler should do beside compiling, before a program is compiled for `target`.

        Args:
          target: the chip that the program is compiled for.
          folder: an empty temporary folder, which is removed after `measure`.
        """
        ...

    def measure(self, program: ObservedProgram) -> Mapping[str, float]:
        """Return figures of a compiled program by name."""
        ...


def load_observers() -> list[ProgramObserver]:
    """Load the observers of all optional packages that are installed."""
    return [load_attribute(one.program_observer) for one in load_extensions() if one.program_observer]
