"""Recorded static cycles of our kernels, so that no change makes one slower unnoticed.

For TPU kernels these are cycles from the compiler's schedules. For GPU kernels they are the lower bound and the issued
instructions of the loops in their machine code. Each compiler version has figures of its own. `python -m conformance
cycles --save` records the figures of TPUs, and those of GPUs with `--target=h100`.
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
"""Largest accepted increase over the recorded figure: the compiler's own scheduling varies by 3%."""
_TPU_FIGURES = (".call_cycles", ".full_block_cycles")
_GPU_FIGURES = tuple(
    f".{name}" for one in (gpu_cycle_bounds.BOUND_FIGURE, "issue_cycles") for name in (one, f"masked_{one}")
)


@dataclasses.dataclass(frozen=True)
class CycleBaseline:
    """What is compiled for one baseline: an implementation's call on a case, with gradients if the case has them.

    Attributes:
      implementation: name of the implementation.
      case: id of the case.
      platform: `"tpu"` or `"gpu"`.
      only: targets of the platform that it is for; all of them if empty.
    """

    implementation: str
    case: str
    platform: str = "tpu"
    only: tuple[str, ...] = ()

    def asks(self, target: str) -> bool:
        """Check whether the baseline is for this target."""
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
"""Several depths, a short and a long mask, both dtypes, the fused backward pass, decoding and MoBA.

Each takes seconds to compile for one generation.
"""
GPU_BASELINES = tuple(
    CycleBaseline(name, f"train/bf16/B1.T4096.S4096.N1.K1.H{depth}.V{depth}/causal/normal/s0", "gpu", only)
    for name, only in (("flash_gpu", ()), ("flash_gpu_mosaic", ("h100",)))
    for depth in (64, 128)
)
"""Both back ends at the depths that they are tuned for; the Mosaic back end is for Hopper only.

Each takes about ten seconds to compile for one GPU.
"""

Figures = dict[str, float]
"""Cycles by `<kernel>.<figure>`, named as in records of the check `compiles`."""
Table = dict[str, dict[str, Figures]]
"""Figures by compiler, and by implementation, case and generation."""


def get_compiler_version(platform: str = "tpu") -> str:
    """Return the versions that determine a kernel's code: of the compiler, and of jaxlib, which lowers the kernel."""
    package = {"tpu": "libtpu", "gpu": "nvidia-cuda-nvcc"}[platform]
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in (package, "jaxlib"))


def format_key(bar: CycleBaseline, target: str) -> str:
    """Format the key of a baseline's figures for one target in the table."""
    return f"{bar.implementation} {bar.case} {target}"


def select_estimates(figures: Mapping[str, float]) -> Figures:
    """Select the figures of a program that must not rise.

    For a TPU kernel these are the cycles of its call, or those of a block if the call's are not known. For a GPU kernel
    they are the bound and the issued instructions.
    """
    kernels = dict.fromkeys(name.rpartition(".")[0] for name in figures if name.endswith(_TPU_FIGURES))
    found = ((kernel + figure for figure in _TPU_FIGURES if kernel + figure in figures) for kernel in kernels)
    of_tpu = {name: figures[name] for name in map(next, found)}
    return of_tpu | {name: value for name, value in figures.items() if name.endswith(_GPU_FIGURES)}


def list_regressions(recorded: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """List regressions, one line each: figures that rose by more than `SLOWER`, and figures that disappeared."""
    gone = [f"{name} is no longer known, and was {recorded[name]:,.0f}" for name in recorded if name not in now]
    return gone + [
        f"{name} is {now[name]:,.6g}, {now[name] / kept - 1:.1%} more than the recorded {kept:,.6g}"
        for name, kept in recorded.items()
        if name in now and now[name] > (1 + MAX_SLOWDOWN) * kept
    ]


def read_baselines(path: Path = TABLE) -> Table:
    """Read the table; empty if there is no file.

    Raises:
      ValueError: if the file has another schema.
    """
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise ValueError(f"the schema of {path} is {data.get('schema')!r}, must be {SCHEMA!r}")
    found: Table = data["compilers"]
    return found


def write_baselines(found: Mapping[str, Figures], path: Path = TABLE, platform: str = "tpu") -> None:
    """Record figures by key for the installed compiler; figures of other keys and compilers stay."""
    table = read_baselines(path)
    kept = table.get(get_compiler_version(platform), {}) | dict(found)
    table[get_compiler_version(platform)] = {place: dict(sorted(kept[place].items())) for place in sorted(kept)}
    path.write_text(json.dumps({"schema": SCHEMA, "compilers": table}, indent=1) + "\n", encoding="utf-8")
