"""Store the records of runs of faulty kernels compactly: for each result, the cases by verdict.

`python -m tests.reports.causes.faults.recorded_faults NAME=FILE.jsonl ...` stores the records of runs at `quick`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from reports.causes.finding import find_raising_line
from reports.records import ERROR, FAIL, PASS, Record, read_runs

FILE = Path(__file__).with_name("recorded_faults.json")
_VERDICTS = (PASS, FAIL, ERROR)
RunRecords = tuple[list[Record], list[Record]]
"""The records of a run, and those that were judged to confirm findings."""


def load_records() -> dict[str, RunRecords]:
    """Load the records of each kernel, by its name."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    records = {}
    for name, (numbers, counted, probes) in table["kernels"].items():
        cases = [table["cases"][number] for number in numbers]
        records[name] = _unpack_records(name, counted, cases), _unpack_records(name, probes, cases)
    return records


def save_records(records: Mapping[str, RunRecords]) -> None:
    """Save records compactly.

    Each case is written once. Each result of a kernel has a number whose bits are its cases.
    """
    numbers: dict[str, int] = {}
    kernels = {}
    for name, pair in sorted(records.items()):
        mine = list(dict.fromkeys(record.case for group in pair for record in group))
        places = {case: place for place, case in enumerate(mine)}
        named = [numbers.setdefault(case, len(numbers)) for case in mine]
        kernels[name] = [named, *(_pack_records(group, places) for group in pair)]
    cases = ",\n".join(map(json.dumps, numbers))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in kernels.items())
    FILE.write_text(f'{{"cases": [\n{cases}\n],\n"kernels": {{\n{lines}\n}}}}\n', encoding="utf-8")


def _pack_records(found: Iterable[Record], places: Mapping[str, int]) -> dict[str, str]:
    bits: dict[str, int] = {}
    for record in found:
        if record.verdict in _VERDICTS:
            line = find_raising_line(record.reason) if record.verdict == ERROR else None
            key = " ".join(
                (record.check, record.observable, record.verdict, record.remedy, line["place"] if line else "")
            )
            bits[key] = bits.get(key, 0) | 1 << places[record.case]
    return {key: f"{number:x}" for key, number in bits.items()}


def _unpack_records(name: str, packed: Mapping[str, str], cases: list[str]) -> list[Record]:
    found = []
    for key, text in packed.items():
        check, observable, verdict, *remedy, place = key.split(" ")
        number = int(text, 16)
        found += [
            Record(
                implementation=name,
                platform="cpu",
                case=cases[row],
                check=check,
                observable=observable,
                verdict=verdict,
                remedy=" ".join(remedy),
                reason=f"raised ({place}: there)" if place else "",
            )
            for row in range(number.bit_length())
            if number >> row & 1
        ]
    return found


def main(arguments: list[str]) -> None:
    """Add the records of the files to the stored ones."""
    records = load_records() if FILE.exists() else {}
    for argument in arguments:
        name, _, file = argument.partition("=")
        (one,) = read_runs(Path(file))
        records[name] = (list(one.records), list(one.probes))
    save_records(records)


if __name__ == "__main__":
    main(sys.argv[1:])
