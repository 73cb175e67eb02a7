"""Record static cycles of our kernels, and list the kernels that a change has made slower.

Static cycles are computed without a chip. For TPU kernels they are cycles from the compiler's schedules. For GPU
kernels they are the lower bound on cycles and the cycles of issuing instructions, from the loops in the machine code.
They are recorded for each compiler version in `cycle_baselines.json`. `python -m conformance cycles --save` records
those of TPU kernels; with `--target=h100` it records those of GPU kernels.
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
"""Largest accepted relative increase over the recorded cycles: the compiler's own scheduling varies by 3%."""
_TPU_FIGURES = (".call_cycles", ".full_block_cycles")
_GPU_FIGURES = tuple(
    f".{name}" for one in (gpu_cycle_bounds.BOUND_FIGURE, "issue_cycles") for name in (one, f"masked_{one}")
)


@dataclasses.dataclass(frozen=True)
class CycleBaseline:
    """A kernel call whose static cycles are recorded: an implementation on a case, with the case's gradients if any."""

    implementation: str
    case: str
    platform: str = "tpu"
    # Names of the chips that this baseline is recorded for; empty for all chips of the platform.
    only: tuple[str, ...] = ()

    def asks(self, target: str) -> bool:
        """Check whether this baseline is recorded for the chip `target`."""
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
"""Recorded calls of TPU kernels. Each takes seconds to compile for one TPU generation.

They cover several head dimensions, a window and a causal mask, bf16 and f32, the fused backward pass, decoding, and
MoBA.
"""
GPU_BASELINES = (
    *(
        CycleBaseline(name, f"train/bf16/B1.T4096.S4096.N1.K1.H{depth}.V{depth}/causal/normal/s0", "gpu", only)
        for name, only in (("flash_gpu", ()), ("flash_gpu_mosaic", ("h100",)))
        for depth in (64, 128)
    ),
    *(
        CycleBaseline(
            "flash_gpu_mosaic", f"train/bf16/B1.T4096.S4096.N1.K1.{depths}/causal/normal/s0", "gpu", ("h100",)
        )
        for depths in ("H192.V128", "H256.V256")
    ),
    CycleBaseline(
        "paged_gpu_mosaic",
        "decode/bf16/B64.T1.S4096.N32.K8.H128.V128/causal-o4095/paged16/normal/s0",
        "gpu",
        ("h100",),
    ),
)
"""Recorded calls of GPU kernels. Each takes about ten seconds to compile for one GPU.

They cover the Triton and the Mosaic back end at the head dimensions that these are tuned for, deeper heads, and
decoding over pages. The Mosaic back end is for Hopper only.
"""

Figures = dict[str, float]
"""Static cycles by `<kernel>.<figure>`, with the names that records of the check `compiles` use."""
Table = dict[str, dict[str, Figures]]
"""Recorded static cycles: by compiler version, then by `format_key` (implementation, case and chip)."""


def get_compiler_version(platform: str = "tpu") -> str:
    """Return as text the versions of the compiler and of jaxlib, which together determine a kernel's machine code."""
    package = {"tpu": "libtpu", "gpu": "nvidia-cuda-nvcc"}[platform]
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in (package, "jaxlib"))


def format_key(baseline: CycleBaseline, target: str) -> str:
    """Format the key under which the table stores a baseline's cycles for the chip `target`."""
    return f"{baseline.implementation} {baseline.case} {target}"


def select_estimates(figures: Mapping[str, float]) -> Figures:
    """Select the static cycles that must not rise from all measurements of a compiled program.

    For a TPU kernel these are the cycles of its call, or the cycles of a full block if those of the call are not known.
    For a GPU kernel they are the lower bound and the cycles of issuing instructions.
    """
    kernels = dict.fromkeys(name.rpartition(".")[0] for name in figures if name.endswith(_TPU_FIGURES))
    found = ((kernel + figure for figure in _TPU_FIGURES if kernel + figure in figures) for kernel in kernels)
    of_tpu = {name: figures[name] for name in map(next, found)}
    return of_tpu | {name: value for name, value in figures.items() if name.endswith(_GPU_FIGURES)}


def list_regressions(recorded: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """List regressions as text: numbers that rose by more than `MAX_SLOWDOWN`, and numbers that are missing."""
    gone = [f"{name} is no longer known, and was {recorded[name]:,.0f}" for name in recorded if name not in now]
    return gone + [
        f"{name} is {now[name]:,.6g}, {now[name] / kept - 1:.1%} more than the recorded {kept:,.6g}"
        for name, kept in recorded.items()
        if name in now and now[name] > (1 + MAX_SLOWDOWN) * kept
    ]


def read_baselines(path: Path = TABLE) -> Table:
    """Read all recorded static cycles; empty if there is no file. Raises `ValueError` for a file of another schema."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise ValueError(f"the schema of {path} is {data.get('schema')!r}, must be {SCHEMA!r}")
    found: Table = data["compilers"]
    return found


def write_baselines(found: Mapping[str, Figures], path: Path = TABLE, platform: str = "tpu") -> None:
    """Record `found`, static cycles by `format_key`, for the compiler of `platform`; other entries stay as they are."""
    table = read_baselines(path)
    kept = table.get(get_compiler_version(platform), {}) | dict(found)
    table[get_compiler_version(platform)] = {place: dict(sorted(kept[place].items())) for place in sorted(kept)}
    path.write_text(json.dumps({"schema": SCHEMA, "compilers": table}, indent=1) + "\n", encoding="utf-8")
