"""Define the options of a run, once for all ways in: command line, pytest, Python calls, and `--resume`.

Each field of `RunSpec` that users may give is an `option`. argparse and pytest are fed from these fields, and so are
the signatures of the Python calls, whose types stand in `SuiteOptions` and `CheckOptions`. Every pytest run loads this
module, so it imports neither JAX nor packages of everyday names (`conformance.packages`).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import random
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from conformance.judging.run_levels import LEVELS
from conformance.session.failures import CannotJudge

_Function = TypeVar("_Function", bound=Callable[..., Any])

WHAT = "what to judge"
DECLARED = "what a plain function declares"
WHERE = "where your own kernel runs: in a separate process, in a sandbox"
OUTPUT = "output"
HOW = "how to run"
GROUPS = (WHAT, DECLARED, WHERE, OUTPUT, HOW)
"""The headings of help, in their order."""
_MAX_LIMIT = 1e9
"""In seconds or GiB. Larger limits are refused: they would limit nothing."""
_MAX_SEED = 2**64 - 1
_MAX_JOBS = 4096
"""More than any machine has cores. A larger number is a mistake, which would end in a lack of processes."""
_SHARD = re.compile(r"([1-9]\d{0,3})/([1-9]\d{0,3})")
_FILES = ("report", "json", "markdown", "resume", "baseline")


class InvalidValue(argparse.ArgumentTypeError, ValueError):
    """Raised for text that is no value of an option."""


def parse_seed(text: str) -> int | None:
    """Parse a base seed; None stands for `random`. Raises `InvalidValue`."""
    try:
        return None if text == "random" else int(text)
    except ValueError:
        raise InvalidValue(f"must be a whole number or random, got {text!r}") from None


def parse_shard(text: str) -> tuple[int, int]:
    """Parse a shard such as `2/3` to the number of the part and the number of parts. Raises `InvalidValue`."""
    found = _SHARD.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise InvalidValue(f"{text!r} is no shard such as 2/3, of at most 9999 parts")
    return int(found[1]), int(found[2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """How users give a field of `RunSpec`.

    Attributes:
      group: the heading under which help lists it.
      help: what it does, for every way in.
      name: its name on the command line; the field's name if left out.
      pytest: whether pytest has it, with the prefix `--conformance-`.
      metavar: stands for the value in help.
      choices: the only values.
      parse: converts the text of the command line.
      implied: what the default None stands for.
      narrows: how the report of a run says that it leaves out cases or checks; empty if it leaves out none.
      resumed: whether `--resume` takes it from the file of the earlier run, whose run record has it.
      python: its name in Python calls; the field's name if left out.
      field: the name of the field.
      default: the default of the field.
    """

    group: str
    help: str
    name: str = ""
    pytest: bool = False
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    parse: Callable[[str], Any] | None = None
    implied: Any = None
    narrows: str = ""
    resumed: bool = False
    python: str = ""
    field: str = ""
    default: Any = None

    @property
    def key(self) -> str:
        """The name of the option in parsed arguments and in run records."""
        return self.name.replace("-", "_")

    @property
    def is_repeated(self) -> bool:
        """Whether the command line takes it several times, and a Python call a collection."""
        return self.default == ()

    def describe_argument(self) -> dict[str, Any]:
        """Return the keyword arguments of argparse's `add_argument`, which are those of pytest's `addoption` too."""
        if self.default is False:
            return {"action": "store_true", "help": self.help}
        found: dict[str, Any] = {"metavar": self.metavar, "choices": self.choices, "type": self.parse}
        if self.is_repeated:
            return found | {"action": "append", "default": [], "help": f"{self.help}; may be repeated"}
        return found | {"help": self.help}


def option(default: Any, group: str, text: str, **others: Any) -> Any:
    """Return a field of `RunSpec` that users may give. `others` are attributes of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(group=group, help=text, **others)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What one run judges, how, and where its results go. Building it raises `CannotJudge` unless it is valid.

    Attributes:
      use_listed: whether the implementations in the settings are judged if `implementations` is empty.
      command: the command line that repeats the run.
      query: the options that say what to judge, as the run record stores them; None to take them from this object.
      selection: an option of the caller that narrows the jobs further, as the user wrote it, such as `-k causal`.
      option_prefix: the first characters of the caller's option names in messages, such as `--`.
    """

    implementations: tuple[str, ...] = option(
        (),
        WHAT,
        "a registered name (see `list`), module:attribute, file.py:attribute or a group",
        name="impl",
        metavar="NAME",
        pytest=True,
        resumed=True,
        python="name",  # under which a call judges its function
    )
    judge_all: bool = option(False, WHAT, "every registered implementation", name="all", resumed=True)
    level: str | None = option(
        None,
        WHAT,
        "smoke: what tells most (about 20 s of processor time); quick, the default: every pair of levels (100 s); "
        "standard: every triple (10 min); deep: every quadruple",
        choices=LEVELS,
        implied="quick",
        pytest=True,
        resumed=True,
    )
    problem: str | None = option(
        None,
        WHAT,
        "the cases of a named problem, whose operands --impl takes (see `list problems`)",
        metavar="NAME",
        narrows="{option}={value}",
        resumed=True,
    )
    full_size: bool = option(
        False, WHAT, "with --problem: at the problem's original, unreduced sizes", narrows="{option}", resumed=True
    )
    case: str | None = option(None, WHAT, "one case by its id", metavar="ID", narrows="one case", resumed=True)
    cases: str | None = option(
        None,
        WHAT,
        "only cases whose id matches: its first components; * is a wildcard",
        metavar="QUERY",
        pytest=True,
        narrows="{option}={quoted}",
        resumed=True,
    )
    regressions: bool = option(
        False,
        WHAT,
        "the named regressions instead of the grid (see `list regressions`)",
        narrows="the regressions",
        resumed=True,
    )
    checks: tuple[str, ...] = option(
        (),
        WHAT,
        "only this check (see `list checks`)",
        name="check",
        metavar="NAME",
        narrows="{option}={value}",
        resumed=True,
    )
    branches: tuple[str, ...] = option(
        (),
        WHAT,
        "search the branches of this imported package too, besides those in the folder of the kernel",
        metavar="PACKAGE",
        pytest=True,
        resumed=True,
    )
    pullback: Literal["plain", "residuals"] | None = option(
        None,
        WHAT,
        "with one case: differentiate only this call, without or with residuals (both)",
        choices=("plain", "residuals"),
        narrows="{option}={value}",
        resumed=True,
    )
    seeds: tuple[int, ...] = option(
        (),
        WHAT,
        "base seed of the grid (0)",
        name="seed",
        metavar="N",
        parse=parse_seed,
        pytest=True,
        resumed=True,
    )
    products: Literal["exact", "tf32", "bf16"] | None = option(
        None,
        DECLARED,
        "how a plain function multiplies f32 operands (exact)",
        choices=("exact", "tf32", "bf16"),
        resumed=True,
    )
    timeout: float | None = option(
        None, WHERE, "seconds that one call may take (300)", metavar="SECONDS", parse=float, pytest=True, resumed=True
    )
    memory: float | None = option(
        None,
        WHERE,
        "GiB that its process may take (half of the machine's)",
        metavar="GIB",
        parse=float,
        pytest=True,
        resumed=True,
        python="max_gib",  # `memory` is a declaration
    )
    in_process: bool = option(False, WHERE, "run it in the judge's process, for debugging", pytest=True, resumed=True)
    sandbox_read: tuple[str, ...] = option(
        (), WHERE, "let the kernel read this file or folder too", metavar="PATH", pytest=True
    )
    sandbox_env: tuple[str, ...] = option(
        (), WHERE, "give the kernel this environment variable too", metavar="NAME", pytest=True
    )
    require_sandbox: bool = option(
        False, WHERE, "judge nothing (exit code 2) if the sandbox is not complete", pytest=True
    )
    report: str | None = option(
        None, OUTPUT, "write the page here, and its records beside it (.jsonl)", metavar="FILE.html", pytest=True
    )
    json: str | None = option(
        None, OUTPUT, "write the records here, one JSON object a line", metavar="FILE", pytest=True
    )
    markdown: str | None = option(None, OUTPUT, "write a short summary for CI here", metavar="FILE")
    baseline: str | None = option(
        None,
        OUTPUT,
        "compare with this earlier run, and exit with 1 on a regression",
        metavar="FILE.jsonl",
        pytest=True,
    )
    jobs: int | None = option(
        None, HOW, "worker processes (one a core on CPU, up to 8 on a GPU, 1 on TPUs)", metavar="N", parse=int
    )
    cluster: str | None = option(
        None,
        HOW,
        "judge on the workers of this Dask cluster: tcp://HOST:PORT, or its scheduler file "
        "(see docs/how-to/cluster.md)",
        metavar="ADDRESS",
    )
    shard: tuple[int, int] | None = option(
        None, HOW, "judge the Kth of N parts; `report` merges the parts", metavar="K/N", parse=parse_shard, pytest=True
    )
    resume: str | None = option(
        None, HOW, "continue the stopped run in this file, which says what to judge", metavar="FILE.jsonl", pytest=True
    )
    confirm_seconds: float | None = option(
        None,
        HOW,
        "time to confirm findings and try declarations (part of 15 s, or of a tenth of a longer run; 0 for none)",
        metavar="N",
        parse=float,
        pytest=True,
    )
    diagnose_seconds: float | None = option(
        None,
        HOW,
        "time to compare each finding with planted bugs (the rest of that time; 0 for none)",
        metavar="N",
        parse=float,
        pytest=True,
    )
    shrink: bool = option(False, HOW, "then search for the smallest case of each finding, a minute each at most")
    fail_fast: bool = option(False, HOW, "stop at the first failure; every check judges a case early")
    keep_going: bool = option(
        False, HOW, "judge all cases also of a kernel whose call comes right in no kind of case", pytest=True
    )
    require_platform: str | None = option(
        None,
        HOW,
        "judge only what runs natively on this platform; exit with 2 if nothing does",
        choices=("cpu", "gpu", "tpu"),
        pytest=True,
    )
    use_listed: bool = False
    command: str = ""
    query: Mapping[str, Any] | None = None
    selection: str = ""
    option_prefix: str = "--"

    def __post_init__(self) -> None:
        """Raise `CannotJudge` for values that no run can have, and for options that contradict each other."""
        for field in OPTIONS:
            reject_empty(self.spell(field), getattr(self, field))
        self._reject_contradictions()
        self._reject_bad_limits()
        reject_bad_job_count(self.jobs, self.spell("jobs"))
        for name in ("confirm_seconds", "diagnose_seconds"):
            reject_negative_seconds(self.spell(name), getattr(self, name))
        for seed in self.seeds:
            reject_bad_seed(seed, self.spell("seeds"))

    def _reject_contradictions(self) -> None:
        spelled = {field: self.spell(field) for field in OPTIONS}
        impl, every, case, cases, level = map(
            spelled.__getitem__, ("implementations", "judge_all", "case", "cases", "level")
        )
        seed, problem, regressions = map(spelled.__getitem__, ("seeds", "problem", "regressions"))
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

    def _reject_bad_limits(self) -> None:
        """Raise `CannotJudge` for a limit in seconds or GiB that limits nothing."""
        for field in ("timeout", "memory"):
            name, limit = self.spell(field), getattr(self, field)
            if limit is None:
                continue
            if self.in_process:
                raise CannotJudge(
                    f"{name}={limit:g} limits only a process of the kernel's own: leave out {name} or "
                    f"{self.spell('in_process')}"
                )
            if not limit > 0:
                raise CannotJudge(f"{name} must be more than zero, got {limit:g}")
            if limit >= _MAX_LIMIT:
                raise CannotJudge(f"{name} must be a finite number below {_MAX_LIMIT:g}, got {limit:g}")

    def spell(self, field: str) -> str:
        """Return the option of a field as the user writes it: with a prefix, or in Python the name of the field."""
        if self.option_prefix:
            return f"{self.option_prefix}{OPTIONS[field].name}"
        return OPTIONS[field].python

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
    def may_end_early(self) -> bool:
        """Whether the run of a kernel ends early if its first cases show that no call comes right.

        Cases that the user selected may all have the property to which an error belongs, so they are all judged.
        """
        is_selected = self.is_one_case_or_problem or self.cases is not None or self.regressions or self.selection
        return not (self.keep_going or is_selected)

    @property
    def chosen_level(self) -> str:
        """The level of the run, also where the user gave none."""
        return self.level or OPTIONS["level"].implied

    @property
    def recorded_level(self) -> str:
        """The level to write in the run record: the grid's level, or words for what is judged in place of a grid."""
        if self.case is not None:
            return "one case"
        if self.problem:
            return "a named problem"
        return "regressions" if self.regressions else self.chosen_level

    @property
    def recorded_seeds(self) -> tuple[int, ...]:
        """The base seeds to write in the run record; empty if the user named the cases."""
        named = self.case is not None or self.regressions or self.problem
        return () if named else self.seeds or (0,)

    def describe_narrowing(self) -> str:
        """Return the options that leave out cases or checks of the level, as the user writes them; empty if none."""
        found = []
        for field, each in OPTIONS.items():
            given = getattr(self, field)
            if given == each.default or not each.narrows:
                continue
            for value in given if each.is_repeated else (given,):
                quoted = shlex.quote(str(value))
                found.append(each.narrows.format(option=self.spell(field), value=value, quoted=quoted))
        return " ".join(filter(None, (*found, self.selection)))

    def build_query(self) -> dict[str, Any]:
        """Return the options that say what to judge, by the names that they have in a run record."""
        if self.query is not None:
            return dict(self.query)
        values = {each.key: getattr(self, field) for field, each in OPTIONS.items() if each.resumed}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


OPTIONS: Mapping[str, Option] = {
    each.name: dataclasses.replace(
        found,
        field=each.name,
        name=found.name or each.name.replace("_", "-"),
        python=found.python or each.name,
        default=each.default,
    )
    for each in dataclasses.fields(RunSpec)
    if (found := each.metadata.get("option")) is not None
}
"""The options of a run, by the names of their fields."""


class SuiteOptions(TypedDict, total=False):
    """The options that `conformance_tests` takes; `check` takes them too."""

    level: Literal["smoke", "quick", "standard", "deep"]
    cases: str | None
    checks: str | Collection[str]
    seeds: int | Sequence[int]


class CheckOptions(SuiteOptions, total=False):
    """The options that `check` and `assert_conforms` take."""

    case: str | None
    pullback: Literal["plain", "residuals"] | None
    timeout: float | None
    max_gib: float | None
    report: str | os.PathLike[str] | None
    json: str | os.PathLike[str] | None
    confirm_seconds: float | None
    diagnose_seconds: float | None
    fail_fast: bool
    keep_going: bool


def add_option(group: argparse._ActionsContainer, field: str, **changes: Any) -> None:
    """Add an option to a command, which may change arguments of `add_argument`."""
    group.add_argument(f"--{OPTIONS[field].name}", **(OPTIONS[field].describe_argument() | changes))


def add_options(
    parser: argparse.ArgumentParser, groups: Collection[str] = GROUPS, **changes: Mapping[str, Any]
) -> None:
    """Add the options of these groups to a command, which may change arguments of `add_argument`, by field."""
    for title in groups:
        group = parser.add_argument_group(title)
        for each in OPTIONS.values():
            if each.group == title:
                add_option(group, each.field, **changes.get(each.field, {}))


def list_options(kinds: type) -> Callable[[_Function], _Function]:
    """Decorate a Python call so that `help` lists each option that its `**options` takes.

    Args:
      kinds: the `TypedDict` of these options.
    """

    def decorate(function: _Function) -> _Function:
        hints, signature = kinds.__annotations__, inspect.signature(function)
        taken = [each for each in OPTIONS.values() if each.python in hints]
        *named, rest = signature.parameters.values()
        added = [
            inspect.Parameter(
                each.python,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default if each.implied is None else each.implied,
                annotation=hints[each.python].__forward_arg__,  # as text, as all others are
            )
            for each in taken
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *added, rest])
        lines = "\n".join(
            textwrap.fill(
                f"{each.python}: {each.help}{', or several' if each.is_repeated else ''}.",
                width=116,
                initial_indent=" " * 6,
                subsequent_indent=" " * 8,
            )
            for each in taken
        )
        function.__doc__ = (function.__doc__ or "").replace("      **options:", f"{lines}\n      **options:", 1)
        return function

    return decorate


def build_spec(given: Mapping[str, Any], **others: Any) -> RunSpec:
    """Build a spec from options by their keys, as in parsed arguments. Raises `CannotJudge`.

    Args:
      given: the options. What is no option is ignored.
      **others: fields that are no options.
    """
    found = {field: given[each.key] for field, each in OPTIONS.items() if each.key in given}
    found = {field: tuple(value) if isinstance(value, list) else value for field, value in found.items()}
    return RunSpec(**(found | others))


def read_query(query: Mapping[str, Any], shard: str) -> dict[str, Any]:
    """Return the options of an earlier run that say what to judge, by their keys.

    Args:
      query: the query of its run record.
      shard: the shard in its run record; empty if it judged all.
    """
    found = {each.key: query[each.key] for each in OPTIONS.values() if each.resumed and each.key in query}
    for each in OPTIONS.values():
        if each.parse is float and found.get(each.key) is not None:
            found[each.key] = float(found[each.key])  # a file may have the text `inf` in place of a number
    return found | {"shard": parse_shard(shard) if shard else None}


def says_what_to_judge(given: Mapping[str, Any]) -> bool:
    """Tell whether any of these options, by their keys, is one that `--resume` would take from its file."""
    return any(given.get(each.key) for each in OPTIONS.values() if each.resumed)


def draw_seeds(seeds: Sequence[int | None], option: str = "--seed") -> tuple[list[int], list[str]]:
    """Draw a seed for each None, and return all seeds with a note that names the drawn ones."""
    drawn = [seed if seed is not None else random.SystemRandom().getrandbits(32) for seed in seeds]
    named = ", ".join(str(seed) for seed, given in zip(drawn, seeds, strict=True) if given is None)
    return drawn, [f"{option}=random drew {named}: {option}={named} judges the same cases again"] if named else []


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
