"""Settings from `pyproject.toml`, table `[tool.attention_conformance]`.

    [tool.attention_conformance]
    implementations = ["my_kernels.flash:attention"]     # what plain `pytest` judges

    [tool.attention_conformance.tolerances]
    "bf16.out" = 5.0

    [[tool.attention_conformance.expected_failures]]
    implementation = "jax_nn_xla"
    case = "train/bf16"                                   # a query; all cases if left out
    check = "gradients"                                   # a wildcard pattern; all checks if left out
    observable = "dv*"                                    # likewise
    jax = ">=0.11"                                        # versions it holds for; all if left out
    reason = "..."
    link = "..."
"""

from __future__ import annotations

import dataclasses
import fnmatch
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from cases.case import matches
from conformance import records, tolerances
from conformance.records import Record
from conformance.tolerances import Tolerances

TABLE = "attention_conformance"


class SettingsError(ValueError):
    """`pyproject.toml` has a setting that cannot be used; the message names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedFailure:
    """A known failure: it must keep failing, and turns red once it passes."""

    implementation: str
    reason: str
    link: str = ""
    case: str = "*"
    check: str = "*"
    observable: str = "*"
    jax: str = ""

    def applies(self, record: Record, jax_version: str) -> bool:
        """Whether `record` is one of those expected to fail."""
        return (
            record.implementation == self.implementation
            and matches(self.case, record.case)
            and fnmatch.fnmatchcase(record.check, self.check)
            and fnmatch.fnmatchcase(record.observable, self.observable)
            and (not self.jax or SpecifierSet(self.jax).contains(jax_version, prereleases=True))
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a project says about its judgements."""

    implementations: tuple[str, ...] = ()
    expected_failures: tuple[ExpectedFailure, ...] = ()
    tolerances: Tolerances = dataclasses.field(default_factory=tolerances.default)

    def settle(self, record: Record, jax_version: str) -> Record:
        """The record with expected failures marked as such, and unexpected passes too."""
        for expected in self.expected_failures:
            if expected.applies(record, jax_version):
                reason = f"expected: {expected.reason}" + (f" ({expected.link})" if expected.link else "")
                if record.verdict in (records.FAIL, records.ERROR):
                    return dataclasses.replace(
                        record, verdict=records.EXPECTED_FAIL, reason="; ".join(filter(None, (record.reason, reason)))
                    )
                if record.verdict == records.PASS:
                    return dataclasses.replace(
                        record,
                        verdict=records.UNEXPECTED_PASS,
                        reason=f"passes, but is listed in pyproject.toml as an expected failure: {expected.reason}",
                    )
        return record


def load(start: Path) -> Settings:
    """The settings of the nearest `pyproject.toml` at or above `start`; defaults if there is none.

    Raises:
      SettingsError: for settings that are misspelt or of the wrong type.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                tool = tomllib.loads(file.read_text()).get("tool", {})
            except tomllib.TOMLDecodeError as error:
                raise SettingsError(f"{file} is not TOML: {error}") from error
            return _parse(tool.get(TABLE, {}), file)
    return Settings()


def _parse(table: Mapping[str, Any], file: Path) -> Settings:
    known = {"implementations", "tolerances", "expected_failures"}
    if unknown := sorted(set(table) - known):
        raise SettingsError(f"{file}: [tool.{TABLE}] has unknown keys {unknown}, known are {sorted(known)}")
    try:
        limits = tolerances.overridden(tolerances.default(), table.get("tolerances", {}), str(file.name))
        expected = tuple(ExpectedFailure(**entry) for entry in table.get("expected_failures", ()))
        for entry in expected:
            SpecifierSet(entry.jax)
    except (TypeError, ValueError, InvalidSpecifier) as error:
        raise SettingsError(f"{file}: [tool.{TABLE}]: {error}") from error
    return Settings(tuple(table.get("implementations", ())), expected, limits)
