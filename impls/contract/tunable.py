"""Define how an implementation declares its tunable settings, and read and write its table of tuned settings.

Block sizes, warps and stages of an implementation are data: a JSON file beside the kernel. The kernel reads the file,
and `python -m conformance tune` writes it. Each entry of the file records how it was measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cases.case import Case
from reports import output_files

SCHEMA = "attention-conformance/tuned/1"

Setting = Mapping[str, int]
"""The setting of one parameter, as plain data: `{"block_q": 128, "block_kv": 64, "num_warps": 4}`."""
ParameterSettings = Mapping[str, Setting]
"""The settings of several parameters, by the name of the parameter."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel moves to and from HBM in addition to the blocks of its block specs."""

    # Bytes of copies that overlap with the kernel's computation. They count towards the memory time of the call, which
    # is a lower limit of its time.
    within: int = 0
    # Bytes that are moved before or after the call, or in copies that the kernel waits for. Their time is added to the
    # time of the call.
    beside: int = 0


def report_no_traffic(_case: Case, _setting: Setting) -> Traffic:
    """Return zero extra traffic, for a kernel that moves only the blocks of its block specs to and from HBM."""
    return Traffic()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningParameter:
    """One independently tuned choice, such as tile and launch of one kernel, while other parameters stay fixed.

    The command line selects it by `--parameter`.

    Attributes:
      name: its key in `ParameterSettings`.
      phase: the program that it affects, `"forward"` or `"forward+backward"`.
      candidates: a function from a case to the settings to try. Settings that do not compile or fit are reported and
        skipped. Without any settings there is no choice for this case or on this machine, and the old setting stays.
      kernel: the end of the kernel's name, which identifies the kernel when its cycles are counted from machine code
        without the accelerator; or empty.
      given: settings of other parameters while this one is timed. They switch off every kernel that could run instead
        of this parameter's kernel.
      traffic: a function from a case and a setting to the extra bytes that the kernel moves.
      ways: for a parameter that chooses among kernels, its candidates in order. Each comes with the names of the
        parameters whose kernels then run. Without the accelerator, the first candidate is chosen, unless the kernels of
        another take clearly fewer cycles in total.
    """

    name: str
    phase: str
    candidates: Callable[[Case], Iterable[Setting]]
    kernel: str = ""
    given: ParameterSettings = dataclasses.field(default_factory=dict)
    traffic: Callable[[Case, Setting], Traffic] = report_no_traffic
    ways: tuple[tuple[Setting, tuple[str, ...]], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tunable:
    """Settings of an implementation that can be tuned, and the table that stores them.

    Attributes:
      parameters: the parameters, in the order in which they are tuned.
      settings: a function that returns the settings in force for a case on this machine.
      call: a function that returns the canonical call with the given settings.
      native: a function that returns the call with the given settings for the accelerator's real compiler
        (`Accelerator.native`); or None.
      key: a function from a case to the key of its table entry, such as `{"max_depth": 64}`. The kernel looks entries
        up by this key.
      cases: a function that returns the cases to tune on if the user names none.
      table: the path of the table; None if the kernel reads no table, so that its settings never change.
    """

    parameters: tuple[TuningParameter, ...]
    settings: Callable[[Case], ParameterSettings]
    call: Callable[[ParameterSettings], Callable[..., Any]]
    key: Callable[[Case], Mapping[str, int]]
    cases: Callable[[], tuple[Case, ...]]
    table: Path | None = None
    native: Callable[[ParameterSettings], Callable[..., Any]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One entry of a table of tuned settings.

    Attributes:
      device: the kind of device that it was measured on, as JAX names it.
      key: the cases that the entry is valid for, as `Tunable.key` returns it.
      settings: the tuned settings.
      provenance: how the entry was measured: case, date, version of JAX, command, and comparison with the settings that
        it replaced.
    """

    device: str
    key: Mapping[str, int]
    settings: ParameterSettings
    provenance: Mapping[str, Any]

    @property
    def place(self) -> tuple[Any, ...]:
        """The identity of the entry, which no two entries of a table share."""
        return (self.device, tuple(sorted(self.key.items())))


def read_table(path: Path) -> tuple[TableEntry, ...]:
    """Read the entries of a table; none without the file. Raises `ValueError` if it is no table of tuned settings."""
    if not path.exists():
        return ()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {data.get('schema')!r}, must be {SCHEMA!r}")
        return tuple(TableEntry(**entry) for entry in data["entries"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a table of tuned settings: {error}") from error


def write_table(path: Path, entries: Iterable[TableEntry]) -> None:
    """Write a table, ordered by the identity of its entries."""
    rows = [dataclasses.asdict(entry) for entry in sorted(entries, key=lambda entry: entry.place)]
    output_files.write_text(path, json.dumps({"schema": SCHEMA, "entries": rows}, indent=1) + "\n")


def merge_entries(old: Iterable[TableEntry], new: Iterable[TableEntry]) -> list[TableEntry]:
    """Merge entries; a new one replaces an old one of the same identity."""
    return list({entry.place: entry for entry in (*old, *new)}.values())
