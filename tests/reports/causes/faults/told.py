"""What runs said of the kernels, kept small: of each result that was asked the cases that were right, wrong, raising.

`python -m tests.reports.causes.faults.told NAME=FILE.jsonl ...` keeps what a run at `quick` said of these kernels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from conformance import runs
from conformance.records import ERROR, FAIL, PASS, Record
from reports.causes.finding import find_raising_line

FILE = Path(__file__).with_name("told.json")
_VERDICTS = (PASS, FAIL, ERROR)
Told = tuple[list[Record], list[Record]]
"""The records of a run, and what was judged to confirm findings."""


def load() -> dict[str, Told]:
    """What is kept, by the names of the kernels."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    told = {}
    for name, (numbers, counted, probes) in table["kernels"].items():
        cases = [table["cases"][number] for number in numbers]
        told[name] = _records(name, counted, cases), _records(name, probes, cases)
    return told


def save(told: Mapping[str, Told]) -> None:
    """Keep it: cases once, and of each result of a kernel a number whose bits are the cases that the kernel has."""
    numbers: dict[str, int] = {}
    kernels = {}
    for name, pair in sorted(told.items()):
        mine = list(dict.fromkeys(record.case for group in pair for record in group))
        places = {case: place for place, case in enumerate(mine)}
        named = [numbers.setdefault(case, len(numbers)) for case in mine]
        kernels[name] = [named, *(_packed(group, places) for group in pair)]
    cases = ",\n".join(map(json.dumps, numbers))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in kernels.items())
    FILE.write_text(f'{{"cases": [\n{cases}\n],\n"kernels": {{\n{lines}\n}}}}\n', encoding="utf-8")


def _packed(found: Iterable[Record], places: Mapping[str, int]) -> dict[str, str]:
    bits: dict[str, int] = {}
    for record in found:
        if record.verdict in _VERDICTS:
            line = find_raising_line(record.reason) if record.verdict == ERROR else None
            key = " ".join(
                (record.check, record.observable, record.verdict, record.remedy, line["place"] if line else "")
            )
            bits[key] = bits.get(key, 0) | 1 << places[record.case]
    return {key: f"{number:x}" for key, number in bits.items()}


def _records(name: str, packed: Mapping[str, str], cases: list[str]) -> list[Record]:
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
    """Keep what the files say, beside what is kept."""
    told = load() if FILE.exists() else {}
    for argument in arguments:
        name, _, file = argument.partition("=")
        (one,) = runs.read_runs(Path(file))
        told[name] = (list(one.records), list(one.probes))
    save(told)


if __name__ == "__main__":
    main(sys.argv[1:])
