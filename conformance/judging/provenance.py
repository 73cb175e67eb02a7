"""Collect the provenance of a run's records: versions, sources, declarations and limits.

`build_run` puts them into the run record, the first line of a file of records. Records of different provenance are
never merged.
"""

from __future__ import annotations

import datetime
import functools
import secrets
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import environment
from conformance.execution import implementation_registry, source_digests
from conformance.judging.block_coverage import find_block_lengths
from conformance.judging.declarations import list_declarations
from conformance.judging.run_plan import Plan
from conformance.sandbox import declaration_codec
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.sandboxed_executor import create_executor
from conformance.truth import tolerances
from impls.contract.implementation import Implementation
from reports.records import OWN_PROCESS, Kernel, PlannedJob, Query, Run

_PROJECT_FOLDER = Path(__file__).resolve().parent.parent.parent
_PACKAGES = ("cases", "conformance", "impls", "reports")
# Fields of `Implementation` that decide nothing about how it is judged, or that others imply.
_WITHOUT_EFFECT = ("name", "description", "storage", "writes_pages")


def build_run(
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
    kernels: KernelOptions | None = None,
) -> Run:
    """Build the run record of a run that begins now.

    Args:
      limits: the limits in force, one table row for each dtype and observable.
      seeds: the base seeds of the cases.
      narrowed: the options that narrow the plan of the level, as the user wrote them; empty if none does.
      query: the options that say what to judge, by name.
      shard: `2/3` for the second of three shards; empty for a run without shards.
      kernels: the options by which kernels are found and run.
    """
    table = tuple(limits)
    return Run(
        id=secrets.token_hex(4),
        started=format_current_time(),
        command=command,
        level=level,
        seeds=tuple(seeds),
        narrowed=narrowed,
        query=Query(**(query or {})),
        shard=shard,
        environment=environment.describe_environment() | describe_project(),
        tolerances=table,
        kernels={
            implementation.name: _describe_kernel(
                implementation, planned, kernels or KernelOptions(), _list_raised_limits(table)
            )
            for implementation in implementations
        },
        jobs=tuple(
            PlannedJob(
                job.implementation.name,
                job.case.id,
                tuple(check.name for check in job.checks),
                planned.find_rows(job),
            )
            for job in planned.jobs
        ),
        whole=dict(planned.whole),
        resumed=(),
    )


def format_current_time() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@functools.cache
def describe_project() -> dict[str, str]:
    """Return the commit of this project, where it runs from a clone, and a digest of its source."""
    modules = [path for name in _PACKAGES for path in sorted((_PROJECT_FOLDER / name).rglob("*.py"))]
    return {"commit": _find_commit(), "source of attention-conformance": source_digests.compute_digest(modules)}


def _find_commit() -> str:
    """Return the commit of this project, or `unknown`."""
    if not (_PROJECT_FOLDER / ".git").exists():
        return "unknown"
    try:
        command = [
            "git",
            "-C",
            str(_PROJECT_FOLDER),
            "describe",
            "--always",
            "--dirty",
            "--abbrev=12",
            "--match=",
            "--exclude=*",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _list_raised_limits(limits: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Format the limits that are larger than the default ones, so they ask less of a kernel."""
    default_limits = {
        (row["dtype"], row["observable"]): row["limit"] for row in tolerances.load_default_tolerances().rows()
    }
    larger = (row for row in limits if row["limit"] > default_limits.get((row["dtype"], row["observable"]), 0.0))
    return tuple(f"limit of {row['dtype']}.{row['observable']} {row['limit']:g}" for row in larger)


def _describe_kernel(
    implementation: Implementation, planned: Plan, kernels: KernelOptions, raised: tuple[str, ...]
) -> Kernel:
    """Collect the facts that a run record has about one implementation."""
    package, source = source_digests.describe_source(implementation.name)
    arrays = planned.arrays.get(implementation.name)
    cases = [job.case for job in planned.jobs if job.implementation.name == implementation.name and job.is_on_grid]
    return Kernel(
        package=package,
        source=source,
        declared=_collect_declarations(implementation),
        asks_less=(*list_declarations(implementation), *raised),
        unasked=implementation.unasked,
        open_questions=implementation.open_questions,
        block_lengths=tuple(find_block_lengths(implementation, cases)),
        arrays=arrays.arrays if arrays is not None else (),
        declined=arrays.declined if arrays is not None else 0,
        parted=arrays.parted if arrays is not None else (0, 0),
        place=_describe_place(implementation, kernels),
        files=dict(create_executor(implementation).files),
    )


def _describe_place(implementation: Implementation, kernels: KernelOptions) -> str:
    """Say where a kernel runs if it is not confined; empty for a confined kernel and for built-in ones."""
    if kernels.in_process and not implementation_registry.is_builtin(implementation.name):
        return "ran in the judge's own process, which it could alter"
    isolation = create_executor(implementation).isolation
    return "" if isolation in ("", "confined") else f"{OWN_PROCESS}{isolation}"


def _collect_declarations(implementation: Implementation) -> dict[str, Any]:
    """Collect the declarations of the implementation, as plain data."""
    declared = declaration_codec.serialize_declarations(implementation)
    accelerator = {name: declared["accelerator"][name] for name in ("platform", "interpreted", "absent")}
    return {name: value for name, value in declared.items() if name not in _WITHOUT_EFFECT} | {
        "supports_case": implementation.supports_case is not None,
        "tunable": implementation.tunable is not None,
        "variants": sorted(implementation.variants),
        "accelerator": accelerator,
    }
