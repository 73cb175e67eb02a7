"""Read what this folder knows about each published library: its functions, versions and environment.

`NAME.toml` describes a library, and `NAME.py` has its adapters. The file has these keys:

    package = "flax"                # its name on PyPI
    imports = "flax"                # the module that an import of it needs
    documentation = "https://..."   # where its attention is documented
    python = "3.12"                 # the Python version of its environment
    resolved = 2026-11-27           # the environment holds what was published by this day
    versions = ["0.12.12", "0.12.7"] # the versions to judge, the newest first
    requirements = ["jax==0.12.0.1"] # what else the environment needs, with pins
    without_dependencies = ["..."]   # requirements whose own dependencies are left out
    stubs = "..."                    # what the adapter replaces in order to import the library, and why
    implementations = ["jax_nn_xla"] # adapters of this library that have names of their own (`impls.catalogue`)

    [functions]                      # plain functions of `NAME.py`, each judged as `library:` and this name
    "flax.nnx" = "nnx"

    [version."0.11.2"]               # what is different for one version
    requirements = ["jax==0.10.2"]
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.util
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PREFIX = "library:"
_REQUIRED = ("package", "imports", "documentation", "python", "resolved", "versions")
_OPTIONAL = ("requirements", "without_dependencies", "stubs", "implementations", "functions", "version")
_PER_VERSION = ("python", "requirements", "without_dependencies")


class InvalidLibrary(ValueError):
    """A description of a library has a wrong key or value; the message names the file and the key."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """A Python environment for one version of a library."""

    python: str  # the version of Python, as `3.12`
    requirements: tuple[str, ...]  # what is installed, the library first, as pip takes it
    without_dependencies: tuple[str, ...]  # what is installed afterwards, without its dependencies
    resolved: datetime.date  # the day whose newest releases fill what the requirements leave open


@dataclasses.dataclass(frozen=True)
class Library:
    """A published library, as its file describes it; the module's docstring explains the keys."""

    name: str
    package: str
    imports: str
    documentation: str
    python: str
    resolved: datetime.date
    versions: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    without_dependencies: tuple[str, ...] = ()
    stubs: str = ""
    implementations: tuple[str, ...] = ()
    functions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    version: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def implementation_names(self) -> tuple[str, ...]:
        """The names by which `--impl` finds the functions of this library."""
        return (*(PREFIX + function for function in self.functions), *self.implementations)

    @property
    def module(self) -> str:
        """The module that has the adapters of this library."""
        return f"{__package__}.{self.name}"

    def build_environment(self, version: str) -> Environment:
        """Describe the environment in which a version of this library is judged."""
        own = self.version.get(version, {})
        without = tuple(own.get("without_dependencies", self.without_dependencies))
        pinned = f"{self.package}=={version}"
        bare = any(requirement.partition("=")[0] == self.package for requirement in without)
        needs = tuple(own.get("requirements", self.requirements))
        if bare:
            without = tuple(pinned if word.partition("=")[0] == self.package else word for word in without)
        return Environment(
            python=own.get("python", self.python),
            requirements=needs if bare else (pinned, *needs),
            without_dependencies=without,
            resolved=self.resolved,
        )


@functools.cache
def load_libraries() -> Mapping[str, Library]:
    """Load the descriptions of all libraries, by name. Raises `InvalidLibrary`."""
    return {path.stem: parse_library(path) for path in sorted(FOLDER.glob("*.toml"))}


def parse_library(path: Path) -> Library:
    """Parse the description of one library. Raises `InvalidLibrary` for a wrong, missing or unknown key."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for key in table:
        if key not in (*_REQUIRED, *_OPTIONAL):
            raise InvalidLibrary(f"{path.name}: unknown key {key!r}; known are {', '.join((*_REQUIRED, *_OPTIONAL))}")
    for key in _REQUIRED:
        if key not in table:
            raise InvalidLibrary(f"{path.name} has no {key!r}")
    for version, own in table.get("version", {}).items():
        if version not in table["versions"]:
            raise InvalidLibrary(f"{path.name}: the version {version!r} is not one of {table['versions']}")
        if unknown := set(own) - set(_PER_VERSION):
            raise InvalidLibrary(f"{path.name}: version {version!r} has the unknown key {min(unknown)!r}")
    if not table["versions"]:
        raise InvalidLibrary(f"{path.name} lists no version")
    if not isinstance(table["resolved"], datetime.date):
        raise InvalidLibrary(f"{path.name}: resolved must be a date, got {table['resolved']!r}")
    lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
    return Library(name=path.stem, **{**table, **lists})


def find_function(name: str) -> tuple[Library, str] | None:
    """Find the library of `library:FUNCTION`, and the attribute of its module; None if there is no such function."""
    function = name.removeprefix(PREFIX)
    found = ((library, library.functions.get(function)) for library in load_libraries().values())
    return next(((library, attribute) for library, attribute in found if attribute is not None), None)


def is_installed(library: Library) -> bool:
    """Return whether this environment has the library. It is found, and not imported."""
    top, _, rest = library.imports.partition(".")
    try:
        # The parents of a dotted name would be imported, so only its first part is looked for.
        return importlib.util.find_spec(top if rest else library.imports) is not None
    except (ImportError, ValueError):
        return False
