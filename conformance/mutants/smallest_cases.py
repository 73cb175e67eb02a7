"""Find the smallest case on which a wrong function fails, and write tests of such cases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence

from cases.case import Case
from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from conformance.check_api.scopes import ImplementationGrids
from conformance.execution.plain_functions import build_implementation
from conformance.mutants.calls import AttentionCall
from conformance.mutants.planted_bug import PlantedBug
from conformance.mutants.substitution import RecordedCall
from conformance.mutants.visibility import SeenCall, is_visible
from conformance.sensitivity.detection_table import load_table
from impls.contract.implementation import Implementation

_TRIED = 12  # cases on which a wrong function is tried, the smallest first
PARAMETERS = ("causal", "window", "mask", "segment_ids", "soft_cap", "sinks", "bias", "scale", "save_residuals")
"""What wrong functions may be wrong in: the parameters of a plain function that they know."""


def list_cases(supported: Implementation) -> Sequence[Case]:
    """List the cases of `quick` for a function, small ones with few features first."""
    cases = {case.id: case for grid in ImplementationGrids(supported, "quick", 0).all_grids for case in grid.cases}
    dense = [case for case in cases.values() if case.stored is None and supported.supports(case) is None]
    return sorted(
        dense,
        key=lambda case: (case.q_length * case.kv_length * case.batch * case.num_q_heads, len(case.features), case.id),
    )


@functools.cache
def _read_known_cases() -> Mapping[str, Sequence[str]]:
    """Read the cases on which the judge saw each planted bug."""
    table = load_table() or {"bugs": ()}
    return {bug["bug"]: [kill[2] for kill in bug["kills"].values()] for bug in table["bugs"]}


def build_stub(parameters: Collection[str]) -> Implementation:
    """Build an implementation with these parameters, which says what cases a function can be given."""
    kinds = inspect.Parameter
    given = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("q", "k", "v")]
    given += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in PARAMETERS if name in parameters]

    def stub() -> None:
        """Have the signature."""

    vars(stub)["__signature__"] = inspect.Signature(given)
    return build_implementation(stub, "stub")


def find_smallest_case(bug: PlantedBug, supported: Implementation, cases: Sequence[Case]) -> Case | None:
    """Find the smallest case that a function can be given and on which a wrong one fails.

    Args:
      bug: the wrong function.
      supported: says which cases the function can be given (`build_stub`).
      cases: those of `list_cases`.
    """
    wrong = bug.build()
    tried = [case for case in cases if bug.trigger(case) and wrong.supports(case) is None][:_TRIED]
    known = map(parse_case_id, _read_known_cases().get(bug.name, ()))
    tried += [case for case in known if supported.supports(case) is None and case.stored is None]
    calls = ((case, _build_call(case)) for case in tried)
    return next((case for case, call in calls if call is not None and is_visible(wrong, call)), None)


@functools.lru_cache(maxsize=512)
def _build_call(case: Case) -> SeenCall | None:
    """Build the call of a case; None if wrong functions do not know its operands."""
    problem = draw_problem(case)
    if any(x is not None for x in (problem.alibi_slopes, problem.score_mod, problem.logit_scale, problem.kv_scales)):
        return None
    names = ("q", "k", "v", "segment_ids", "soft_cap", "sinks", "bias", "scale")
    call = AttentionCall(masks=(problem.mask,), **{name: getattr(problem, name) for name in names})
    pulled = ("q", "k", "v", *(name for name in ("sinks", "bias") if getattr(call, name) is not None))
    differentiated = pulled if case.phase == "train" else ()
    return SeenCall(
        RecordedCall(call, residuals=True, differentiated=differentiated, empty_rows=False, test=""), frozenset()
    )


def write_tests(function: str, adapter: str, cases: Mapping[str, str]) -> str:
    """Write a module of tests with the cases that catch what a suite let through.

    Args:
      function: the function, as `module:name`.
      adapter: the module and name of its adapter, as `module:name`.
      cases: what each wrong function gets wrong, by the id of a case that catches it.
    """
    module, _, name = adapter.partition(":")
    imported = f"from {module} import {name}" + ("" if name == "attention" else " as attention")
    rows = "".join(f"        {case!r},  # {text}\n" for case, text in cases.items()).replace("'", '"')
    return f'''"""Cases on which wrong versions of `{function}` fail that the other tests let through."""

import conformance
import pytest
{imported}


@pytest.mark.parametrize(
    "case_id",
    [
{rows}    ],
)
def test_gives_exact_results(case_id):
    case = conformance.case(case_id)
    comparison = case.compare(case.run(attention))
    assert comparison.passes, comparison
'''
