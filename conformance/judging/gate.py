"""The gate as far as options and records say it: loaded in every pytest run, so it imports nothing heavy."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conformance import environment, packages
from conformance.fork_server import forked_process
from conformance.judging.run_levels import LEVELS
from conformance.output_files import PAGE, RECORDS, OutputRefused, check_output

if TYPE_CHECKING:
    from conformance.judging.job import Job
    from conformance.judging.run_plan import Plan
    from conformance.records import Record
    from conformance.runs import Run
    from conformance.sandbox.kernel_options import KernelOptions

_SAID = "attention-conformance-said"
# Options of pytest and of common plugins that leave out no test of a run that ends in success; ours are counted.
_CHOOSES_NOTHING = (
    *("--conformance-", "--impl", "--require-platform", "--pyargs", "-n", "--numprocesses", "--maxprocesses", "--dist"),
    *("-q", "--quiet", "-v", "--verbose", "-s", "--capture", "-r", "--show", "-l", "--tb", "--color", "--full-trace"),
    *("--durations", "--no-header", "--no-summary", "--junit", "--report-log", "--html", "--log", "--cov", "--timeout"),
    *("-p", "-c", "-o", "--override-ini", "-W", "--disable-warnings", "--strict", "--rootdir", "--noconftest"),
    *("--import-mode", "--basetemp", "--cache-clear", "-x", "--exitfirst", "--maxfail", "--pdb"),
)


def add_options(parser: pytest.Parser) -> None:
    """Options of the gate; all but `--impl` and `--require-platform` carry its name."""
    group = parser.getgroup("attention conformance")
    group.addoption(
        "--impl", action="append", default=[], metavar="NAME", help="judge this one, or this group; may be repeated"
    )
    group.addoption("--conformance-level", default="quick", choices=LEVELS, help="how much is judged (quick)")
    group.addoption("--conformance-cases", metavar="QUERY", help="only cases that match")
    group.addoption("--conformance-seed", type=int, default=0, metavar="N", help="base seed of the grid (0)")
    group.addoption(
        "--conformance-timeout", type=float, metavar="SECONDS", help="that one call of a kernel of yours may take (300)"
    )
    group.addoption(
        "--conformance-memory", type=float, metavar="GIB", help="that its process may take (half of the machine's)"
    )
    group.addoption(
        "--conformance-in-process", action="store_true", help="run it in the judge's process, for debugging"
    )
    group.addoption(
        "--conformance-sandbox-read",
        action="append",
        default=[],
        metavar="PATH",
        help="let a kernel of yours read this file or folder too",
    )
    group.addoption(
        "--conformance-sandbox-env",
        action="append",
        default=[],
        metavar="NAME",
        help="give a kernel of yours this environment variable too",
    )
    group.addoption(
        "--conformance-require-sandbox",
        action="store_true",
        help="judge nothing where the sandbox of a kernel of yours is not complete",
    )
    group.addoption("--conformance-shard", metavar="K/N", help="judge the Kth of N parts; `report` merges them")
    group.addoption(
        "--conformance-report", metavar="FILE.html", help="write the HTML report, and its records beside it"
    )
    group.addoption("--conformance-json", metavar="FILE", help="write the records here, as they come")
    group.addoption(
        "--conformance-resume",
        metavar="FILE",
        help="go on with this file of records: what is in it is not judged again",
    )
    group.addoption(
        "--conformance-baseline", metavar="FILE", help="compare with these records, and fail on a regression"
    )
    for name, what in (("confirm", "cases that confirm findings"), ("diagnose", "a comparison with planted bugs")):
        group.addoption(
            f"--conformance-{name}-seconds",
            type=float,
            metavar="N",
            help=f"for {what}, at the end of a run that is red (of a tenth of it both; 0 for none)",
        )
    group.addoption(
        "--require-platform", choices=("cpu", "gpu", "tpu"), help="fail if nothing was judged on this platform"
    )


def prepare(config: pytest.Config) -> None:
    """What comes before JAX is loaded, by a process that plans. Raises `pytest.UsageError`."""
    environment.prepare_environment()
    try:
        packages.claim_names()
    except packages.NameTaken as error:
        raise pytest.UsageError(str(error)) from error
    if (reason := environment.find_disabled_jit()) is not None:
        raise pytest.UsageError(reason)
    names = config.getoption("--impl") or _listed(config.rootpath)
    if any(":" in name for name in names) and not config.getoption("--conformance-in-process"):
        forked_process.start_server()  # beside this process, which loads the same


def _listed(root: Path) -> list[str]:
    """What a project lists to be judged, read without what judging needs."""
    try:
        table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["attention_conformance"]
        return [name for name in table["implementations"] if isinstance(name, str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # whoever judges is told what is wrong with it


def reminder(root: Path) -> list[str]:
    """What a plain run is told that did not judge what its project lists."""
    names = _listed(root)
    if not names:
        return []
    what = names[0] if len(names) == 1 else f"{len(names)} implementations"
    return [f"attention conformance: {what} of pyproject.toml not judged; `pytest --pyargs conformance` judges"]


def shard(text: str | None) -> tuple[int, int] | None:
    """The part that `2/3` names, and of how many. Raises `pytest.UsageError` for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--conformance-shard={text} is no part such as 2/3")
    return int(found[1]), int(found[2])


def reject_no_limits(config: pytest.Config) -> None:
    """Refuse limits of a kernel's process that nothing keeps. Raises `pytest.UsageError`."""
    for option in ("--conformance-timeout", "--conformance-memory"):
        if (given := config.getoption(option)) is not None and not given > 0:
            raise pytest.UsageError(f"{option} must be more than zero, got {given:g}")
        if given is not None and given >= 1e9:
            raise pytest.UsageError(f"{option} must be a finite number below 1e+09, got {given:g}")
    for option in ("--conformance-confirm-seconds", "--conformance-diagnose-seconds"):
        if (given := config.getoption(option)) is not None and not given >= 0:
            raise pytest.UsageError(f"{option} must not be negative, got {given:g}")


def seconds_beside(config: pytest.Config) -> list[float | None]:
    """Seconds for confirming and for diagnosis, none where the length of the run decides."""
    return [config.getoption(f"--conformance-{name}-seconds") for name in ("confirm", "diagnose")]


def kernels(config: pytest.Config) -> KernelOptions:
    """How kernels are found and where they run, by the options of the gate."""
    from conformance.sandbox.kernel_options import KernelOptions  # imported late: it loads JAX
    from conformance.sandbox.policy import build_policy

    option = config.getoption
    limits = option("--conformance-timeout"), option("--conformance-memory")
    said = tuple((name, text) for name, text in getattr(config, "workerinput", {}).get(_SAID, ()))
    written = ("--conformance-report", "--conformance-json", "--conformance-resume", "--conformance-baseline")
    try:
        policy = build_policy(
            option("--conformance-sandbox-read"),
            option("--conformance-sandbox-env"),
            [str(option(name)) for name in written if option(name)],
        )
    except ValueError as error:
        raise pytest.UsageError(f"--conformance-{error}") from error
    return KernelOptions(
        None,
        option("--conformance-in-process"),
        *limits,
        sandbox=policy,
        require_sandbox=option("--conformance-require-sandbox"),
        handshakes=said,
    )


def tell_worker(told: dict[str, object], planned: Plan) -> None:
    """Have a worker of pytest-xdist know what kernels said of themselves here: they must say the same there."""
    from conformance.sandbox.sandboxed_executor import collect_handshakes

    implementations = {job.implementation.name: job.implementation for job in planned.jobs}
    told[_SAID] = [list(one) for one in collect_handshakes(implementations.values())]


def reject_unwritable(option: str, place: Path, *, page: bool) -> None:
    """Refuse a file that cannot be written, the one of records beside a page too. Raises `pytest.UsageError`."""
    from conformance.records import make_printable

    if page and place.suffix == ".jsonl":
        raise pytest.UsageError(f"{option} is the file of records beside the page: give the page another suffix")
    for path, kind in ((place, PAGE), (place.with_suffix(".jsonl"), RECORDS)) if page else ((place, RECORDS),):
        try:
            check_output(path, kind)
        except OutputRefused as error:
            beside = f": {path.name} beside it" if path != place else ""
            raise pytest.UsageError(make_printable(f"{option}{beside} {error}")) from error


def properties(job: Job, found: Iterable[Record]) -> list[tuple[str, object]]:
    """What JUnit files say of a test."""
    counts = Counter(record.verdict for record in found)
    ratios = [record.ratio / record.limit for record in found if record.ratio is not None and record.limit]
    properties: list[tuple[str, object]] = [
        ("implementation", job.implementation.name),
        ("case", job.case.id),
        ("checks", ",".join(check.name for check in job.checks)),
        ("verdicts", ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))),
    ]
    return [*properties, ("largest_ratio_of_limit", f"{max(ratios):.3g}")] if ratios else properties


def suite_property(config: pytest.Config) -> Callable[[str, str], None] | None:
    """Adds a property to the suite of the JUnit file that this process writes; none if it writes none."""
    from _pytest.junitxml import xml_key  # pytest's own fixture for it, `record_testsuite_property`, finds it so

    xml = config.stash.get(xml_key, None)
    return None if xml is None else xml.add_global_property


def nothing_judged(found: list[Record], required: str | None) -> str:
    """What was to be judged and was not, as a sentence; a run of skips alone is no success."""
    from conformance.records import JUDGED

    judged = {record.platform for record in found if record.verdict in JUDGED}
    if required and required not in judged:
        return f"--require-platform={required}: nothing was judged there"
    if found and not judged:
        return "nothing was judged: every case is unsupported or unjudged"
    return ""


def not_asked(config: pytest.Config, planned: Plan | None, judged: Collection[int], found: Collection[Record]) -> str:
    """What is wrong where jobs were planned, and left out although no argument asked for that.

    Settings, a plugin or a `conftest.py` may have left out their tests, skipped them, or kept back what they found.
    """
    arguments = [str(argument) for argument in config.invocation_params.args]
    if planned is None or {"--collect-only", "--collectonly", "--co"} & set(arguments):
        return ""
    if not found:
        return "nothing was judged: no test was run (see addopts in the settings of pytest)"
    if any(map(_may_choose, arguments)):
        return ""
    from conformance.judging import run_plan

    part = shard(config.getoption("--conformance-shard"))
    mine = run_plan.select_shard(planned.jobs, *part) if part else planned.jobs
    missing = len(mine) - len(judged)
    if missing <= 0:
        return ""
    why = "no argument asks for that: see addopts in the settings of pytest, plugins and conftest.py"
    return f"{missing:,} of {len(mine):,} jobs were planned and not judged, and {why}"


def _may_choose(argument: str) -> bool:
    """Whether an argument may leave out tests; of an option that is not known here, nobody can say that it does not."""
    if not argument.startswith("-"):
        return "::" in argument
    return not argument.startswith(_CHOOSES_NOTHING)


def table(found: list[Record]) -> list[str]:
    """Counts of verdicts by implementation and platform, as aligned lines."""
    counts: dict[str, Counter[str]] = {}
    for record in found:
        counts.setdefault(f"{record.implementation} ({record.platform})", Counter())[record.verdict] += 1
    width = max(map(len, counts))
    return [
        f"{name:<{width}}  " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items()))
        for name, count in sorted(counts.items())
    ]


def places(run: Run) -> list[str]:
    """Where kernels ran that were neither ours nor confined in a process of their own, a line each."""
    return [f"{name} {kernel.place}" for name, kernel in run.kernels.items() if kernel.place]


def job_of(item: pytest.Item) -> Job | None:
    """The job that a test judges; none if it is no test of the gate."""
    callspec = getattr(item, "callspec", None)
    found: Job | None = callspec.params.get("conformance_job") if callspec is not None else None
    return found


def set_job(item: pytest.Item, job: Job) -> None:
    """Have a test of the gate judge this job."""
    item.callspec.params["conformance_job"] = job  # type: ignore[attr-defined] # as `job_of` has seen
