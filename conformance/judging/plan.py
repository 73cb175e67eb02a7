"""What a run judges: jobs, each one implementation on one case under some checks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from cases.accelerator import compiled_cases, interpreted_cases
from cases.case import Case, matches
from cases.decoding import decoded_cases
from cases.front_end_cases import front_end_cases
from cases.grid import Supports, grid
from cases.regressions import REGRESSIONS
from conformance.accelerators.targets import targets_of
from conformance.checks import CHECKS, Check
from conformance.checks.turn import EVERYTHING, Turn
from conformance.contract import Implementation
from conformance.judging.turns import taken

# (T, S, N, K, mask) of the ensemble check, the first that is supported. Eight blocks of 64 keys, and a group of eight
# query heads, show a sum that is rounded at every step; a flat softmax with no mask keeps all its terms comparable.
# Then what an implementation may be limited to: a larger share of key/value heads, T = S, a causal mask.
_ENSEMBLE = (
    (128, 512, 8, 1, "full"),
    (128, 512, 8, 2, "full"),
    (128, 512, 2, 2, "full"),
    (512, 512, 2, 2, "full"),
    (512, 512, 2, 1, "causal"),
    (512, 512, 2, 2, "causal"),
    (512, 512, 2, 2, "moba-64-8"),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One implementation on one case under some checks, which share compiled functions and expectations."""

    implementation: Implementation
    case: Case
    checks: tuple[Check, ...]
    turn: Turn = EVERYTHING

    @property
    def on_grid(self) -> bool:
        """Whether it is a case of the covering grid under the checks that are asked of each."""
        return {check.scope for check in self.checks} == {"grid"}

    @property
    def short(self) -> bool:
        """Whether it is few programs."""
        return {check.scope for check in self.checks} <= {"grid", "declined", "feature"}

    @property
    def id(self) -> str:
        """`implementation-case`, with the checks where they are not those of the grid."""
        extra = "" if self.on_grid else "-".join(check.name for check in self.checks) + "-"
        return f"{self.implementation.name}-{extra}{self.case.id}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The jobs of a run, and the coverage of its grids."""

    jobs: tuple[Job, ...]
    coverage: tuple[dict[str, Any], ...]


def plan(
    implementations: Sequence[Implementation],
    *,
    level: str,
    seeds: Sequence[int] = (0,),
    query: str | None = None,
    checks: Iterable[Check] = CHECKS,
) -> Plan:
    """The jobs that judge `implementations` at `level`.

    Args:
      implementations: what to judge.
      level: `quick`, `standard` or `deep`.
      seeds: base seeds; the grid is judged once for each.
      query: only cases that it matches.
      checks: only these checks.
    """
    chosen = tuple(checks)
    jobs: list[Job] = []
    coverage = []
    for implementation in implementations:
        made = [_jobs(implementation, level, seed, chosen, first=seed == seeds[0]) for seed in seeds]
        coverage.append(made[0][1])
        # The same row with every seed in turn: cases that differ only in values share compiled functions.
        rows = itertools.zip_longest(*(row for row, _ in made))
        jobs += [job for row in rows for job in row if job and (query is None or matches(query, job.case.id))]
    return Plan(tuple(jobs), tuple(coverage))


def _jobs(
    implementation: Implementation, level: str, seed: int, checks: tuple[Check, ...], *, first: bool
) -> tuple[list[Job], dict[str, Any]]:
    found = grid(level, seed, implementation.supports)
    by_scope = {
        "grid": found.cases if level == "quick" else tuple(dict.fromkeys((*found.cases, *_named(implementation)))),
        "declined": found.declined,
        "feature": found.singles[1:],
        "base": found.singles[:1],
        "rich": found.rich,
        "front": front_end_cases(level, seed, implementation.supports),
        "decoded": decoded_cases(seed, implementation.supports),
        "ensemble": ensemble_cases(seed, implementation.supports),
        "interpreted": _to_interpret(implementation, seed),
        "compiled": _to_compile(implementation, level) if first else (),
    }
    jobs = []
    for scope, cases in by_scope.items():
        if asked := tuple(check for check in checks if check.scope == scope):
            # At `quick` the cases of the grid take turns, unless what to ask is named.
            turn = level == "quick" and scope == "grid" and len(checks) == len(CHECKS)
            turns = taken(implementation, found, seed) if turn else {}
            jobs += [Job(implementation, case, asked, turns.get(case, EVERYTHING)) for case in cases]
    row = {
        "implementation": implementation.name,
        "level": level,
        "strength": found.coverage.strength,
        "cases": len(found.cases),
        "declined": len(found.declined),
        "combinations": found.coverage.feasible,
        "covered": found.coverage.covered,
    }
    return jobs, row


def _to_compile(implementation: Implementation, level: str = "quick") -> tuple[Case, ...]:
    """The cases of the check `compiles`: one, to say so, where there is no call to compile. Values do not matter."""
    if not targets_of(implementation.platform):
        return ()
    cases = compiled_cases(implementation.supports, sweep=level == "deep")
    return cases if implementation.native is not None else cases[:1]


def _to_interpret(implementation: Implementation, seed: int) -> tuple[Case, ...]:
    """The cases of the check `interpreter`, one of a TPU kernel that has no call to run."""
    if not _has_interpreter(implementation):
        return ()
    cases = interpreted_cases(seed, implementation.supports, implementation.platform)
    return cases if implementation.under_interpreter is not None else cases[:1]


def _has_interpreter(implementation: Implementation) -> bool:
    """Whether JAX interprets the accelerator: TPUs, and of GPU kernels those of Mosaic, which say so."""
    platform = implementation.platform
    return platform == "tpu" or (platform == "gpu" and implementation.under_interpreter is not None)


def ensemble_cases(seed: int, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """One case in bf16 and one in f16 for the ensemble check, as far as they are supported; with gradients if can be.

    Head depth 64 makes the scale a power of two: an implementation that rounds `q * scale` loses nothing by it.
    """
    found = []
    for dtype in ("bf16", "f16"):
        cases = (_ensemble_case(phase, dtype, seed, *sizes) for phase in ("train", "prefill") for sizes in _ENSEMBLE)
        found.append(next((case for case in cases if supports(case) is None), None))
    return tuple(case for case in found if case is not None)


def _ensemble_case(phase: str, dtype: str, seed: int, t: int, s: int, n: int, k: int, mask: str) -> Case:
    return Case(phase=phase, dtype=dtype, q_length=t, kv_length=s, num_q_heads=n, num_kv_heads=k, mask=mask, seed=seed)


def _named(implementation: Implementation) -> list[Case]:
    """The cases of the named regressions that the implementation supports."""
    return [regression.case for regression in REGRESSIONS if implementation.supports(regression.case) is None]


def regressions(implementations: Sequence[Implementation], checks: Iterable[Check] = CHECKS) -> Plan:
    """The jobs that judge the named regressions; what an implementation does not support is shown with its reason."""
    asked = tuple(check for check in checks if check.scope == "grid")
    return Plan(tuple(Job(i, regression.case, asked) for i in implementations for regression in REGRESSIONS), ())


def single(implementation: Implementation, case: Case, checks: Iterable[Check] = CHECKS) -> Plan:
    """The jobs that judge one case: the checks of the grid, or the refusal if the case is not supported.

    Checks that look at one case of their own are asked of this one too, if it is theirs or if they are named.
    """
    chosen = tuple(checks)
    declined = implementation.supports(case) is not None
    named = len(chosen) < len(CHECKS)
    scopes = {"declined"} if declined else {"grid", *_scopes_of(implementation, case, named=named)}
    asked = tuple(check for check in chosen if check.scope in scopes)
    # A declined case is shown with its reason, whichever checks are asked for.
    return Plan((Job(implementation, case, asked),) if asked or declined else (), ())


def _scopes_of(implementation: Implementation, case: Case, *, named: bool) -> set[str]:
    """The scopes beside the grid whose checks are asked of `case`."""
    always = {"ensemble"} if case in ensemble_cases(case.seed, implementation.supports) else set()
    always |= {"decoded"} if case in decoded_cases(case.seed, implementation.supports) else set()
    always |= {"front"} if case.steps else set()
    if named:
        compiled = {"compiled"} if targets_of(implementation.platform) else set()
        interpreted = {"interpreted"} if _has_interpreter(implementation) else set()
        return {"feature", "base", "rich"} | always | compiled | interpreted
    found = grid("quick", case.seed, implementation.supports)
    theirs = {"feature": found.singles[1:], "base": found.singles[:1], "rich": found.rich}
    theirs |= {"interpreted": _to_interpret(implementation, case.seed), "compiled": _to_compile(implementation)}
    return {scope for scope, cases in theirs.items() if case in cases} | always
