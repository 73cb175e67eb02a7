"""What our kernels cost by what compilers made of them, when somebody last looked: none may get slower unseen.

Of TPU kernels that is cycles by their schedules, of GPU kernels what the loops of their machine code issue and are
bounded by. The figures belong to the compiler, so another version of it has figures of its own. `python -m conformance
cycles --save` writes those of TPUs, and with `--target=h100` those of GPUs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

from conformance.cost.gpu import gpu_cycle_bounds

TABLE = Path(__file__).with_name("cycle_baselines.json")
SCHEMA = "attention-conformance/cycles/1"
MAX_SLOWDOWN = 0.05
"""How much slower than recorded is too slow: the compiler's own scheduling wavers by 3%."""
_TPU_FIGURES = (".call_cycles", ".full_block_cycles")
_GPU_FIGURES = tuple(
    f".{name}" for one in (gpu_cycle_bounds.BOUND_FIGURE, "issue_cycles") for name in (one, f"masked_{one}")
)


@dataclasses.dataclass(frozen=True)
class CycleBaseline:
    """What is compiled: the call of an implementation in a case, with its gradients where the case has them.

    `only` names targets of the platform where it is not for all of them.
    """

    implementation: str
    case: str
    platform: str = "tpu"
    only: tuple[str, ...] = ()

    def asks(self, target: str) -> bool:
        """Whether it is for this target."""
        return not self.only or target in self.only


TPU_BASELINES = (
    CycleBaseline("splash_tpu", "train/bf16/B1.T4096.S4096.N2.K2.H128.V128/causal/normal/s0"),
    CycleBaseline("splash_tpu", "train/bf16/B1.T2048.S2048.N2.K1.H64.V64/window-l1023-r0/normal/s0"),
    CycleBaseline("splash_tpu", "train/bf16/B1.T2048.S2048.N2.K2.H192.V128/causal/normal/s0"),
    CycleBaseline("splash_tpu", "train/f32/B1.T1024.S1024.N2.K2.H64.V64/causal/normal/s0"),
    CycleBaseline("splash_tpu_fused", "train/bf16/B1.T4096.S4096.N2.K2.H128.V128/causal/normal/s0"),
    CycleBaseline("ragged_tpu", "decode/bf16/B2.T1.S2000.N8.K2.H128.V128/lengths-1999-300/normal/s0"),
    CycleBaseline("moba_tpu", "train/bf16/B1.T2048.S2048.N2.K1.H128.V128/moba-512-3/normal/s0"),
)
"""Depths, a short and a long mask, both dtypes, the fused backward, decoding and mixture of block attention.

Each takes seconds a generation.
"""
GPU_BASELINES = tuple(
    CycleBaseline(name, f"train/bf16/B1.T4096.S4096.N1.K1.H{depth}.V{depth}/causal/normal/s0", "gpu", only)
    for name, only in (("flash_gpu", ()), ("flash_gpu_mosaic", ("h100",)))
    for depth in (64, 128)
)
"""Both back ends, at the depths that they are tuned for; each takes some ten seconds a GPU. Mosaic's is for Hopper."""

Figures = dict[str, float]
"""Cycles by kernel and figure, as `compiles` names them."""
Table = dict[str, dict[str, Figures]]
"""Figures by compiler, and by implementation, case and generation."""


def get_compiler_version(platform: str = "tpu") -> str:
    """The versions on which a kernel's code depends, those of the compiler and of what lowers a kernel for it."""
    package = {"tpu": "libtpu", "gpu": "nvidia-cuda-nvcc"}[platform]
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in (package, "jaxlib"))


def format_key(bar: CycleBaseline, target: str) -> str:
    """Where the table keeps the figures of a bar for a generation."""
    return f"{bar.implementation} {bar.case} {target}"


def select_estimates(figures: Mapping[str, float]) -> Figures:
    """Of a program's figures those that must not rise.

    Of each TPU kernel its call, or a block where that is unknown; of a GPU kernel the bound and what is issued.
    """
    kernels = dict.fromkeys(name.rpartition(".")[0] for name in figures if name.endswith(_TPU_FIGURES))
    found = ((kernel + figure for figure in _TPU_FIGURES if kernel + figure in figures) for kernel in kernels)
    of_tpu = {name: figures[name] for name in map(next, found)}
    return of_tpu | {name: value for name, value in figures.items() if name.endswith(_GPU_FIGURES)}


def list_regressions(recorded: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """What is wrong of figures, a line each: more than was recorded by more than `SLOWER`, or gone."""
    gone = [f"{name} is no longer known, and was {recorded[name]:,.0f}" for name in recorded if name not in now]
    return gone + [
        f"{name} is {now[name]:,.6g}, {now[name] / kept - 1:.1%} more than the recorded {kept:,.6g}"
        for name, kept in recorded.items()
        if name in now and now[name] > (1 + MAX_SLOWDOWN) * kept
    ]


def read_baselines(path: Path = TABLE) -> Table:
    """The table. Raises `ValueError` if the file is not one."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise ValueError(f"the schema of {path} is {data.get('schema')!r}, must be {SCHEMA!r}")
    found: Table = data["compilers"]
    return found


def write_baselines(found: Mapping[str, Figures], path: Path = TABLE, platform: str = "tpu") -> None:
    """Keep figures of this compiler, by name; those of other places and compilers stay."""
    table = read_baselines(path)
    kept = table.get(get_compiler_version(platform), {}) | dict(found)
    table[get_compiler_version(platform)] = {place: dict(sorted(kept[place].items())) for place in sorted(kept)}
    path.write_text(json.dumps({"schema": SCHEMA, "compilers": table}, indent=1) + "\n", encoding="utf-8")
