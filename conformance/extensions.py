"""Find optional packages, which add commands and measurements to the core without the core importing them by name.

A package in `conformance` is optional if it has a module `extension` that defines `EXTENSION`. The core lists its own
folder to find such packages. So removing a package's folder removes its commands and measurements, and changes nothing
else.

Every process imports the module `extension`, before JAX, so it must import nothing heavy. An extension names a heavy
function as `"module:attribute"`, and the core loads the function when it is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A sub-command of `python -m conformance`."""

    name: str  # what the user types
    # A function that adds the command's parser to the sub-parsers of the command line.
    add_parser: Callable[[Any], None]
    function: str  # `"module:attribute"` of the function that takes the parsed arguments and returns the exit code
    # A function of the parsed arguments that says whether the command must run under JAX's default flags.
    needs_default_flags: Callable[[argparse.Namespace], bool] = lambda arguments: False
    # Whether environment variables stay as the user set them and no JAX is loaded ahead, since the command starts
    # processes that have other versions of JAX.
    keeps_environment: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extension:
    """The additions of one optional package to the core."""

    commands: tuple[Command, ...] = ()  # sub-commands of the command line, in the order of its help
    # `"module:attribute"` of a `conformance.accelerators.program_observers.ProgramObserver`; empty if the package
    # measures no compiled programs.
    program_observer: str = ""


@functools.cache
def load_extensions() -> tuple[Extension, ...]:
    """Import the module `extension` of each optional package, in alphabetical order, and return what they define."""
    packages = [path.parent.name for path in sorted(Path(__file__).parent.glob("*/extension.py"))]
    return tuple(importlib.import_module(f"conformance.{name}.extension").EXTENSION for name in packages)


def load_attribute(place: str) -> Any:
    """Import the module of `"module:attribute"` and return the attribute."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
