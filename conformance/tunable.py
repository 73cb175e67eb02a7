"""The part of the contract on tuning: what an implementation lets be tuned, and the table that tuning fills.

An implementation's block sizes, warps and stages are data: a JSON file beside the kernel. The kernel reads it, and
`python -m conformance tune` writes it. Each entry says where it comes from.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cases.case import Case
from conformance import output_files

SCHEMA = "attention-conformance/tuned/1"

Setting = Mapping[str, int]
"""The setting of one knob, as plain data: `{"block_q": 128, "block_kv": 64, "num_warps": 4}`."""
KnobSettings = Mapping[str, Setting]
"""The settings of all knobs."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes moved to and from HBM besides the blocks of a kernel's block specs.

    Attributes:
      within: bytes of copies that the kernel makes while it computes; they add to the least time of its call.
      beside: bytes that are moved before and after the call, and in copies that the kernel only waits for. They take a
        time of their own.
    """

    within: int = 0
    beside: int = 0


def report_no_traffic(_case: Case, _setting: Setting) -> Traffic:
    """Return no extra traffic, for a kernel that only moves the blocks of its block specs to and from HBM."""
    return Traffic()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knob:
    """One independent choice: the tile and launch of one kernel, while all others are held.

    Attributes:
      name: its key in `KnobSettings`.
      phase: the program that it affects, `"forward"` or `"forward+backward"`.
      candidates: the settings to try for a case. Those that do not compile or fit are skipped, and shown. None to try
        means that there is no choice for this case, or on this machine, so the setting stays.
      kernel: the end of the kernel's name, by which its cycles are found without the accelerator; or empty.
      given: settings of other knobs while this one is timed. They switch off every kernel that could run in place of
        this knob's.
      traffic: the further bytes that its kernel moves, for a case and a setting.
      ways: for a knob that chooses among kernels, its candidates in order, each with the names of the knobs whose
        kernels run then. Without the accelerator the first is taken, unless another takes clearly fewer cycles in all.
    """

    name: str
    phase: str
    candidates: Callable[[Case], Iterable[Setting]]
    kernel: str = ""
    given: KnobSettings = dataclasses.field(default_factory=dict)
    traffic: Callable[[Case, Setting], Traffic] = report_no_traffic
    ways: tuple[tuple[Setting, tuple[str, ...]], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tunable:
    """Settings of an implementation that can be tuned, and the table that stores them.

    Attributes:
      knobs: the knobs, in the order in which they are tuned.
      settings: returns the settings in force for a case on this machine.
      call: returns the canonical call with given settings.
      native: returns the same for the accelerator's compiler (`Accelerator.native`); or None.
      key: returns what an entry of the table for a case is valid for, as the kernel reads it: `{"max_depth": 64}`.
      cases: returns the cases to tune on, unless others are named.
      table: the file; None if none is read, so that the settings never change.
    """

    knobs: tuple[Knob, ...]
    settings: Callable[[Case], KnobSettings]
    call: Callable[[KnobSettings], Callable[..., Any]]
    key: Callable[[Case], Mapping[str, int]]
    cases: Callable[[], tuple[Case, ...]]
    table: Path | None = None
    native: Callable[[KnobSettings], Callable[..., Any]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One entry of a table.

    Attributes:
      device: the kind of device that it was measured on, as JAX names it.
      key: what it is valid for.
      settings: the settings.
      provenance: its origin: case, date, version of JAX, command, and how it compared with what it replaced.
    """

    device: str
    key: Mapping[str, int]
    settings: KnobSettings
    provenance: Mapping[str, Any]

    @property
    def place(self) -> tuple[Any, ...]:
        """The identity of the entry, which no two entries of a table share."""
        return (self.device, tuple(sorted(self.key.items())))


def read_table(path: Path) -> tuple[TableEntry, ...]:
    """Read the entries of a table; none if there is no such file.

    Raises:
      ValueError: if the file is no such table.
    """
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
