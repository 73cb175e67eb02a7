"""Run wrong kernels of every sort, and compare what a printed command finds with what the run found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from conformance import cli
from reports import records
from reports.records import RATIO_FAST_COMPILE, RED, Record

PATIENCE = 800  # seconds for a run of many cases, on a machine that does other things too

KERNELS = """
import os, time
import jax
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def window(q, k, v, *, causal=False, window=None, soft_cap=None):
    if window is not None and window[0] is not None:
        window = (window[0] - 1, window[1])
    return naive.attention(q, k, v, causal=causal, window=window, soft_cap=soft_cap)

@jax.custom_vjp
def half(x):
    return x

half.defvjp(lambda x: (x, None), lambda saved, dx: (dx / 2,))

@declare(behind_mask="finite")
def halves(q, k, v, *, causal=False, save_residuals=False):
    # Wrong in one thing alone: what comes back through `logsumexp`.
    out, residuals = naive.attention(q, k, v, causal=causal, save_residuals=True)
    return (out, {"logsumexp": half(residuals["logsumexp"])}) if save_residuals else out

@declare(behind_mask="finite")
def scaled(q, k, v, *, causal=False):
    return 1.01 * naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite")
def raises(q, k, v, *, causal=False, bias=None):
    if q.shape[1] % 2:
        raise ValueError("lengths must be even")
    return naive.attention(q, k, v, causal=causal, bias=bias)

@declare(behind_mask="finite")
def hangs(q, k, v, *, causal=False):
    if causal:
        time.sleep(10_000)
    return naive.attention(q, k, v)

@declare(behind_mask="finite")
def dies(q, k, v, *, causal=False):
    if causal:
        os._exit(7)
    return naive.attention(q, k, v)

@declare(behind_mask="finite")
def much(q, k, v, *, causal=False):
    return 1.5 * naive.attention(q, k, v, causal=causal)
"""
PLANTED = """
from tests.planted.bank import BANK

_BUGS = {bug.name.replace("-", "_"): bug for bug in BANK}


def __getattr__(name):
    return _BUGS[name].build()
"""
_EXPLOITS = Path(__file__).parent.parent / "exploits" / "kernels"


@dataclasses.dataclass(frozen=True)
class Found:
    """A command that finds something wrong, and the number of its failures to find again, by check if one is given."""

    name: str
    command: tuple[str, ...]
    count: int = 3
    check: str = ""

    @property
    def is_gate(self) -> bool:
        """Whether pytest runs it."""
        return self.command[0] == "pytest"


def _found(name: str, command: str, count: int = 3, check: str = "") -> Found:
    return Found(name, tuple(shlex.split(command)), count, check)


_ONE = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0"
AT_NIGHT = (
    _found("smoke", "run --impl=kernels.py:window --level=smoke"),
    _found("quick", "run --impl=kernels.py:halves --cases='train/f32/*.T1.*'", 5),
    _found("standard", "run --impl=kernels:scaled --level=standard --cases='train/f32/B1.T1.*'"),
    _found("seeds", "run --impl=kernels.py:window --seed=3 --seed=5 --cases='train/*/window*'"),
    _found("products", "run --impl=kernels.py:much --products=tf32 --cases='train/f32/*.T1.*'"),
    _found("in-process", "run --impl=kernels.py:scaled --in-process --cases='train/f16/B1.*'"),
    _found("regressions", "run --impl=kernels.py:scaled --regressions", 2),
    _found("raises", "run --impl=kernels:raises --cases='train/f32/*'"),
    _found("hangs", "run --impl=kernels.py:hangs --timeout=3 --memory=8 --cases='train/f32/*/causal'", 1),
    _found("dies", "run --impl=kernels.py:dies --cases='train/f32/*/causal'", 2),
    _found("gradient", "run --impl=planted.py:bwd_cap_derivative_missing --cases='train/*/softcap30/*'", 5),
    _found("front-end", "run --impl=planted.py:tail_keys_attended --check=front_end --check=arguments", 3),
    _found("decoding", "run --impl=planted.py:decode_at_the_end_of_the_cache --check=decoding --check=parts", 2),
    _found("refusals", "run --impl=planted.py:accepts_wrong_operands --check=errors --check=refusals --check=forms", 2),
    _found("combined", "run --impl=planted:dbias_of_first_along_broadcast_axes --check=transforms --check=limits", 2),
    _found("ensemble", "run --impl=planted.py:acc_in_input_dtype --check=ensemble --check=sharding", 1),
    _found("exploit", f"run --impl={shlex.quote(str(_EXPLOITS / 'returning' / 'nan.py'))}:attention --level=smoke", 2),
    _found("explored", "explore --impl=kernels.py:window --profile=ci --examples=30 --seed=1", 2),
    _found("gate", "pytest --pyargs conformance --impl=kernels.py:halves --conformance-seed=3 '-k=T1 and f32'", 3),
)
"""Nightly runs: fifty failures in all."""

# A case whose turn it is to have the call with residuals differentiated, with keys that no query may attend to.
_TURN = "train/f32/B1.T48.S200.N2.K2.H72.V40/causal/heavy"
ALWAYS = (
    _found("turn", f"run --impl=kernels.py:halves --in-process --cases={_TURN}", 1, "poison"),
    _found("products", f"run --impl='my kernels.py:much' --products=tf32 --case={_ONE} --check=gradients", 1),
    _found("raises", "run --impl=kernels:raises --memory=8 --cases='train/f32/*.T1.*' --check=forward", 1),
    _found("hangs", f"run --impl=kernels.py:hangs --timeout=0.5 --case={_ONE} --check=forward", 1),
    _found(
        "explored", "explore --impl=kernels.py:scaled --in-process --examples=1 --seed=1 --cases='train/f32/*/full'", 1
    ),
)
"""Short runs in this process."""


def folder_with_kernels(folder: Path) -> Path:
    """Create a user's folder with all kernels that are judged here."""
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "my kernels.py").write_text(KERNELS)
    (folder / "planted.py").write_text(PLANTED)
    return folder


Run = Callable[[Sequence[str], Path], tuple[int, str]]
"""Runs Python with arguments in a folder, and returns the exit code and the output."""


def failures(found: Found, folder: Path, run: Run) -> list[Record]:
    """Draw some failures of a run, at random and the same every time."""
    path = folder / f"{found.name}.jsonl"
    arguments = [*found.command, f"--{'conformance-' if found.is_gate else ''}json={path}"]
    if found.command[0] == "run":
        arguments.append("--jobs=1")
    if found.is_gate:
        arguments = [*arguments, "-q", "-p", "no:cacheprovider"]
    code, said = run(["-m", *(() if found.is_gate else ("conformance",)), *arguments], folder)
    assert code == 1, said
    red = [record for record in records.read_jsonl(path) if record.verdict in RED]
    red = sorted((one for one in red if found.check in ("", one.check)), key=lambda one: one.key)
    assert len(red) >= found.count, f"{found.name}: {len(red)} failures"
    return random.Random(f"{found.name} 0").sample(red, found.count)


def again(record: Record, folder: Path, run: Run) -> list[Record]:
    """Run the command that a record prints, and return what it finds."""
    words = shlex.split(record.reproduce)
    assert words[:3] == ["python", "-m", "conformance"]
    path = folder / "again.jsonl"
    path.unlink(missing_ok=True)
    code, said = run([*words[1:], f"--json={path}"], folder)
    assert code == 1, f"{record.reproduce}\n{said}"
    return records.read_jsonl(path)


def differences(record: Record, found: list[Record]) -> str:
    """List how a failure differs from what its command found; none if it is the same."""
    same = [one for one in found if (one.check, one.observable) == (record.check, record.observable)]
    if len(same) != 1:
        there = [f"{one.check}/{one.observable} {one.verdict}" for one in found]
        return f"{record.check}/{record.observable} is there {len(same)} times, among {there}"
    if same[0].verdict != record.verdict:
        return f"the verdict was {record.verdict} and is {same[0].verdict}: {same[0].reason}"
    was, now = _ratio(record, same[0]), same[0].ratio
    if RATIO_FAST_COMPILE not in record.figures:
        now = same[0].figures.get(RATIO_FAST_COMPILE, now)
    return "" if _text(was) == _text(now) else f"the ratio was {was!r} and is {now!r}"


def _ratio(record: Record, other: Record) -> float | None:
    """Return the ratio to compare. A failure that was not judged again has only the ratio of its first judgement."""
    if RATIO_FAST_COMPILE in record.figures or record.ratio is not None:
        return record.ratio
    return float("inf") if RATIO_FAST_COMPILE in other.figures else None


def _text(ratio: float | None) -> str:
    return "none" if ratio is None else float(ratio).hex()


def by_itself(arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run Python in a process of its own, as a user does."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout + done.stderr


def here(arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command of this project in this process, which has loaded JAX already."""
    assert tuple(arguments[:2]) == ("-m", "conformance")
    with contextlib.chdir(folder):
        return cli.main(cli.build_parser().parse_args(arguments[2:])), ""
