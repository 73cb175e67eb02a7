"""Judge and time the GPU kernels of this project on a machine with a GPU, within a limit of time.

Run it from the root of the repository:

    python docs/measure_on_chip.py                                   # on a GPU: eight minutes at most
    python docs/measure_on_chip.py --plan=gpu-tune                   # choose block sizes there, instead of comparing
    python docs/measure_on_chip.py --plan=cpu-trial --seconds=180    # a tiny trial of this script, on a CPU

It writes one folder: the records (`*.jsonl`), `times.json`, and the output of each step (`raw/`). Steps run one after
the other, each in a process of its own with a limit of time. The folder is complete after every step, so what was done
is kept when the time ends, on Ctrl-C, and where a step crashes.

A kernel is judged before it is timed. Times of a kernel that was not judged green in the same run are marked so, and
are no results: `website/measurement_tables.py` does not show them.

The site shows `times.json` once that is copied to `docs/measurements/data/chips`. The script is not in
`conformance`, which names no implementation.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a copied tree is not installed

from reports import output_files  # noqa: E402 # found by the line above
from reports.records import JUDGED, RED, RecordedRun, RecordFileError, read_measurements, read_runs  # noqa: E402 # as above
from reports.records.measurement import AGREES, BACKWARD, FORWARD, TIMED, Measurement, Quartiles  # noqa: E402 # as above

SCHEMA = "attention-conformance/chip/1"
_STOP_SECONDS = 15.0  # for an interrupted step to write its files; then it is killed
_MACHINE_SECONDS = 60.0
_CEILING_SECONDS = 45.0
_JUDGING_SHARE = 0.4  # of all time; the rest is for times
_LEAST_SECONDS = 10.0  # a step that would get less time is not started
_MATMUL_SIDE = 8192
_ROUNDS = 20

GREEN, RED_VERDICT, NOT_JUDGED = "green", "red", "not judged"
RESULT, NOT_TIMED, WRONG = "result", "not timed", "wrong"


@dataclasses.dataclass(frozen=True)
class TrainRow:
    """Self-attention of one size under several masks, forward and backward."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    depth: int
    v_depth: int
    masks: tuple[str, ...]

    def list_cases(self, dtype: str) -> list[str]:
        """List the ids of the cases."""
        shape = f"B{self.batch}.T{self.length}.S{self.length}.N{self.heads}.K{self.kv_heads}.H{self.depth}"
        return [f"train/{dtype}/{shape}.V{self.v_depth}/{mask}/normal/s0" for mask in self.masks]


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """One query for each of several sequences of equal length, whose keys are in pages or contiguous."""

    sequences: int
    keys: int
    heads: int
    kv_heads: int
    depth: int
    page: int

    def build_case(self, dtype: str, *, paged: bool, cache: str = "") -> str:
        """Build the id of the case; `cache` says how pages are quantised, such as `kvint8-tensor`."""
        shape = f"B{self.sequences}.T1.S{self.keys}.N{self.heads}.K{self.kv_heads}.H{self.depth}.V{self.depth}"
        lengths = "-".join([str(self.keys)] * self.sequences)
        stored = "/".join(part for part in (f"own-linf-{lengths}", cache, f"paged{self.page}") if part)
        mask = stored if paged else "full"
        return f"decode/{dtype}/{shape}/{mask}/normal/s0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that one process times, with the kernels to time side by side; the first is ours."""

    name: str
    kernels: tuple[str, ...]
    cases: tuple[str, ...]
    phase: str = "both"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings of one kernel that are tuned on one case."""

    name: str
    kernel: str
    case: str
    parameters: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of what to judge, time and tune.

    Attributes:
      platform: the JAX backend that the machine must have.
      ours: the timed kernels of this project, which are judged whole; each group in a run of its own.
      others_of_ours: kernels of this project that are judged as time allows, and not timed.
      published: the timed kernels of others, which are judged by `published_checks` alone.
      published_checks: checks of the results that are timed.
      narrowing: further options for judging.
      processes: the most processes that judge; two cores are left alone.
      groups: what is timed, the most important first.
      tunings: what is tuned, the most important first.
      ceiling_bytes: sizes of arrays to copy.
      matmul_side: rows of the matrices of a product.
    """

    platform: str
    ours: tuple[tuple[str, ...], ...]
    others_of_ours: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    published_checks: tuple[str, ...] = ("forward", "gradients")
    narrowing: tuple[str, ...] = ()
    processes: int = 12
    groups: tuple[Group, ...] = ()
    tunings: tuple[Tuning, ...] = ()
    ceiling_bytes: tuple[int, ...] = ()
    matmul_side: int = _MATMUL_SIDE

    @property
    def kernels(self) -> list[str]:
        """The names of all kernels that are judged or timed."""
        timed = (name for group in self.groups for name in group.kernels)
        tuned = (tuning.kernel for tuning in self.tunings)
        return list(
            dict.fromkeys([*itertools.chain(*self.ours), *self.others_of_ours, *self.published, *timed, *tuned])
        )


def _build_gpu_plan() -> Plan:
    window = "causal_and_window-l1023-r0"
    three, two = ("causal", "full", window), ("causal", "full")
    trained = ("flash_gpu_mosaic", "jax_nn_cudnn")
    paged, contiguous = ("paged_gpu", "paged_gpu_mosaic"), ("ragged_gpu", "ragged_gpu_mosaic")
    quantized = ("paged_quantized_gpu_mosaic",)
    decode = (DecodeRow(64, 4096, 32, 8, 128, 16), DecodeRow(8, 16384, 32, 8, 128, 16))

    def train(name: str, *rows: TrainRow) -> Group:
        cases = tuple(case for row in rows for case in row.list_cases("bf16"))
        return Group(name=name, kernels=trained, cases=cases)

    def serve(name: str, kernels: tuple[str, ...], *, paged: bool, caches: tuple[str, ...] = ("",)) -> Group:
        cases = tuple(row.build_case("bf16", paged=paged, cache=cache) for cache in caches for row in decode)
        return Group(name=name, kernels=kernels, cases=cases, phase="forward")

    return Plan(
        platform="gpu",
        ours=(("flash_gpu_mosaic",), (*paged, *contiguous, *quantized)),
        others_of_ours=("flash_gpu", "flash_gpu_packed"),
        published=("jax_nn_cudnn", "jax_paged_gpu", "jax_decode_gpu"),
        groups=(
            train("train-4096", TrainRow(4, 4096, 16, 16, 64, 64, three), TrainRow(4, 4096, 8, 8, 128, 128, three)),
            serve("decode-pages", (*paged, "jax_paged_gpu"), paged=True),
            train("train-256", TrainRow(2, 4096, 8, 8, 256, 256, two)),
            train("train-short", TrainRow(16, 1024, 16, 16, 128, 128, two)),
            train("train-grouped", TrainRow(2, 8192, 32, 8, 128, 128, three)),
            serve("decode", (*contiguous, "jax_decode_gpu"), paged=False),
            serve("decode-quantized", quantized, paged=True, caches=("kvint8-tensor", "kvfp8-tensor")),
            train("train-long", TrainRow(2, 16384, 8, 8, 128, 128, three)),
            train("train-latent", TrainRow(2, 4096, 16, 16, 192, 128, two)),
        ),
        ceiling_bytes=tuple(row.sequences * row.keys * row.kv_heads * row.depth * 4 for row in decode),
    )


def _build_cpu_plan() -> Plan:
    row, served = TrainRow(1, 64, 2, 2, 16, 16, ("causal", "full")), DecodeRow(2, 64, 4, 2, 16, 16)
    return Plan(
        platform="cpu",
        ours=(("block_flash", "paged", "paged_gpu_mosaic"),),
        published=("jax_nn_xla",),
        published_checks=(),
        narrowing=("--cases=decode/f32", "--check=forward"),
        processes=2,
        groups=(
            Group(name="train", kernels=("block_flash", "jax_nn_xla"), cases=tuple(row.list_cases("f32"))),
            Group(
                name="decode-pages",
                kernels=("paged", "paged_gpu_mosaic"),
                cases=(served.build_case("f32", paged=True),),
                phase="forward",
            ),
            # `ragged` is timed and not judged, so that its times are no results.
            Group(name="decode", kernels=("ragged",), cases=(served.build_case("f32", paged=False),), phase="forward"),
        ),
        tunings=(Tuning(name="blocks", kernel="block_flash", case=row.list_cases("f32")[0], parameters=("blocks",)),),
        ceiling_bytes=(1 << 20,),
        matmul_side=256,
    )


def _build_gpu_tuning_plan() -> Plan:
    """Build the plan that chooses the rings of the Mosaic kernels; the backward pass where no chip has run it first."""
    forward, backward = ("mosaic_forward",), ("mosaic_dkv", "mosaic_dq")

    def tune(name: str, depth: int, v_depth: int, mask: str, parameters: tuple[str, ...]) -> Tuning:
        heads = max(8, 1024 // depth)
        (case,) = TrainRow(4, 4096, heads, heads, depth, v_depth, (mask,)).list_cases("bf16")
        return Tuning(name=name, kernel="flash_gpu", case=case, parameters=parameters)

    return Plan(
        platform="gpu",
        ours=(("flash_gpu_mosaic",),),
        tunings=(
            tune("256", 256, 256, "causal", (*backward, *forward)),
            tune("128-full", 128, 128, "full", forward),
            tune("128", 128, 128, "causal", forward),
            tune("latent", 192, 128, "causal", (*backward, *forward)),
            tune("64-full", 64, 64, "full", forward),
            tune("64", 64, 64, "causal", forward),
        ),
    )


PLANS = {"gpu": _build_gpu_plan, "gpu-tune": _build_gpu_tuning_plan, "cpu-trial": _build_cpu_plan}


@dataclasses.dataclass(frozen=True)
class StepResult:
    """End of a step: its exit code, and the reason why it was stopped, which is empty if it ended by itself."""

    code: int
    stopped: str = ""


class Measuring:
    """One run on one machine: its steps, and the folder with what they found."""

    def __init__(self, plan: Plan, folder: Path, seconds: float, command: str) -> None:
        """Prepare a run.

        Args:
          plan: what to judge and time.
          folder: where everything is written.
          seconds: the limit for all steps together.
          command: the command of this run.
        """
        self._plan, self._folder = plan, folder
        self._started = time.monotonic()
        self._seconds = seconds
        self._machine: dict[str, Any] = {}
        self._ceilings: dict[str, Any] = {}
        self._steps: list[dict[str, Any]] = []
        self._left_out: list[str] = []
        self._ended = "running"
        self._command = command
        (folder / "raw").mkdir(parents=True)

    @property
    def _left(self) -> float:
        """The seconds that a step may take if it starts now, and can then still be stopped in time."""
        return self._seconds - (time.monotonic() - self._started) - _STOP_SECONDS

    def run(self) -> int:
        """Run all steps. Return 0 if all was done and is green, 1 if a kernel of ours is red, and 2 otherwise.

        Raises:
          KeyboardInterrupt: after what was done is written.
        """
        try:
            self._run_steps()
            is_whole = not any(step["stopped"] for step in self._steps) and self._ended == "running"
            self._ended = "complete" if is_whole else "time ended" if self._ended == "running" else self._ended
        except KeyboardInterrupt:
            self._ended = "interrupted"
            raise
        finally:
            self._write()
        standings = self._find_standings()
        if any(standings[name]["verdict"] == RED_VERDICT for name in itertools.chain(*self._plan.ours)):
            return 1
        return 0 if self._ended == "complete" else 2

    def _run_steps(self) -> None:
        plan = self._plan
        found = self._run_json("machine", _MACHINE_SECONDS, "--step=machine")
        if found is None or found["backend"] != plan.platform:
            what = "JAX did not start" if found is None else f"JAX computes on {found['backend']}"
            self._ended = f"no {plan.platform}: {what}"
            self._say(self._ended)
            return
        self._machine = found
        self._say_missing(found["implementations"])
        for number, kernels in enumerate(plan.ours, 1):
            self._judge(f"smoke-ours-{number}", self._keep_known(kernels), "smoke", until=_JUDGING_SHARE)
        checks = (f"--check={check}" for check in plan.published_checks)
        self._judge("smoke-published", self._keep_known(plan.published), "smoke", *checks, until=_JUDGING_SHARE + 0.05)
        # What is left of the time for judging, if the steps before needed less than their share.
        self._judge("smoke-others", self._keep_known(plan.others_of_ours), "smoke", until=_JUDGING_SHARE)
        self._judge("quick-ours", self._keep_known(itertools.chain(*plan.ours)), "quick", until=_JUDGING_SHARE)
        if plan.ceiling_bytes:
            arguments = [f"--ceiling-bytes={size}" for size in plan.ceiling_bytes]
            side = f"--matmul-side={plan.matmul_side}"
            self._ceilings = self._run_json("ceilings", _CEILING_SECONDS, "--step=ceilings", side, *arguments) or {}
        for number, group in enumerate(plan.groups):
            self._time(group, waiting=len(plan.groups) - number)
        for number, tuning in enumerate(plan.tunings):
            self._tune(tuning, waiting=len(plan.tunings) - number)

    def _keep_known(self, names: Iterable[str]) -> list[str]:
        """Keep the names that this version has."""
        return [name for name in names if name in self._machine["implementations"]]

    def _say_missing(self, known: Sequence[str]) -> None:
        for name in self._plan.kernels:
            if name not in known:
                self._leave_out(f"{name} is not in the catalogue of this version")

    def _leave_out(self, what: str) -> None:
        self._left_out.append(what)
        self._say(f"left out: {what}")

    def _judge(self, name: str, kernels: Sequence[str], level: str, *options: str, until: float) -> None:
        """Judge kernels until this share of all time is over."""
        if not kernels:
            return
        limit = self._seconds * until - (time.monotonic() - self._started)
        if name.startswith(("smoke-others", "quick")) and limit < _LEAST_SECONDS:
            self._leave_out(f"{name}: its time is for the steps that follow")
            return
        processes = max(1, min(self._plan.processes, (os.cpu_count() or 1) - 2))
        words = [f"--impl={kernel}" for kernel in kernels]
        self._run_step(
            name,
            limit,
            *("-m", "conformance", "run", *words, f"--level={level}", f"--require-platform={self._plan.platform}"),
            *(f"--jobs={processes}", "--confirm-seconds=0", "--diagnose-seconds=0"),
            f"--json={self._folder / f'{name}.jsonl'}",
            *(*self._plan.narrowing, *options),
        )

    def _time(self, group: Group, *, waiting: int) -> None:
        """Time a group of cases, for twice its share of the time that is left."""
        kernels = self._keep_known(group.kernels)
        if not kernels:
            self._leave_out(f"{group.name}: this version has none of its kernels")
            return
        limit = self._find_share(waiting)
        self._run_step(
            f"times-{group.name}",
            limit,
            *("-m", "conformance", "bench", f"--impl={','.join(kernels)}", f"--phase={group.phase}"),
            *(f"--runs={_ROUNDS}", f"--seconds={max(limit / 3, 1):.0f}"),
            *(f"--json={self._folder / f'times-{group.name}.jsonl'}", *(f"--case={case}" for case in group.cases)),
        )

    def _find_share(self, waiting: int) -> float:
        """Return the seconds for the next of the steps that wait: twice its share of the time that is left."""
        return self._left * min(1.0, 2.0 / waiting)

    def _tune(self, tuning: Tuning, *, waiting: int) -> None:
        """Tune a kernel on a case, for twice its share of the time that is left."""
        if not self._keep_known((tuning.kernel,)):
            self._leave_out(f"{tuning.name}: {tuning.kernel} is not in the catalogue of this version")
            return
        limit = self._find_share(waiting)
        self._run_step(
            f"tuned-{tuning.name}",
            limit,
            *("-m", "conformance", "tune", f"--impl={tuning.kernel}", f"--case={tuning.case}"),
            *(f"--parameter={parameter}" for parameter in tuning.parameters),
            *(f"--seconds={max(limit / 3, 1):.0f}", f"--out={self._folder / f'tuned-{tuning.name}.json'}"),
        )

    def _run_json(self, name: str, limit: float, *words: str) -> dict[str, Any] | None:
        """Run a step of this script, and return what it printed; None if it failed."""
        ended = self._run_step(name, limit, str(Path(__file__).resolve()), *words)
        if ended is None or ended.code != 0:
            return None
        lines = (self._folder / "raw" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def _run_step(self, name: str, limit: float, *words: str) -> StepResult | None:
        """Run Python with these arguments for at most `limit` seconds. Return None if there is no time left for it.

        Raises:
          KeyboardInterrupt: if a signal ends this run; the step has then been stopped.
        """
        limit = min(limit, self._left)
        if limit < _LEAST_SECONDS:
            self._leave_out(f"{name}: no time left")
            self._ended = "time ended"
            return None
        command = [sys.executable, *words]
        shown = shlex.join(["python", *words])
        self._say(f"{name}, at most {limit:.0f} s")
        started, result = time.monotonic(), StepResult(-1, "interrupted")
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if self._plan.platform == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        try:
            with (self._folder / "raw" / f"{name}.txt").open("w", encoding="utf-8") as output:
                result = _run_process(command, output, limit, environment)
        finally:
            took = round(time.monotonic() - started, 1)
            self._steps.append(
                {
                    "step": name,
                    "command": shown,
                    "limit": round(limit, 1),
                    "seconds": took,
                    **dataclasses.asdict(result),
                }
            )
            self._write()
        self._say(f"{name}: {result.stopped or f'exit code {result.code}'} after {took:.0f} s")
        return result

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._started:5.0f} s] {line}", flush=True)

    def _write(self) -> None:
        """Write `times.json`: all that is known until now."""
        machine = self._machine
        standings = self._find_standings()
        rows = list(self._list_rows(standings))
        found = {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "chip": machine.get("chip", ""),
            "driver": machine.get("driver", ""),
            "versions": machine.get("versions", {}),
            "command": self._command,
            "provenance": "",
            "ended": self._ended,
            "left_out": self._left_out,
            "judged": standings,
            "ceilings": self._ceilings,
            "comparisons": compare_rows(rows, self._plan.groups),
            "rows": rows,
            "steps": self._steps,
            "notes": [],
        }
        output_files.write_text(self._folder / "times.json", json.dumps(found, indent=1) + "\n")

    def _find_standings(self) -> dict[str, dict[str, Any]]:
        """Return for each kernel whether it was judged green in this run, and how much was judged.

        It is green if all its jobs of `smoke` were judged, some on the required platform, and nothing is red at any
        level.
        """
        recorded = []
        for path in sorted(self._folder.glob("*.jsonl")):
            if not path.name.startswith(("times-", "tuned-")):
                try:
                    recorded += [one for one in read_runs(path) if one.run is not None]
                except (OSError, ValueError):
                    self._say(f"{path.name} cannot be read")  # it was killed while it wrote its first line
        return {name: _find_standing(name, recorded, self._plan.platform) for name in self._plan.kernels}

    def _list_rows(self, standings: Mapping[str, Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
        """Yield one row for each measurement, with whether it is a result."""
        for group in self._plan.groups:
            path = self._folder / f"times-{group.name}.jsonl"
            try:
                found = read_measurements(path)
            except (OSError, RecordFileError):
                continue
            for one in found:
                yield _build_row(one, group, standings[one.implementation]["verdict"])


def _find_standing(name: str, recorded: Iterable[RecordedRun], on: str) -> dict[str, Any]:
    """Return whether a kernel was judged green on the platform `on`, and how much of each level was judged."""
    levels = {}
    is_red = is_green = False
    for one in recorded:
        assert one.run is not None
        numbers = {number for number, job in enumerate(one.run.jobs) if job.implementation == name}
        if not numbers:
            continue
        found = [record for record in one.records if record.implementation == name]
        done = len(numbers & set(one.done))
        is_red |= any(record.verdict in RED for record in found)
        on_platform = any(record.platform == on and record.verdict in JUDGED for record in found)
        is_green |= one.run.level == "smoke" and done == len(numbers) and on_platform
        levels[one.run.level] = {
            "jobs": done,
            "planned": len(numbers),
            "records": len(found),
            "narrowed": one.run.narrowed,
        }
    verdict = RED_VERDICT if is_red else GREEN if is_green else NOT_JUDGED
    return {"verdict": verdict, "levels": levels}


def _run_process(command: Sequence[str], output: Any, limit: float, environment: Mapping[str, str]) -> StepResult:
    """Run a process for at most `limit` seconds; then, and on a signal, interrupt it and let it write its files."""
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        return StepResult(process.wait(limit))
    except subprocess.TimeoutExpired:
        return StepResult(_stop(process), "its time ended")
    except KeyboardInterrupt:
        _stop(process)
        raise
    finally:
        _signal_group(process, signal.SIGKILL)  # workers that outlived it


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Interrupt a process as Ctrl-C does, and kill it if it does not end. Return its exit code."""
    _signal_group(process, signal.SIGINT)
    try:
        return process.wait(_STOP_SECONDS - 2)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _signal_group(process, signal.SIGKILL)
        return process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to all processes of a step."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # all have ended


def _build_row(one: Measurement, group: Group, verdict: str) -> dict[str, Any]:
    """Build the row of one measurement."""
    if one.outcome not in TIMED:
        status = NOT_TIMED
    elif one.outcome != AGREES:
        status = WRONG
    else:
        status = RESULT if verdict == GREEN else f"judged {verdict}" if verdict == RED_VERDICT else verdict
    seconds = one.seconds
    return {
        "group": group.name,
        "case": one.case,
        "phase": one.phase,
        "kernel": one.implementation,
        "status": status,
        "reason": one.reason,
        "seconds": None if seconds is None else seconds._asdict(),
        "rounds": len(one.samples),
        "baseline": one.baseline,
        "baseline_over_this": None if one.speed is None else one.speed._asdict(),
        "flops_per_second": one.flops_per_second,
        "ceiling_flops_per_second": one.ceiling,
    }


def compare_rows(rows: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Compare our kernel with the published one, for each case whose times are results.

    Ratios are those of medians. The time of the backward pass is the median of the call with its gradients, minus the
    median of the call alone.
    """
    medians = {
        (row["case"], row["phase"], row["kernel"]): row["seconds"]["median"] for row in rows if row["status"] == RESULT
    }
    found = []
    for group in groups:
        if group.phase != "both":
            continue
        ours, published = group.kernels
        for case in group.cases:
            if {(case, FORWARD, ours), (case, FORWARD, published)} <= medians.keys():
                forward = {name: medians[case, FORWARD, name] for name in group.kernels}
                whole = {name: medians.get((case, BACKWARD, name)) for name in group.kernels}
                found.append(
                    {
                        "case": case,
                        "ours": ours,
                        "published": published,
                        "forward": round(forward[ours] / forward[published], 3),
                        "backward": _divide_backward(
                            *(None if whole[name] is None else whole[name] - forward[name] for name in group.kernels)
                        ),
                    }
                )
    return found


def _divide_backward(ours: float | None, published: float | None) -> float | None:
    """Return the ratio of the backward passes; None if one was not timed, or noise makes it negative."""
    if ours is None or published is None or min(ours, published) <= 0:
        return None
    return round(ours / published, 3)


def describe_machine() -> dict[str, Any]:
    """Return the chip, the versions, and the names of all implementations. It loads JAX."""
    from conformance import environment

    environment.prepare_environment()
    import jax

    from conformance.execution import implementation_registry

    described = environment.describe_environment()
    described.pop("XLA_FLAGS")  # those for judging; times are measured under JAX's own
    driver = ""
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    return {
        "backend": jax.default_backend(),
        "chip": described["devices"] or platform.machine(),
        "driver": driver,
        "versions": {**described, "platform_version": jax.devices()[0].client.platform_version},
        "implementations": implementation_registry.list_implementations(),
    }


def measure_ceilings(sizes: Sequence[int], side: int) -> dict[str, Any]:
    """Time copies of arrays of these bytes, and a product of random bf16 matrices. It loads JAX."""
    import jax
    import jax.numpy as jnp

    flip = jax.jit(lambda x: x ^ 1)  # XLA would drop a plain copy
    copies = []
    for size in sizes:
        x = jnp.zeros(size // 4, jnp.int32)
        seconds = _time_call(flip, x)
        copies.append({"bytes": size, "seconds": seconds._asdict(), "bytes_per_second": 2 * size / seconds.median})
    a, b = (jax.random.normal(jax.random.key(n), (side, side), jnp.bfloat16) for n in range(2))
    seconds = _time_call(jax.jit(jnp.matmul), a, b)
    rates = {"lower": 2 * side**3 / seconds.upper, "upper": 2 * side**3 / seconds.lower}
    product = {"side": side, "dtype": "bf16", "seconds": seconds._asdict(), "flops_per_second": rates}
    return {"copies": copies, "product": product}


def _time_call(function: Any, *operands: Any) -> Quartiles:
    """Return the quartiles of the seconds of one call, over rounds of several calls each."""
    import jax

    wait: Callable[[Any], object] = jax.block_until_ready  # untyped upstream
    wait(function(*operands))
    calls, samples = 10, []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for _ in range(calls):
            last = function(*operands)
        wait(last)
        samples.append((time.perf_counter() - started) / calls)
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return Quartiles(lower, median, upper)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run all steps, or one of those that this script runs in a process of its own."""
    parser = argparse.ArgumentParser(description="Judge and time this project's GPU kernels, within a limit of time.")
    parser.add_argument("--plan", choices=PLANS, default="gpu", help="what to judge and time (gpu)")
    parser.add_argument("--seconds", type=float, default=480.0, help="limit for everything (480)")
    parser.add_argument("--out", type=Path, help="the new folder to write (chip-DATE-TIME)")
    parser.add_argument("--step", choices=("machine", "ceilings"), help=argparse.SUPPRESS)
    parser.add_argument("--matmul-side", type=int, default=_MATMUL_SIDE, help=argparse.SUPPRESS)
    parser.add_argument("--ceiling-bytes", type=int, action="append", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step == "machine":
        print(json.dumps(describe_machine()))
        return 0
    if arguments.step == "ceilings":
        print(json.dumps(measure_ceilings(arguments.ceiling_bytes, arguments.matmul_side)))
        return 0
    folder = arguments.out or Path(f"chip-{datetime.datetime.now():%Y-%m-%d-%H%M%S}")
    if folder.exists():
        parser.error(f"{folder} exists: give a new folder")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    command = shlex.join(["python", "docs/measure_on_chip.py", *sys.argv[1:]])
    measuring = Measuring(PLANS[arguments.plan](), folder.resolve(), arguments.seconds, command)
    try:
        code = measuring.run()
    except KeyboardInterrupt:
        code = 130
    print(f"{folder} holds what was done; attach it to the release (docs/how-to/release.md)")
    return code


if __name__ == "__main__":
    sys.exit(main())
