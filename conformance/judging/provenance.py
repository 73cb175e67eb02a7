"""Where records come from: the versions, the sources and the declarations that a run is recorded with."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import secrets
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from conformance import environment
from conformance.apart.executor import executor_of
from conformance.apart.kernels import Kernels
from conformance.calling import registry
from conformance.contract import Implementation
from conformance.judging.declarations import declared
from conformance.judging.plan import Plan
from conformance.judging.reach import usual_lengths
from conformance.runs import Kernel, Planned, Run
from conformance.truth import tolerances

_HOME = Path(__file__).resolve().parent.parent.parent
_OURS = ("cases", "conformance", "impls", "reports")
_DIGITS = 12  # of a digest: enough to tell sources apart
_LARGEST = 2**26  # bytes of a file that a digest is of: what is larger is weights, and no source
# Fields of an implementation that are data, and say what is asked of it.
_DECLARED = (
    "unsupported",
    "offers",
    "arithmetic",
    "residuals",
    "differentiable_residuals",
    "gradients",
    "empty_rows",
    "behind_mask",
    "validates",
    "memory",
    "checkpoint_names",
    "refuses_by_signature",
    "devices",
)
# Fields that are functions: whether they are there says what is asked.
_OFFERED = ("parts", "merge", "front_end", "supports_case", "tunable")


def recorded_run(
    implementations: Sequence[Implementation],
    planned: Plan,
    *,
    command: str,
    level: str,
    limits: Iterable[Mapping[str, Any]],
    seeds: Sequence[int] = (),
    narrowed: str = "",
    query: Mapping[str, Any] | None = None,
    shard: str = "",
    kernels: Kernels | None = None,
) -> Run:
    """What holds for the records of a run that begins now."""
    table = tuple(limits)
    return Run(
        id=secrets.token_hex(4),
        started=now(),
        command=command,
        level=level,
        seeds=tuple(seeds),
        narrowed=narrowed,
        query=query or {},
        shard=shard,
        environment=environment.describe() | project(),
        tolerances=table,
        kernels={
            implementation.name: _kernel(implementation, planned, kernels or Kernels(), _raised(table))
            for implementation in implementations
        },
        jobs=tuple(
            Planned(
                job.implementation.name,
                job.case.id,
                tuple(check.name for check in job.checks),
                planned.rows_of(job),
            )
            for job in planned.jobs
        ),
        whole=dict(planned.whole),
    )


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@functools.cache
def project() -> dict[str, str]:
    """The commit of this project, where it is run from a clone, and a digest of its source."""
    modules = [path for name in _OURS for path in sorted((_HOME / name).rglob("*.py"))]
    return {"commit": _commit(), "source of attention-conformance": _digest(modules)}


def _commit() -> str:
    if not (_HOME / ".git").exists():
        return "unknown"
    try:
        asked = ["git", "-C", str(_HOME), "describe", "--always", "--dirty", "--abbrev=12", "--match=", "--exclude=*"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _raised(limits: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The limits that are larger than ours: whoever is judged by them has less asked of it."""
    ours = {(row["dtype"], row["observable"]): row["limit"] for row in tolerances.default().rows()}
    larger = (row for row in limits if row["limit"] > ours.get((row["dtype"], row["observable"]), 0.0))
    return tuple(f"limit of {row['dtype']}.{row['observable']} {row['limit']:g}" for row in larger)


def _kernel(implementation: Implementation, planned: Plan, kernels: Kernels, raised: tuple[str, ...]) -> Kernel:
    package, source = _origin(implementation.name)
    arrays = planned.arrays.get(implementation.name)
    cases = [job.case for job in planned.jobs if job.implementation.name == implementation.name and job.on_grid]
    return Kernel(
        package=package,
        source=source,
        declared=_declared(implementation),
        asks_less=(*declared(implementation), *raised),
        block_lengths=tuple(usual_lengths(implementation, cases)),
        arrays=arrays.arrays if arrays is not None else (),
        declined=arrays.declined if arrays is not None else 0,
        parted=arrays.parted if arrays is not None else (0, 0),
        place=_place(implementation, kernels),
    )


def _place(implementation: Implementation, kernels: Kernels) -> str:
    if kernels.in_process and not registry.is_ours(implementation.name):
        return "ran in the judge's own process (--in-process), which it could alter"
    isolation = executor_of(implementation).isolation
    return "" if isolation in ("", "confined") else f"ran in a process of its own that was {isolation}"


def _declared(implementation: Implementation) -> dict[str, Any]:
    found: dict[str, Any] = {name: _data(getattr(implementation, name)) for name in _DECLARED}
    found |= {name: getattr(implementation, name) is not None for name in _OFFERED}
    accelerator = implementation.accelerator
    place = {"platform": accelerator.platform, "interpreted": accelerator.interpreted, "absent": accelerator.absent}
    return found | {"variants": sorted(implementation.variants), "accelerator": place}


def _data(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {name: value[name] for name in sorted(value)}
    return list(value) if isinstance(value, tuple) else value


def _origin(name: str) -> tuple[str, str]:
    """The package that has an implementation, with its version, and a digest of its source where that is no package.

    Nothing is imported for it: modules are looked up as Python would.
    """
    if (point := registry.entry_point(name)) is not None:
        dist = point.dist
        return (f"{dist.name} {dist.version}" if dist is not None else ""), _digest(_modules(point.module))
    if ":" not in name:
        return "", ""  # ours: the project's own version and digest say it
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return "", _digest(_with_neighbours(Path(place)))
    return _installed(place), _digest(_modules(place))


def _with_neighbours(file: Path) -> list[Path]:
    """A file and what lies beside it that it imports, or names in a text as what it loads, directly or not."""
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        if (path := waiting.pop()) in found or not _is_file(path):
            continue
        found[path] = None
        imported, texts = _named(path) if path.suffix == ".py" else (set(), set())
        for name in sorted(imported):
            waiting += [file.parent / f"{name}.py", *sorted((file.parent / name).rglob("*.py"))]
        waiting += [file.parent / text for text in sorted(texts)]
    return list(found)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= _LARGEST
    except (OSError, ValueError):  # a text that is no path
        return False


def _named(file: Path) -> tuple[set[str], set[str]]:
    """The modules that a file imports, and its texts that may name files beside it."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):
        return set(), set()
    modules = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    beside = {text for text in texts if text and not text.startswith(("/", "."))}
    return {module.partition(".")[0] for module in modules}, beside | {f"{text}.py" for text in beside}


@functools.cache
def _installed(module: str) -> str:
    names = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in dict.fromkeys(names))


@functools.cache
def _modules(module: str) -> tuple[Path, ...]:
    """The files of the package that a module is in; none of one that is installed, whose version is known."""
    top = module.partition(".")[0]
    spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    if spec is None:
        return ()
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))] or [Path(spec.origin or "")]
    libraries = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}
    return () if libraries & set(files[0].resolve().parents) else tuple(files)


def _digest(files: Iterable[Path]) -> str:
    """A digest of files, empty if there are none that can be read."""
    found = hashlib.sha256()
    count = 0
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            continue
        count += 1
        found.update(f"{file.name} {len(content)} ".encode() + content)
    return found.hexdigest()[:_DIGITS] if count else ""
