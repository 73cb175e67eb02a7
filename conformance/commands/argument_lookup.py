"""What the arguments of a command name: implementations, cases, files; and refusing what cannot be done."""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

from cases.case import Case, CaseIdError, matches_query, parse_case_id
from cases.named_problems import index_problems
from conformance import runs
from conformance.commands.command_errors import CannotJudge
from conformance.contract import Implementation
from conformance.execution import implementation_registry
from conformance.judging import settings
from conformance.records import Record, make_printable
from conformance.runs import RecordedRun
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.policy import SandboxPolicy, build_policy

SANDBOXED = KernelOptions()

_MAX_LIMIT = 1e9
"""Seconds or GiB that a limit may be: more is no limit."""
_MEMORY_FACTOR = 20
"""What judging a case takes, in operands as the oracle has them: measured on decoding over pages, all checks, with 4 of
64 sequences and with 8."""


def build_kernel_options(arguments: argparse.Namespace) -> KernelOptions:
    """How kernels are found and where they run, by the arguments of a command that judges them."""
    for option in ("timeout", "memory"):
        if (given := getattr(arguments, option)) is None:
            continue
        given = float(given)  # of the file that is gone on with, it may be text: inf
        if not given > 0:
            raise CannotJudge(f"--{option} must be more than zero, got {given:g}")
        if given >= _MAX_LIMIT:
            raise CannotJudge(f"--{option} must be a finite number below {_MAX_LIMIT:g}, got {given:g}")
    problem = getattr(arguments, "problem", None)  # of the commands that have it
    if problem is not None and problem not in index_problems():
        raise CannotJudge(
            f"unknown problem {problem!r}: known are {', '.join(index_problems())} (`list problems` describes them)"
        )
    return KernelOptions(
        arguments.products,
        arguments.in_process,
        arguments.timeout,
        arguments.memory,
        problem,
        _build_sandbox_policy(arguments),
        require_sandbox=arguments.require_sandbox,
    )


def _build_sandbox_policy(arguments: argparse.Namespace) -> SandboxPolicy:
    """Read what the arguments say of the sandbox. Files that the command writes or compares with are hidden from it."""
    named = (getattr(arguments, option, None) for option in ("report", "json", "markdown", "resume", "baseline"))
    try:
        return build_policy(arguments.sandbox_read, arguments.sandbox_env, [str(path) for path in named if path])
    except ValueError as error:
        raise CannotJudge(f"--{error}") from error


def reject_contradictions(arguments: argparse.Namespace) -> None:
    """Refuse arguments of `run` that do not go together."""
    if arguments.all and arguments.impl:
        raise CannotJudge("--all and --impl contradict each other: give one of them")
    if not arguments.all and not arguments.impl:
        raise CannotJudge("nothing to judge: give --impl=NAME (see `python -m conformance list`) or --all")
    if arguments.case is not None and (arguments.cases is not None or arguments.level or arguments.seed):
        raise CannotJudge("--case names one case, seed included: it cannot be combined with --cases, --level or --seed")
    if arguments.problem and (arguments.regressions or arguments.level or arguments.seed):
        raise CannotJudge("--problem names its cases: it cannot be combined with --regressions, --level or --seed")
    if arguments.full_size and (not arguments.problem or arguments.case is not None):
        raise CannotJudge("--full-size goes with --problem: it is the size at which its cases are asked")
    if arguments.pullback and arguments.case is None:
        raise CannotJudge("--pullback goes with --case: in a run of several, cases take turns")
    if arguments.regressions and (arguments.case is not None or arguments.cases is not None or arguments.level):
        raise CannotJudge("--regressions names its cases: it cannot be combined with --case, --cases or --level")
    reject_bad_job_count(arguments.jobs)
    reject_negative_seconds("--confirm-seconds", arguments.confirm_seconds)
    reject_negative_seconds("--diagnose-seconds", arguments.diagnose_seconds)
    for seed in arguments.seed:
        reject_bad_seed(seed)


def reject_negative_seconds(option: str, seconds: float | None) -> None:
    """Refuse a time that is none; no time at all is one."""
    if seconds is not None and not seconds >= 0:
        raise CannotJudge(f"{option} must not be negative, got {seconds:g}")


def reject_bad_seed(seed: int | None) -> None:
    """Refuse a seed that no case can have; none is one that is still to be drawn."""
    if seed is not None and seed < 0:
        raise CannotJudge(f"--seed must not be negative, got {seed}")
    if seed is not None and seed >= 2**64:
        raise CannotJudge(f"--seed must be less than 2**64, got {seed}")


def draw_seeds(arguments: argparse.Namespace) -> list[str]:
    """Put numbers in place of `--seed=random`, and say which in a sentence, if there are any."""
    drawn = [seed if seed is not None else random.SystemRandom().getrandbits(32) for seed in arguments.seed]
    told = ", ".join(str(seed) for seed, asked in zip(drawn, arguments.seed, strict=True) if asked is None)
    arguments.seed = drawn
    return [f"--seed=random drew {told}: --seed={told} judges the same cases again"] if told else []


def reject_bad_job_count(jobs: int | None) -> None:
    """Refuse a number of processes that nothing can run in."""
    if jobs is not None and jobs < 1:
        raise CannotJudge(f"--jobs must be at least 1, got {jobs}")


def load_project_settings() -> settings.Settings:
    """The settings of the project that the command is given in."""
    try:
        return settings.load_settings(Path.cwd())
    except settings.SettingsError as error:
        raise CannotJudge(str(error)) from error


def find_implementation(name: str, kernels: KernelOptions = SANDBOXED) -> Implementation:
    """The implementation called `name`; not ours, it is in a process of its own unless `kernels` says otherwise."""
    try:
        return kernels.find(name)
    except implementation_registry.ImplementationNotFound as error:
        raise CannotJudge(str(error)) from error


def select_problem_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases of a named problem, or the one that is named beside it."""
    if arguments.case is not None:
        return [parse_case(arguments.case)]
    found = index_problems()[arguments.problem].cases(full_size=arguments.full_size)
    if not found:
        raise CannotJudge(f"--full-size: {arguments.problem} has none, since its operands cannot be made exact there")
    chosen = [parse_case(one.id) for one in found if arguments.cases is None or matches_query(arguments.cases, one.id)]
    needed, there = _MEMORY_FACTOR * max(map(_count_operand_bytes, chosen), default=0), _measure_memory()
    if arguments.full_size and needed > there:
        raise CannotJudge(
            f"--full-size: {arguments.problem} needs about {needed / 1e9:,.0f} GB, and this machine has "
            f"{there / 1e9:,.0f} GB: a --case with fewer sequences or heads of the same lengths is of the problem too"
        )
    return chosen


def _measure_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_case(text: str) -> Case:
    """The case with this id."""
    try:
        found = parse_case_id(text)
    except CaseIdError as error:
        raise CannotJudge(str(error)) from error
    there = _measure_memory()
    if (needed := _count_operand_bytes(found)) > there:
        raise CannotJudge(
            f"{text} needs more than {needed / 1e9:,.0f} GB for its operands alone, and this machine has "
            f"{there / 1e9:,.0f} GB"
        )
    return found


def _count_operand_bytes(case: Case) -> int:
    """What q, k and v take in float64, as the oracle has them."""
    keys = case.kv_length * case.num_kv_heads * (case.head_dim + case.v_head_dim)
    return 8 * case.batch * (case.q_length * case.num_q_heads * case.head_dim + keys)


def read_records(name: str) -> list[Record]:
    """The records in a file."""
    return [record for one in read_recorded_runs(name) for record in one.records]


def parse_input_path(name: str) -> Path:
    """The path of a file that is to be read. Raises `CannotJudge` for what no file can be called."""
    if "\0" in name:
        raise CannotJudge(f"{make_printable(name)} cannot be read: no file has a zero byte in its name")
    return Path(name)


def read_recorded_runs(name: str) -> list[RecordedRun]:
    """The runs in a file of records."""
    parse_input_path(name)
    try:
        return runs.read_runs(Path(name))
    except OSError as error:
        raise CannotJudge(f"{make_printable(name)} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CannotJudge(str(error)) from error
