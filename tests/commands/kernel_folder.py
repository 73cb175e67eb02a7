"""Create a user's folder with right and wrong kernels, and run commands in it."""

from __future__ import annotations

from pathlib import Path

from conformance import cli

CASE = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0"

KERNELS = """
import os, sys, time
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def right(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite")
def wrong(q, k, v, *, causal=False):
    return 1.01 * naive.attention(q, k, v, causal=causal)

def never(q, k, v, *, causal=False):
    raise NotImplementedError("not written yet")

@declare(behind_mask="finite")
def dies(q, k, v, *, causal=False, soft_cap=None):
    if soft_cap is not None:
        os._exit(7)
    return naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite")
def slow(q, k, v, *, causal=False):
    time.sleep(0.05)
    print("traced", file=sys.stderr, flush=True)
    return naive.attention(q, k, v, causal=causal)

def few(q, k):
    return q

def mystery(q, k, v, mystery):
    return q

number = 3
"""


def fill(folder: Path) -> None:
    """Write the kernels, and a file without records."""
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "empty.jsonl").write_text("")


def run_cli(*arguments: str) -> int:
    """Run a command in this process, and return its exit code."""
    try:
        return cli.main(cli.build_parser().parse_args(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


def judge_kernel(name: str, *options: str, case: str = CASE) -> int:
    return run_cli("run", f"--impl=kernels.py:{name}", f"--case={case}", *options)
