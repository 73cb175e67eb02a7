"""Define and validate the options of a run: what to judge, how, and where results go.

Both the command line and the pytest gate build `RunOptions`. This module does not import JAX, since it is imported in
every pytest run.
"""

from __future__ import annotations

import dataclasses
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from conformance.session.failures import CannotJudge

_MAX_LIMIT = 1e9
"""In seconds or GiB. Larger limits are refused: they would limit nothing."""
_MAX_SEED = 2**64 - 1
_MAX_JOBS = 4096
"""More than any machine has cores. A larger number is a mistake, which would end in a lack of processes."""
# Options of the pytest gate that lack the gate's prefix `--conformance-`.
_UNPREFIXED = frozenset({"impl", "all", "require-platform"})
# Arguments of the Python calls that have other names than options.
_PYTHON_NAMES = {"check": "checks", "memory": "max_gib", "seed": "seeds"}
# The fields of `RunOptions` that say what to judge, by their names in a run record.
_QUERY = {
    "impl": "implementations",
    "all": "judge_all",
    "level": "level",
    "case": "case",
    "cases": "cases",
    "regressions": "regressions",
    "problem": "problem",
    "full_size": "full_size",
    "check": "checks",
    "pullback": "pullback",
    "seed": "seeds",
    "products": "products",
    "in_process": "in_process",
    "timeout": "timeout",
    "memory": "memory",
}
_FILES = ("report", "json", "markdown", "resume", "baseline")
# Fields of `RunOptions` that are no paths or names, and may be empty.
_TEXTS = ("command", "selection", "option_prefix")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one run. Building them raises `CannotJudge` unless they are valid.

    Attributes:
      implementations: names of implementations, or of groups in the settings.
      judge_all: whether every registered implementation is judged.
      use_listed: whether the implementations in the settings are judged if `implementations` is empty.
      level: the level of the run (`smoke`, `quick`, ...), which says how many cases are judged; None for `quick`.
      case: the id of the only case to judge.
      cases: a query that cases must match.
      regressions: whether the named regressions are judged in place of the grid.
      problem: the named problem whose cases are judged.
      full_size: whether the problem's cases have its original sizes, not smaller ones.
      checks: names of the only checks to run.
      pullback: the only call to differentiate, `plain` (without residuals) or `residuals`; None for both.
      seeds: base seeds of the grid; none for seed 0.
      products: the precision in which plain functions multiply f32 operands.
      timeout: seconds that one call of a kernel may take.
      memory: GiB that a kernel's process may take.
      in_process: whether kernels run in this process.
      sandbox_read: files and folders that a kernel may read besides those that every kernel may.
      sandbox_env: environment variables that a kernel gets besides those that every kernel gets.
      require_sandbox: whether kernels are refused if the sandbox is not complete on this machine.
      shard: the number of the part to judge, from 1, and the number of parts; None to judge all.
      jobs: the number of worker processes; None to choose it by the machine.
      cluster: address or scheduler file of the Dask cluster that judges; None to judge on this machine.
      fail_fast: whether the run stops at the first failure.
      confirm_seconds: seconds for cases that confirm findings; None for a share of the run's time.
      diagnose_seconds: seconds for a comparison with planted bugs; None for a share of the run's time.
      shrink: whether the smallest failing case of each finding is searched.
      require_platform: the platform on which something must be judged, otherwise the exit code is 2. Implementations
        that do not run natively there are left out. None for any platform.
      report: path of the HTML page to write.
      json: path of the file of records to write.
      markdown: path of the Markdown summary to write.
      resume: path of the file of records of a stopped run to continue.
      baseline: path of the file of records to compare with.
      command: the command line that repeats the run.
      query: the options that say what to judge, as the run record stores them; None to take them from this object.
      selection: an option of the caller that narrows the jobs further, as the user wrote it, such as `-k causal`.
      option_prefix: the first characters of the caller's option names in messages, such as `--`.
    """

    implementations: tuple[str, ...] = ()
    judge_all: bool = False
    use_listed: bool = False
    level: str | None = None
    case: str | None = None
    cases: str | None = None
    regressions: bool = False
    problem: str | None = None
    full_size: bool = False
    checks: tuple[str, ...] = ()
    pullback: Literal["plain", "residuals"] | None = None
    seeds: tuple[int, ...] = ()
    products: str | None = None
    timeout: float | None = None
    memory: float | None = None
    in_process: bool = False
    sandbox_read: tuple[str, ...] = ()
    sandbox_env: tuple[str, ...] = ()
    require_sandbox: bool = False
    shard: tuple[int, int] | None = None
    jobs: int | None = None
    cluster: str | None = None
    fail_fast: bool = False
    confirm_seconds: float | None = None
    diagnose_seconds: float | None = None
    shrink: bool = False
    require_platform: str | None = None
    report: str | None = None
    json: str | None = None
    markdown: str | None = None
    resume: str | None = None
    baseline: str | None = None
    command: str = ""
    query: Mapping[str, Any] | None = None
    selection: str = ""
    option_prefix: str = "--"

    def __post_init__(self) -> None:
        """Raise `CannotJudge` for values that no run can have, and for options that contradict each other."""
        options = {field: name for name, field in _QUERY.items()}
        if not self.option_prefix:  # a Python function judges what it is given, and takes its name
            options["implementations"] = "name"
        for field, value in vars(self).items():
            if field not in _TEXTS:
                reject_empty(self.spell(options.get(field, field)), value)
        self._reject_contradictions()
        reject_bad_job_count(self.jobs, self.spell("jobs"))
        for name in ("confirm_seconds", "diagnose_seconds"):
            reject_negative_seconds(self.spell(name), getattr(self, name))
        for seed in self.seeds:
            reject_bad_seed(seed, self.spell("seed"))
        reject_bad_limits(self.timeout, self.memory, in_process=self.in_process, option_prefix=self.option_prefix)

    def _reject_contradictions(self) -> None:
        impl, every, case, cases, level, seed, problem, regressions = map(
            self.spell, ("impl", "all", "case", "cases", "level", "seed", "problem", "regressions")
        )
        if self.judge_all and self.implementations:
            raise CannotJudge(f"{every} and {impl} contradict each other: give one of them")
        if not (self.judge_all or self.implementations or self.use_listed):
            raise CannotJudge(f"nothing to judge: give {impl}=NAME (see `python -m conformance list`) or {every}")
        if self.case is not None and (self.cases is not None or self.level or self.seeds):
            raise CannotJudge(
                f"{case} names one case, seed included: it cannot be combined with {cases}, {level} or {seed}"
            )
        if self.problem and (self.regressions or self.level or self.seeds):
            raise CannotJudge(f"{problem} names its cases: it cannot be combined with {regressions}, {level} or {seed}")
        if self.full_size and (not self.problem or self.case is not None):
            raise CannotJudge(
                f"{self.spell('full_size')} goes with {problem}: it selects the size of the problem's cases"
            )
        if self.cluster is not None and self.jobs is not None:
            raise CannotJudge(
                f"{self.spell('cluster')} and {self.spell('jobs')} contradict each other: the cluster has its own "
                "number of workers"
            )
        if self.pullback and self.case is None:
            raise CannotJudge(
                f"{self.spell('pullback')} goes with {case}: in a run of many cases, the judge chooses the call"
            )
        if self.regressions and (self.case is not None or self.cases is not None or self.level):
            raise CannotJudge(f"{regressions} names its cases: it cannot be combined with {case}, {cases} or {level}")

    def spell(self, name: str) -> str:
        """Return the name of an option as the user writes it: with a prefix, or in Python without one."""
        return _spell_option(name, self.option_prefix)

    @property
    def named_files(self) -> list[str]:
        """The files that the options name for results and earlier records. Sandboxes hide them from kernels."""
        return [path for name in _FILES if (path := getattr(self, name))]

    @property
    def is_one_case_or_problem(self) -> bool:
        """Whether the user named a case or a problem. Then findings are not confirmed by other cases."""
        return self.case is not None or bool(self.problem)

    @property
    def is_whole(self) -> bool:
        """Whether the run judges everything in its level. Only then are expected failures that did not occur stale."""
        return not (self.describe_narrowing() or self.level == "smoke" or self.seeds or self.shard)

    @property
    def recorded_level(self) -> str:
        """The level to write in the run record: the grid's level, or words for what is judged in place of a grid."""
        if self.case is not None:
            return "one case"
        if self.problem:
            return "a named problem"
        return "regressions" if self.regressions else self.level or "quick"

    @property
    def recorded_seeds(self) -> tuple[int, ...]:
        """The base seeds to write in the run record; empty if the user named the cases."""
        named = self.case is not None or self.regressions or self.problem
        return () if named else self.seeds or (0,)

    def describe_narrowing(self) -> str:
        """Return the options that leave out cases or checks of the level, as the user writes them; empty if none."""
        found = []
        if self.problem:
            size = f" {self.spell('full_size')}" if self.full_size else ""
            found.append(f"{self.spell('problem')}={self.problem}{size}")
        if self.case is not None:
            found.append("one case")
        elif self.regressions:
            found.append("the regressions")
        elif self.cases is not None:
            found.append(f"{self.spell('cases')}={shlex.quote(self.cases)}")
        found += [f"{self.spell('check')}={name}" for name in self.checks]
        if self.pullback:
            found.append(f"{self.spell('pullback')}={self.pullback}")
        return " ".join(filter(None, (*found, self.selection)))

    def build_query(self) -> dict[str, Any]:
        """Return the options that say what to judge, by the names that they have in a run record."""
        if self.query is not None:
            return dict(self.query)
        values = {name: getattr(self, field) for name, field in _QUERY.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def parse_query(query: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the query of a run record, which says what was judged, to values for fields of `RunOptions`."""
    values = {field: query[name] for name, field in _QUERY.items() if name in query}
    for name in ("timeout", "memory"):
        if values.get(name) is not None:
            values[name] = float(values[name])  # a file of records may have the text `inf` in place of a number
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def has_query(values: Mapping[str, Any]) -> bool:
    """Tell whether any of the given fields of `RunOptions` says what to judge."""
    return any(values.get(field) for field in _QUERY.values())


def parse_shard(text: str) -> tuple[int, int]:
    """Parse a shard such as `2/3` to the number of the part and the number of parts.

    Raises:
      ValueError: for any other text.
    """
    from reports.records import SHARD_PATTERN  # pytest imports this module before the names are claimed

    found = re.fullmatch(SHARD_PATTERN, text)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"{text!r} is no shard such as 2/3, of at most 9999 parts")
    return int(found[1]), int(found[2])


def draw_seeds(seeds: Sequence[int | None]) -> tuple[tuple[int, ...], list[str]]:
    """Draw a seed for each None, and return all seeds with a note that names the drawn ones."""
    drawn = tuple(seed if seed is not None else random.SystemRandom().getrandbits(32) for seed in seeds)
    named = ", ".join(str(seed) for seed, given in zip(drawn, seeds, strict=True) if given is None)
    return drawn, [f"--seed=random drew {named}: --seed={named} judges the same cases again"] if named else []


def _spell_option(name: str, prefix: str) -> str:
    """Return the name of an option as the user writes it: with a prefix, or in Python without one."""
    if not prefix:
        return _PYTHON_NAMES.get(name, name)
    words = name.replace("_", "-")
    return f"--{words}" if words in _UNPREFIXED else f"{prefix}{words}"


def reject_empty(option: str, value: Any) -> None:
    """Raise `CannotJudge` if a value is an empty text, or a list or tuple with one: no path and no name is empty."""
    if value == "" or (isinstance(value, list | tuple) and "" in value):
        raise CannotJudge(f"{option} must not be empty, got {value!r}")


def reject_negative_seconds(option: str, seconds: float | None) -> None:
    """Raise `CannotJudge` for a negative time; 0 is allowed."""
    if seconds is not None and not seconds >= 0:
        raise CannotJudge(f"{option} must not be negative, got {seconds:g}")


def reject_bad_seed(seed: int, option: str = "--seed") -> None:
    """Raise `CannotJudge` for a seed that no case can have."""
    if seed < 0:
        raise CannotJudge(f"{option} must not be negative, got {seed}")
    if seed > _MAX_SEED:
        raise CannotJudge(f"{option} must be less than 2**64, got {seed}")


def reject_bad_job_count(jobs: int | None, option: str = "--jobs") -> None:
    """Raise `CannotJudge` for a number of worker processes that no machine can have."""
    if jobs is not None and jobs < 1:
        raise CannotJudge(f"{option} must be at least 1, got {jobs}")
    if jobs is not None and jobs > _MAX_JOBS:
        raise CannotJudge(f"{option} must be at most {_MAX_JOBS}, got {jobs}")


def reject_bad_limits(timeout: float | None, memory: float | None, *, in_process: bool, option_prefix: str) -> None:
    """Raise `CannotJudge` for a limit in seconds or GiB that limits nothing."""
    for name, limit in (("timeout", timeout), ("memory", memory)):
        option = _spell_option(name, option_prefix)
        if limit is None:
            continue
        if in_process:
            raise CannotJudge(
                f"{option}={limit:g} limits only a process of the kernel's own: leave out {option} or "
                f"{_spell_option('in_process', option_prefix)}"
            )
        if not limit > 0:
            raise CannotJudge(f"{option} must be more than zero, got {limit:g}")
        if limit >= _MAX_LIMIT:
            raise CannotJudge(f"{option} must be a finite number below {_MAX_LIMIT:g}, got {limit:g}")
