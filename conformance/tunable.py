"""What may be tuned in an implementation, and the table that tuning fills: part of the contract.

An implementation's block sizes (and warps, and stages) are data: a JSON file beside the kernel, read by the kernel and
written by `python -m conformance tune`, each entry with where it comes from.
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
"""One choice for a knob, as plain data: `{"block_q": 128, "block_kv": 64, "num_warps": 4}`."""
KnobSettings = Mapping[str, Setting]
"""A choice for every knob."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes between HBM and a device that the blocks of a kernel do not show.

    Attributes:
      within: of copies that it makes by itself while it computes: they add to the least time of its call.
      beside: of what is done before it and after it, and of copies for which it only waits: a time of their own.
    """

    within: int = 0
    beside: int = 0


def report_no_traffic(_case: Case, _setting: Setting) -> Traffic:
    """Of a kernel whose blocks show all that crosses."""
    return Traffic()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knob:
    """Something that is chosen by itself, the others held: the tile and launch of one kernel.

    Attributes:
      name: its key in `KnobSettings`.
      phase: the program that it shows in, `"forward"` or `"forward+backward"`.
      candidates: what to try for a case. Some may not compile, or not fit: those are skipped, and shown. None if there
        is nothing to choose for this case, or on this machine; then it stays as it is.
      kernel: how the name of the kernel that it is of ends, by which its cycles are found without the accelerator, or
        empty.
      given: how other knobs are set while this one is timed. They switch off every other kernel that could run in place
        of the one that this knob is of.
      traffic: what else crosses for its kernel, for a case and a setting.
      ways: of a knob that chooses among kernels, its candidates in order, and the names of the knobs whose kernels run
        then. Without the accelerator the first is taken unless another takes clearly fewer cycles in all.
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
    """What of an implementation may be tuned.

    Attributes:
      knobs: in the order in which they are tuned.
      settings: the choice in force for a case on this machine.
      call: the canonical call with such a choice.
      native: the same for the accelerator's compiler (`Accelerator.native`), or none.
      key: what an entry of the table for a case is valid for, as its kernel reads it: `{"max_depth": 64}`.
      cases: cases to tune on unless others are named.
      table: the file, none if nothing reads one: then the settings in force are always the same.
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
      settings: the choice.
      provenance: where it comes from: case, date, version of JAX, command, and how it compared to what it replaced.
    """

    device: str
    key: Mapping[str, int]
    settings: KnobSettings
    provenance: Mapping[str, Any]

    @property
    def place(self) -> tuple[Any, ...]:
        """What only one entry of a table may have."""
        return (self.device, tuple(sorted(self.key.items())))


def read_table(path: Path) -> tuple[TableEntry, ...]:
    """The entries of a table; none if there is no such file.

    Raises:
      ValueError: the file is not such a table.
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
    """Write a table, in the order of its places."""
    rows = [dataclasses.asdict(entry) for entry in sorted(entries, key=lambda entry: entry.place)]
    output_files.write_text(path, json.dumps({"schema": SCHEMA, "entries": rows}, indent=1) + "\n")


def merge_entries(old: Iterable[TableEntry], new: Iterable[TableEntry]) -> list[TableEntry]:
    """Both, the new ones replacing old ones of the same place."""
    return list({entry.place: entry for entry in (*old, *new)}.values())
