"""Judge one row of a survey: create the environment, run the command `run` in it, and keep the records.

The folder of a row holds `environment`, `pyproject.toml` with the known failures of the library, `records.jsonl`,
`records.html`, `run.log` and `row.json`, which says how it ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeGuard

from conformance import interrupts
from conformance.survey import known_failures
from conformance.survey.environments import CannotCreateEnvironment, CreatedEnvironment, create_environment
from conformance.survey.survey_rows import Row
from reports import output_files
from reports.records import RecordedRun, RecordFileError, read_runs

JUDGED, NOT_INSTALLED, NOT_JUDGED, STOPPED = "judged", "not installed", "not judged", "stopped"
RECORDS, PAGE, LOG, SPEED = "records.jsonl", "records.html", "run.log", "speed.jsonl"
BASELINE = "block_flash"
"""The implementation of this project beside which functions are timed."""
_TIMED_CASES = tuple(f"train/f32/B1.T1024.S1024.N4.K4.H64.V64/{mask}/normal/s0" for mask in ("full", "causal"))
_BENCH_SECONDS = 15  # for timing one function in all cases, without compiling
_OUTCOME = "row.json"
_STOP_SECONDS = 60.0  # time for a run that was told to stop, in which it writes its page


@dataclasses.dataclass(frozen=True)
class RowOutcome:
    """The end of the judging of a row."""

    state: str  # `JUDGED`, `NOT_INSTALLED`, `NOT_JUDGED` or `STOPPED`
    reason: str = ""  # why it was not judged; empty if it was
    functions: tuple[str, ...] = ()
    level: str = ""
    packages: tuple[str, ...] = ()
    seconds: float = 0.0  # the duration of judging and timing, without the time of an earlier, stopped run


def read_outcome(folder: Path) -> RowOutcome | None:
    """Read how the row of this folder ended; None if it was never begun."""
    try:
        found = json.loads((folder / _OUTCOME).read_text(encoding="utf-8"))
        lists = {name: tuple(found[name]) for name in ("functions", "packages")}
        return RowOutcome(**{**found, **lists})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_finished(row: Row, folder: Path, level: str, *, retry: bool, bench: bool = False) -> bool:
    """Return whether nothing is left to do: the row was judged, and timed if asked, or failed and is not retried."""
    if is_judged(row, folder, level):
        return not bench or (folder / SPEED).is_file()
    outcome = read_outcome(folder)
    return _is_of(outcome, row, level) and outcome.state in (NOT_INSTALLED, NOT_JUDGED) and not retry


def is_judged(row: Row, folder: Path, level: str) -> bool:
    """Return whether the folder has all records of the row at this level."""
    outcome = read_outcome(folder)
    return _is_of(outcome, row, level) and outcome.state == JUDGED


def _is_of(outcome: RowOutcome | None, row: Row, level: str) -> TypeGuard[RowOutcome]:
    return outcome is not None and outcome.level == level and set(row.functions) <= set(outcome.functions)


def judge_row(
    row: Row,
    folder: Path,
    level: str,
    *,
    jobs: int | None = None,
    bench: bool = False,
    show: bool = False,
    on_step: Callable[[str], None],
) -> RowOutcome:
    """Judge a row in its folder, and write how it ended. A run that was stopped there is continued.

    With `bench`, functions are timed too, which needs an otherwise idle machine; a row that was judged there is only
    timed. With `show`, the run's own output goes to the terminal, besides the log.
    """
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    outcome = RowOutcome(NOT_INSTALLED, functions=row.functions, level=level)
    try:
        described = row.library.build_environment(row.version)
        packages = " ".join((*described.requirements, *described.without_dependencies))
        on_step(f"{row.name}: Python {described.python}, {packages}")
        made = create_environment(described, folder / "environment")
    except CannotCreateEnvironment as error:
        outcome = dataclasses.replace(outcome, reason=str(error))
    else:
        if (kept := read_outcome(folder)) is not None and is_judged(row, folder, level):
            outcome = kept
        else:
            on_step(f"{row.name}: judging {', '.join(row.functions)}")
            outcome = _run_in(made, row, folder, outcome, jobs=jobs, show=show)
        if bench and outcome.state == JUDGED:
            on_step(f"{row.name}: timing beside {BASELINE}")
            _time_functions(made, row, folder, show=show)
    outcome = dataclasses.replace(outcome, seconds=round(outcome.seconds + time.monotonic() - started, 1))
    output_files.write_text(folder / _OUTCOME, json.dumps(dataclasses.asdict(outcome), indent=1) + "\n")
    return outcome


def _run_in(
    made: CreatedEnvironment, row: Row, folder: Path, outcome: RowOutcome, *, jobs: int | None, show: bool
) -> RowOutcome:
    """Run the command `run` in the environment, and tell from its records how it ended."""
    outcome = dataclasses.replace(outcome, state=NOT_JUDGED, packages=made.packages)
    _write_settings(row, folder)
    python = _find_python(made, folder)
    ask = [f"--impl={name}" for name in row.functions]
    options = [f"--level={outcome.level}", f"--report={PAGE}", "--keep-going", *([f"--jobs={jobs}"] if jobs else [])]
    command = [python, "-m", "conformance", "run"]
    code = None
    if _has_stopped_run(folder / RECORDS):
        code = _run_command([*command, f"--resume={RECORDS}", *options[1:]], folder, show=show)
    if code in (None, 2):  # nothing to continue, or a run of other functions or versions
        (folder / RECORDS).unlink(missing_ok=True)
        code = _run_command([*command, *ask, *options], folder, show=show)
    if interrupts.get_received_signal() is not None:
        return dataclasses.replace(outcome, state=STOPPED, reason=interrupts.describe_signal())
    # With 2 the run is complete if its records are: no function could be judged, and each record says why.
    if code in (0, 1, 2) and _is_complete(folder / RECORDS):
        return dataclasses.replace(outcome, state=JUDGED)
    return dataclasses.replace(outcome, reason=_read_last_line(folder / LOG) or f"the run ended with exit code {code}")


def _find_python(made: CreatedEnvironment, folder: Path) -> str:
    """Return the path of the environment's Python in the folder of the row, where commands run."""
    return str(Path("environment") / made.python.relative_to(folder / "environment"))


def _time_functions(made: CreatedEnvironment, row: Row, folder: Path, *, show: bool) -> None:
    """Time the functions of a row beside one of this project, and write the measurements."""
    names = ",".join((BASELINE, *row.functions))
    cases = [f"--case={case}" for case in _TIMED_CASES]
    options = [f"--impl={names}", *cases, f"--seconds={_BENCH_SECONDS * (1 + len(row.functions))}", f"--json={SPEED}"]
    _run_command([_find_python(made, folder), "-m", "conformance", "bench", *options], folder, show=show)


def _write_settings(row: Row, folder: Path) -> None:
    """Write the settings of the run: the known failures of the library, if it has any."""
    known = known_failures.find_file(row.library.name)
    files = [os.path.relpath(known, folder)] if known is not None else []
    text = f"[tool.attention_conformance]\nexpected_failure_files = {json.dumps(files)}\n"
    output_files.write_text(folder / "pyproject.toml", text)


def _has_stopped_run(path: Path) -> bool:
    """Return whether the file has a run that can be continued."""
    found = _read_runs(path)
    return len(found) == 1 and found[0].run is not None and not found[0].is_complete


def _is_complete(path: Path) -> bool:
    found = _read_runs(path)
    return bool(found) and all(one.is_complete for one in found)


def _read_runs(path: Path) -> list[RecordedRun]:
    """Read the runs of a file; none if it cannot be read."""
    try:
        return read_runs(path)
    except (OSError, RecordFileError):
        return []


def _run_command(command: Sequence[str], folder: Path, *, show: bool) -> int:
    """Run a command in the folder of a row; append its output to the log, and return its exit code."""
    # Python must find the packages of the environment alone, and uv's environment is not the caller's.
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                if show:
                    print(line, end="", flush=True)
            return process.wait()
        except KeyboardInterrupt:
            interrupts.stop_raising()  # what was judged so far is still to be written
            _stop(process)
            return process.returncode
        finally:
            if process.poll() is None:
                _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask a run to stop, so that it keeps its results; kill it if it does not."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _read_last_line(path: Path) -> str:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        return ""
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ")
