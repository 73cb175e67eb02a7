"""What our TPU kernels cost by their schedules, as it was when somebody last looked: none may get slower unseen.

The figures belong to the compiler that wrote the schedules, so another version of it has figures of its own.
`python -m conformance cycles --save` writes them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

TABLE = Path(__file__).with_name("speed_bar.json")
SCHEMA = "attention-conformance/cycles/1"
SLOWER = 0.05
"""How much slower than recorded is too slow: the compiler's own scheduling wavers by 3%."""
_ESTIMATES = (".call_cycles", ".full_block_cycles")


@dataclasses.dataclass(frozen=True)
class Bar:
    """What is compiled: the call of an implementation in a case, with its gradients where the case has them."""

    implementation: str
    case: str


BARS = (
    Bar("splash_tpu", "train/bf16/B1.T4096.S4096.N2.K2.H128.V128/causal/normal/s0"),
    Bar("splash_tpu", "train/bf16/B1.T2048.S2048.N2.K1.H64.V64/window-l1023-r0/normal/s0"),
    Bar("splash_tpu", "train/bf16/B1.T2048.S2048.N2.K2.H192.V128/causal/normal/s0"),
    Bar("splash_tpu", "train/f32/B1.T1024.S1024.N2.K2.H64.V64/causal/normal/s0"),
    Bar("splash_tpu_fused", "train/bf16/B1.T4096.S4096.N2.K2.H128.V128/causal/normal/s0"),
    Bar("ragged_tpu", "decode/bf16/B2.T1.S2000.N8.K2.H128.V128/lengths-1999-300/normal/s0"),
)
"""Depths, a short and a long mask, both dtypes, the fused backward and decoding; each takes seconds a generation."""

Figures = dict[str, float]
"""Cycles by kernel and figure, as `compiles` names them."""
Table = dict[str, dict[str, Figures]]
"""Figures by compiler, and by implementation, case and generation."""


def compiler() -> str:
    """The versions on which a schedule depends, those of the compiler and of what lowers a kernel for it."""
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("libtpu", "jaxlib"))


def key(bar: Bar, target: str) -> str:
    """Where the table keeps the figures of a bar for a generation."""
    return f"{bar.implementation} {bar.case} {target}"


def estimates(figures: Mapping[str, float]) -> Figures:
    """Of a program's figures those that must not rise: of each kernel its call, or a block where that is unknown."""
    kernels = dict.fromkeys(name.rpartition(".")[0] for name in figures if name.endswith(_ESTIMATES))
    found = ((kernel + figure for figure in _ESTIMATES if kernel + figure in figures) for kernel in kernels)
    return {name: figures[name] for name in map(next, found)}


def slower(recorded: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """What is wrong of figures, a line each: more than was recorded by more than `SLOWER`, or gone."""
    gone = [f"{name} is no longer known, and was {recorded[name]:,.0f}" for name in recorded if name not in now]
    return gone + [
        f"{name} is {now[name]:,.0f}, {now[name] / kept - 1:.1%} more than the recorded {kept:,.0f}"
        for name, kept in recorded.items()
        if name in now and now[name] > (1 + SLOWER) * kept
    ]


def read(path: Path = TABLE) -> Table:
    """The table. Raises `ValueError` if the file is not one."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise ValueError(f"the schema of {path} is {data.get('schema')!r}, must be {SCHEMA!r}")
    found: Table = data["compilers"]
    return found


def write(found: Mapping[str, Figures], path: Path = TABLE) -> None:
    """Keep figures of this compiler; those of other places and compilers stay."""
    table = read(path)
    kept = table.get(compiler(), {}) | dict(found)
    table[compiler()] = {place: kept[place] for place in sorted(kept)}
    path.write_text(json.dumps({"schema": SCHEMA, "compilers": table}, indent=1) + "\n", encoding="utf-8")
