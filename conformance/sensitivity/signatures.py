"""Signatures: how wrong a kernel is on each probe, of every planted bug in a file, of any kernel when it is asked.

A signature holds, of each probe that the kernel supports, each observable that was judged: nothing where it is right,
the size of its ratio where it is not. A kernel that computes the same wrong thing has the same signature
(`cases.probes`), so whose a kernel's comes closest to names what may be wrong (`conformance.sensitivity.diagnosis`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cases.probes import PROBES, Probe
from conformance.asking.turn import PULLBACKS, Turn
from conformance.checks import BY_NAME
from conformance.contract import Implementation
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.records import ERROR, JUDGED, RED, Record
from conformance.sensitivity.bank import PlantedBug

SCHEMA = "attention-conformance/signatures/1"
FILE = Path(__file__).with_name("signatures.json")

# One backward pass, of the call that every kernel has; the other too where a probe asks for the gradient of `logsumexp`.
_PLAIN = Turn(pulled=("plain",), cotangents=(), laws=(), poisons=("nan",))
_BOTH = dataclasses.replace(_PLAIN, pulled=PULLBACKS)
# A ratio is kept as its logarithm in steps of so much: 1%, which is what two orders of summation may differ by.
_STEP = 0.005
_ENDLESS = 40.0
# What is wrong by more than so much more, in the same steps, is wrong in another way.
_LOUDER = 1.0
"""The logarithm that stands for an infinite ratio, for NaN and for an error."""

Sizes = Mapping[str, float | None]
"""Of each observable of a probe, the logarithm to base 10 of its ratio where that is wrong, none where it is not."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """How wrong a kernel is: the sizes of each probe that was asked, by the probe's id."""

    probes: Mapping[str, Sizes]

    @property
    def red(self) -> dict[tuple[str, str], float]:
        """What is wrong: probe and observable, and how large the ratio is."""
        return {
            (probe, name): size
            for probe, sizes in self.probes.items()
            for name, size in sizes.items()
            if size is not None
        }


def signature(implementation: Implementation, runner: Runner, probes: Iterable[Probe] = PROBES) -> Signature:
    """The signature of a kernel, asked by `runner`."""
    return Signature(dict(measured(implementation, runner, probes)))


def measured(implementation: Implementation, runner: Runner, probes: Iterable[Probe]) -> Iterator[tuple[str, Sizes]]:
    """Each supported probe with its sizes, as they come."""
    for probe in probes:
        if implementation.supports(probe.case) is None:
            checks = tuple(BY_NAME[name] for name in probe.checks)
            turn = _BOTH if "gradients_lse" in probe.checks else _PLAIN
            records = runner.judge(Job(implementation, probe.case, checks, turn))
            if sizes := sizes_of(records):
                yield probe.case.id, sizes


def sizes_of(records: Iterable[Record]) -> dict[str, float | None]:
    """What the records of one probe say; nothing if none of them is a judgement.

    What an observable is wrong by already, it is wrong by in every check that looks at it again.
    """
    found: dict[str, float | None] = {}
    for record in records:
        if record.verdict in JUDGED or record.verdict == ERROR:
            size = _size(record) if record.verdict in RED else None
            plain, *_ = record.observable.split(".")
            if plain not in found:
                found[plain] = size
            elif size is not None and size > (found[plain] or 0.0) + _LOUDER:
                found[f"{record.check}.{record.observable}"] = size
    return found


def _size(record: Record) -> float:
    if record.ratio is None or not math.isfinite(record.ratio):
        return _ENDLESS
    return round(math.log10(max(record.ratio, 1.0)) / _STEP) * _STEP


def of_bug(bug: PlantedBug) -> Signature:
    """The signature of a planted bug; a failure of what is known to be wrong is not judged again."""
    from conformance.sensitivity.examination import without_second_looks

    return signature(bug.build(), without_second_looks())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """A planted bug with its signature: `name`, `family`, `kind` and `reference` as planted."""

    name: str
    family: str
    kind: str
    reference: str
    signature: Signature


def known(bug: PlantedBug, found: Signature) -> Known:
    """A bug as the file keeps it."""
    return Known(name=bug.name, family=bug.family, kind=bug.kind, reference=bug.reference, signature=found)


def save(found: Iterable[Known], path: Path = FILE) -> None:
    """Write signatures, a bug a line, in the order of their names.

    A probe stands by its number. A word of a probe is an observable that is right; one that is wrong has its size.
    Where everything that is judged of `PROBES` is right, names are left out.
    """
    rows = [
        [bug.name, bug.family, bug.kind, bug.reference, _packed(bug.signature)]
        for bug in sorted(found, key=lambda bug: bug.name)
    ]
    probes = ",\n".join(f"  {json.dumps(probe.case.id)}" for probe in PROBES)
    lines = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    text = f'{{\n "schema": {json.dumps(SCHEMA)},\n "probes": [\n{probes}\n ],\n "bugs": [\n{lines}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")


def load(path: Path = FILE) -> list[Known]:
    """The signatures that are kept, of probes that there still are; none if there is no file."""
    if not path.is_file():
        return []
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if table.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {table.get('schema')!r}, must be {SCHEMA!r}")
    asked = table["probes"]
    return [
        Known(name=name, family=family, kind=kind, reference=reference, signature=_unpacked(packed, asked))
        for name, family, kind, reference, packed in table["bugs"]
    ]


def _packed(found: Signature) -> dict[str, str]:
    numbers = {probe.case.id: str(number) for number, probe in enumerate(PROBES)}
    return {numbers[probe]: " ".join(_words(sizes)) for probe, sizes in found.probes.items()}


def _words(sizes: Sizes) -> Iterator[str]:
    for name, size in sizes.items():
        yield name if size is None else f"{name}:{size:.4g}"


def _unpacked(packed: Mapping[str, str], asked: list[str]) -> Signature:
    now = {probe.case.id for probe in PROBES}
    return Signature({asked[int(n)]: _sizes(words) for n, words in packed.items() if asked[int(n)] in now})


def _sizes(words: str) -> dict[str, float | None]:
    split = (word.partition(":") for word in words.split())
    return {name: float(size) if size else None for name, _, size in split}
