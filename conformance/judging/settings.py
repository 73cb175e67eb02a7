"""Load a project's settings from its `pyproject.toml`, and mark the failures that they expect.

docs/reference/settings.md describes the table, and the files of expected failures that it may name.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib.metadata
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from cases.case_id import matches_query
from cases.name_suggestions import suggest_name
from conformance.execution import implementation_registry
from conformance.truth import tolerances
from conformance.truth.tolerances import Tolerances
from reports import records
from reports.records import BRANCHES, Record

TABLE = "attention_conformance"
_TABLE_KEYS = (
    "implementations",
    "groups",
    "tolerances",
    "expected_failures",
    "expected_failure_files",
    "unreached_branches",
)
_UNREACHED = ("show", "fail")
_FILE_KEYS = ("library", "link", "versions", "expected_failures")


class SettingsError(ValueError):
    """A setting in `pyproject.toml` cannot be used; the message names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedFailure:
    """An entry of the settings that expects certain judgements to fail. A matching judgement that passes is red.

    `some` is for failures that depend on the values: matching judgements may pass. In a whole run, an entry that
    matches no failure is red, with or without `some`.

    `jax` is a range of versions of JAX, and `package` a package with a range, such as `flax>=0.12`: the entry holds
    only where those are installed. `finding` is the name of the report about the fault, a page of `docs/upstream`.
    """

    implementation: str
    reason: str
    link: str = ""
    case: str = "*"
    check: Sequence[str] = ("*",)
    observable: Sequence[str] = ("*",)
    some: bool = False
    jax: str = ""
    platform: str = ""
    package: str = ""
    finding: str = ""

    def __post_init__(self) -> None:
        for name in ("check", "observable"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a list of patterns, got the string {getattr(self, name)!r}")

    def holds(self, jax_version: str, platform: str) -> bool:
        """Tell whether the entry applies to this version of JAX, this platform, and the installed packages."""
        is_version = not self.jax or SpecifierSet(self.jax).contains(jax_version, prereleases=True)
        return is_version and self.platform in ("", platform) and _is_package_installed(self.package)

    def applies(self, record: Record, jax_version: str) -> bool:
        """Tell whether the entry expects `record` to fail."""
        return (
            record.implementation == self.implementation
            and self.holds(jax_version, record.platform)
            and matches_query(self.case, record.case)
            and any(fnmatch.fnmatchcase(record.check, pattern) for pattern in self.check)
            and any(fnmatch.fnmatchcase(record.observable, pattern) for pattern in self.observable)
        )


@functools.cache
def _is_package_installed(requirement: str) -> bool:
    """Tell whether the package is installed in a version of the range; true if none is asked for."""
    if not requirement:
        return True
    asked = Requirement(requirement)
    try:
        return asked.specifier.contains(importlib.metadata.version(asked.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a project."""

    implementations: tuple[str, ...] = ()
    expected_failures: tuple[ExpectedFailure, ...] = ()
    tolerances: Tolerances = dataclasses.field(default_factory=tolerances.load_default_tolerances)
    groups: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    unreached_branches: str = "show"

    def fail_unreached_branch(self, record: Record) -> Record:
        """Return the record, as a failure if it names a branch that no case reaches and the settings ask for that."""
        if self.unreached_branches == "fail" and record.check == BRANCHES and record.verdict == records.UNJUDGED:
            return msgspec.structs.replace(record, verdict=records.FAIL)
        return record

    def resolve_groups(self, names: Iterable[str]) -> list[str]:
        """Return the implementations that `names` stand for: groups are replaced by their members, each once."""
        members = (member for name in names for member in self.groups.get(name, (name,)))
        return list(dict.fromkeys(members))

    def mark_expected_failures(self, record: Record, jax_version: str) -> Record:
        """Return the record, marked if it is an expected failure or an unexpected pass."""
        for expected in self.expected_failures:
            if not expected.applies(record, jax_version):
                continue
            if record.verdict in (records.FAIL, records.ERROR):
                link = f" ({expected.link})" if expected.link else ""
                finding = f"finding {expected.finding}: " if expected.finding else ""
                reasons = filter(None, (record.reason, f"expected: {finding}{expected.reason}{link}"))
                return msgspec.structs.replace(record, verdict=records.EXPECTED_FAIL, reason="; ".join(reasons))
            if record.verdict == records.PASS and not expected.some:
                reason = f"passes, but is listed in pyproject.toml as an expected failure: {expected.reason}"
                return msgspec.structs.replace(record, verdict=records.UNEXPECTED_PASS, reason=reason)
        return record

    @staticmethod
    def unmark_expected_failure(record: Record) -> Record:
        """Return the record without the mark of `mark_expected_failures`, to mark it by other settings.

        A marked record does not tell a failure from an error: both become `fail`.
        """
        if record.verdict == records.EXPECTED_FAIL:
            reason, found, _ = record.reason.rpartition("; expected: ")
            return msgspec.structs.replace(record, verdict=records.FAIL, reason=reason if found else "")
        if record.verdict == records.UNEXPECTED_PASS:
            return msgspec.structs.replace(record, verdict=records.PASS, reason="")
        return record

    def find_stale_entries(self, records_found: Sequence[Record], jax_version: str) -> list[Record]:
        """Return a red record for each expected failure of a judged kernel that did not occur in a whole run."""
        judged = {
            record.implementation: record.platform
            for record in records_found
            if record.case != "*" and record.verdict != records.UNJUDGED
        }
        return [
            Record(
                implementation=entry.implementation,
                platform=judged[entry.implementation],
                case=entry.case,
                check="expectations",
                observable=",".join(entry.observable),
                verdict=records.UNEXPECTED_PASS,
                reason=f"nothing failed that pyproject.toml expects to fail: {entry.reason}",
            )
            for entry in self.expected_failures
            if entry.implementation in judged
            and entry.holds(jax_version, judged[entry.implementation])
            and not any(r.verdict == records.EXPECTED_FAIL and entry.applies(r, jax_version) for r in records_found)
        ]


def load_settings(start: Path) -> Settings:
    """Load the settings of the nearest `pyproject.toml` at or above `start`; defaults if there is none.

    Raises:
      SettingsError: for settings that are misspelt or of the wrong type.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
            except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise SettingsError(f"{file} is not TOML: {error}") from error
            except OSError as error:
                raise SettingsError(f"{file} cannot be read: {error.strerror or error}") from error
            if not isinstance(tool, dict):
                raise SettingsError(f"{file}: tool must be a table, got {tool!r}: write [tool.{TABLE}]")
            return _parse_table(tool.get(TABLE, {}), file)
    return Settings()


def _parse_table(table: Any, file: Path) -> Settings:
    """Parse the table of settings. Raises `SettingsError`."""
    try:
        _reject_unknown("the table", table, _TABLE_KEYS)
        names = table.get("implementations", [])
        _require(_is_string_list(names), f"implementations must be a list of names, got {names!r}")
        groups = _parse_groups(table.get("groups", {}))
        limits = tolerances.override_limits(
            tolerances.load_default_tolerances(), _parse_tolerances(table.get("tolerances", {})), file.name
        )
        expected = _parse_expected_failures(table)
        unreached = table.get("unreached_branches", "show")
        _require(unreached in _UNREACHED, f"unreached_branches must be one of {_UNREACHED}, got {unreached!r}")
        patterns = table.get("expected_failure_files", [])
        _require(_is_string_list(patterns), f"expected_failure_files must be a list of patterns, got {patterns!r}")
        for path in _find_files(file.parent, patterns):
            expected += load_expected_failures(path)
    except ValueError as error:
        raise SettingsError(f"{file}: [tool.{TABLE}]: {error}") from error
    return Settings(tuple(names), expected, limits, groups, unreached)


def _find_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files in `folder` that match the patterns; raise `ValueError` for a pattern that no file matches."""
    found: list[Path] = []
    for pattern in patterns:
        _require(bool(pattern) and not Path(pattern).is_absolute(), f"a relative pattern is needed, got {pattern!r}")
        paths = sorted(folder.glob(pattern))
        _require(bool(paths), f"expected_failure_files: no file matches {pattern!r}")
        found += paths
    return found


def load_expected_failures(path: Path) -> tuple[ExpectedFailure, ...]:
    """Load a file of the expected failures of one library. Raises `ValueError`."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        _reject_unknown("the file", table, _FILE_KEYS)
        for name in ("library", "link"):
            _require(isinstance(table.get(name), str), f"{name} must be a string, got {table.get(name)!r}")
        versions = table.get("versions")
        _require(_is_string_list(versions), f"versions must be a list of strings, got {versions!r}")
        return _parse_expected_failures(table)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _parse_expected_failures(table: Mapping[str, Any]) -> tuple[ExpectedFailure, ...]:
    entries = table.get("expected_failures", [])
    _require(isinstance(entries, list), f"expected_failures must be a list of tables, got {entries!r}")
    return tuple(_parse_expected_failure(entry) for entry in entries)


def _parse_groups(table: Any) -> dict[str, tuple[str, ...]]:
    """Parse the table of groups, which are names for several implementations."""
    _require(isinstance(table, dict), f"groups must be a table of lists of names, got {table!r}")
    for name, members in table.items():
        _require(_is_string_list(members), f"the group {name!r} must be a list of names, got {members!r}")
        is_taken = implementation_registry.is_builtin(name) or implementation_registry.may_exist(name)
        _require(not is_taken, f"the group {name!r} has the name of an implementation: choose another name")
    return {name: tuple(members) for name, members in table.items()}


def _parse_tolerances(table: Any) -> dict[str, float]:
    """Parse the table of tolerances that replace default ones, such as `"bf16.out" = 5.0`."""
    _require(isinstance(table, dict), f"tolerances must be a table, got {table!r}")
    for key, value in table.items():
        _require(not isinstance(value, dict), f'the tolerance {key!r} must be written in quotes, as "{key}.out" = 5.0')
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(is_number and math.isfinite(value), f"the tolerance {key!r} must be a finite number, got {value!r}")
    return dict(table)


def _parse_expected_failure(entry: Any) -> ExpectedFailure:
    """Parse one entry of the expected failures. Raises `ValueError` for a wrong one."""
    fields = dataclasses.fields(ExpectedFailure)
    _reject_unknown("an expected failure", entry, [field.name for field in fields])
    for field in fields:
        is_given = field.name in entry
        _require(
            is_given or field.default is not dataclasses.MISSING, f"an expected failure needs {field.name!r}: {entry}"
        )
        kind, is_kind = _FIELD_TYPES[field.type]
        _require(
            not is_given or is_kind(entry.get(field.name)),
            f"{field.name} of an expected failure must be {kind}, got {entry.get(field.name)!r}",
        )
    _require(bool(entry["reason"].strip()), f"an expected failure needs a reason: {entry}")
    try:
        SpecifierSet(entry.get("jax", ""))
    except InvalidSpecifier as error:
        raise ValueError(f"jax of an expected failure is not a version range such as '>=0.11': {error}") from error
    try:
        Requirement(entry.get("package") or "jax")
    except InvalidRequirement as error:
        raise ValueError(f"package of an expected failure is not one such as 'flax>=0.12': {error}") from error
    platform = entry.get("platform", "")
    known = ", ".join(_KNOWN_PLATFORMS)
    _require(
        platform in ("", *_KNOWN_PLATFORMS), f"platform of an expected failure must be one of {known}, got {platform!r}"
    )
    return ExpectedFailure(**entry)


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_KNOWN_PLATFORMS = ("cpu", "cpu-interpret", "gpu", "tpu")
# For the annotation of each field of `ExpectedFailure`: its type in words, and a test of a value's type.
_FIELD_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a string", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "Sequence[str]": ("a list of patterns", _is_string_list),
}


def _reject_unknown(what: str, table: Any, known: Sequence[str]) -> None:
    """Raise `ValueError` for a value that is no table, and for a table with unknown keys."""
    _require(isinstance(table, dict), f"{what} must be a table, got {table!r}")
    unknown = sorted(set(table) - set(known))
    closest = suggest_name(unknown[0], known) if unknown else ""
    _require(not unknown, f"{what} has unknown keys {unknown}, known are {sorted(known)}{closest}")


def _require(condition: bool, message: str) -> None:
    """Raise `ValueError` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)
