"""Find the smallest case on which a wrong function fails, and write tests of such cases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence

from cases.case import Case
from cases.mask_spec import build_mask
from cases.masks import Causal, Dense, Full, Indexer, Lengths, Window, iter_leaves
from cases.operand_values import draw_problem
from conformance.check_api.scopes import ImplementationGrids
from conformance.execution.plain_functions import build_implementation
from conformance.mutation.calls import AttentionCall
from conformance.mutation.planted_bug import PlantedBug
from conformance.mutation.substitution import RecordedCall
from conformance.mutation.visibility import SeenCall, describe_problem, is_visible
from impls.contract.implementation import Implementation

_SIZES = 12  # of cases that are considered first
_TRIED = 8  # cases on which a wrong function is tried
_TRIED_FOR_INPUTS = 3  # likewise, to say which input is lacking
PARAMETERS = ("causal", "window", "mask", "segment_ids", "soft_cap", "sinks", "bias", "scale", "save_residuals")
"""The parameters of a plain function (docs/contract.md, section 4) that the wrong functions have."""


def list_cases(supported: Implementation) -> Sequence[Case]:
    """List the cases of `quick` for a function, small ones of plain values and few features first.

    Their masks are those that calls are read with (`mutation.calls`): a function that gets a chunked mask as an array
    cannot get chunks wrong.
    """
    cases = {case.id: case for grid in ImplementationGrids(supported, "quick", 0).all_grids for case in grid.cases}
    dense = [case for case in cases.values() if case.stored is None and supported.supports(case) is None]
    found = [case for case in dense if _is_read(case)]
    # Extreme sinks come last: a function that is wrong there alone would fail these cases as well.
    return sorted(found, key=lambda case: ("edge" in case.id, _count_pairs(case), *_rank_values(case), case.id))


def choose_few_sizes(cases: Sequence[Case]) -> list[Case]:
    """Choose cases of few sizes, since each takes seconds to compile: the smallest, and those with further features."""
    sizes: set[tuple[str | int, ...]] = set()
    features: set[str] = set()
    chosen = []
    for case in cases:
        lengths, heads = (case.batch, case.q_length, case.kv_length), (case.num_q_heads, case.num_kv_heads)
        size = (case.dtype, *lengths, *heads, case.head_dim, case.v_head_dim)
        if size in sizes or len(sizes) < _SIZES or not features.issuperset(case.features):
            sizes.add(size)
            features.update(case.features)
            chosen.append(case)
    return chosen


def _is_read(case: Case) -> bool:
    mask = build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    return all(type(leaf) in (Full, Causal, Window, Lengths, Dense, Indexer) for leaf in iter_leaves(mask))


def _rank_values(case: Case) -> tuple[bool, int]:
    """Return a sort key by which plain values and few features come first."""
    return case.distribution != "normal", len(case.features)


def _count_pairs(case: Case) -> int:
    return case.q_length * case.kv_length * case.batch * case.num_q_heads


def build_stub(parameters: Collection[str]) -> Implementation:
    """Build an implementation with these parameters, which says what cases a function can be given."""
    kinds = inspect.Parameter
    given = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("q", "k", "v")]
    given += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in PARAMETERS if name in parameters]

    def stub() -> None:
        """Have the signature."""

    vars(stub)["__signature__"] = inspect.Signature(given)
    return build_implementation(stub, "stub")


def list_possible(bug: PlantedBug, cases: Sequence[Case]) -> list[Case]:
    """List the cases with the condition for a bug; none if it is about nothing that the function has."""
    wrong = bug.build()
    return [case for case in cases if bug.trigger(case) and wrong.supports(case) is None]


def find_smallest_case(
    bug: PlantedBug, cases: Sequence[Case], known: Sequence[SeenCall] = ()
) -> tuple[Case, frozenset[str]] | None:
    """Find the smallest case on which a wrong function fails.

    Args:
      bug: the wrong function.
      cases: those of `list_cases`.
      known: calls; among the cases, one that has as little as possible that no call has is preferred.

    Returns:
      The case, and its facts (`visibility.describe_problem`).
    """
    wrong, possible = bug.build(), list_possible(bug, cases)
    if known:
        facts: frozenset[str] = frozenset().union(*(call.facts for call in known))
        possible.sort(key=lambda case: len(_build_call(case).facts - facts))
    count = _TRIED_FOR_INPUTS if known else _TRIED
    found = next((case for case in possible[:count] if is_visible(wrong, _build_call(case))), None)
    return None if found is None else (found, _build_call(found).facts)


@functools.lru_cache(maxsize=256)
def _build_call(case: Case) -> SeenCall:
    """Build the call of a case, with its exact results."""
    problem = draw_problem(case)
    names = ("q", "k", "v", "segment_ids", "soft_cap", "sinks", "bias", "scale")
    call = AttentionCall(masks=(problem.mask,), **{name: getattr(problem, name) for name in names})
    pulled = ("q", "k", "v", *(name for name in ("sinks", "bias") if getattr(call, name) is not None))
    differentiated = pulled if case.phase == "train" else ()
    recorded = RecordedCall(call, residuals=True, differentiated=differentiated, empty_rows=False, test="")
    return SeenCall(recorded, describe_problem(problem, gradients=differentiated, residuals=True))


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
