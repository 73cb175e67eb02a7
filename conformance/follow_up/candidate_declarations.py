"""List the declarations that might explain a finding: conventions first, then formulas, behaviour and arithmetic.

A declaration is a candidate only if every failing case of the finding has what it concerns. For example, another
alignment of causal masks concerns cases with a causal mask and T unequal to S. So few candidates are judged in vain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cases.case import Case, CaseIdError
from cases.case_id import parse_case_id
from cases.operand_registry import FURTHER_RESULTS, RESIDUALS
from cases.operand_values import draw_problem
from cases.storage_forms.form_registry import FORMS
from conformance.execution.call_conventions import HEADS_FIRST, SCALE_OF_ONE
from conformance.execution.plain_support import PlainSupport
from conformance.judging.declarations import list_formulas, list_weaker_arithmetic
from impls.contract.implementation import Implementation
from reports.causes.case_levels import parse_fields
from reports.causes.finding import (
    BEHIND_MASK,
    CHECK,
    FORWARD,
    GRADIENTS,
    RAISES,
    Finding,
    get_result,
    is_wrong_form,
)
from reports.causes.root_causes import CHECKS_WITH_OWN_OPERANDS

WRAPPERS: Mapping[str, str] = {
    HEADS_FIRST: "operands and out as [B, N, T, H]",
    SCALE_OF_ONE: "a scale of 1 where none is passed",
}
"""The conventions that no declaration has, in words."""
_TERM = re.compile(r"_and_|_or_")
_SIDED = re.compile(r"(?:causal|window-[^_]*?)(?P<offset>-o-?\d+)?")
_RESIDUALS = {*RESIDUALS, *FURTHER_RESULTS}
# The unit roundoff of bf16 is 2^16 times that of f32, in which products of f32 operands and residuals are computed. An
# error that is much larger in units of its bound is no rounding. Other results of operands in 16 bits are bounded by
# roundings in 16 bits already: more than this many roundings of a result are no rounding either.
_LARGEST_IN_F32, _LARGEST_IN_SIXTEEN_BITS = 2.0**18, 2.0**11


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Declarations, by name, that might explain a finding.

    Attributes:
      declarations: the declarations.
      declines: whether failing cases are left unjudged under them, in place of passing.
    """

    declarations: Mapping[str, Any]
    declines: bool = False


def list_candidates(finding: Finding, implementation: Implementation) -> list[Candidate]:
    """List the candidates for a finding, those that explain most by few words first."""
    cases = [case for case in dict.fromkeys(record.case for record in finding.own) if parse_fields(case) is not None]
    if not cases:
        return []
    every = [parse_case_id(case) for case in cases]
    found = [
        *_iter_conventions(finding, implementation, every),
        *_iter_formulas(finding, implementation, every),
        *_iter_behaviour(finding, implementation, every),
        *(Candidate(fields) for fields in _iter_arithmetic(finding, implementation, every)),
        *_iter_wrappers(finding, implementation),
    ]
    return [one for place, one in enumerate(found) if one not in found[:place]]


def _iter_conventions(finding: Finding, implementation: Implementation, cases: Sequence[Case]) -> Iterator[Candidate]:
    """Yield the conventions of a plain function's calls that every failing case depends on."""
    support = implementation.supports_case
    if not isinstance(support, PlainSupport):
        return
    if finding.kind == RAISES and finding.smallest.reason.startswith("ValueError"):
        yield Candidate({"refuses": "ValueError"}, declines=True)
        return
    has_own_lengths = finding.kind == CHECK and set(finding.checks) <= CHECKS_WITH_OWN_OPERANDS
    if finding.kind not in (FORWARD, RAISES) and not has_own_lengths:
        return  # another convention changes forward results, and these are right
    other = "end" if support.causal == "start" else "start"
    if support.parameters & {"causal", "window"} and all(
        _find_aligned_term(case, support.causal) and (has_own_lengths or case.q_length != case.kv_length)
        for case in cases
    ):
        yield Candidate({"causal": other})
    if "window" in support.parameters and all("window" in case.mask and "inf" in case.mask for case in cases):
        declared = " ".join(implementation.conventions)
        yield from (Candidate({"open_sides": side}) for side in (-1, "length") if f"open_sides={side}" not in declared)
    if "segment_ids" in support.parameters and all(case.segments is not None for case in cases):
        yield Candidate({"negative_ids": "padding"})


def _iter_formulas(finding: Finding, implementation: Implementation, cases: Sequence[Case]) -> Iterator[Candidate]:
    """Yield formulas of `logsumexp` and orders of the soft cap that every failing case depends on."""
    about_residuals = _get_results(finding) <= _RESIDUALS or finding.kind == CHECK
    if finding.kind not in (FORWARD, CHECK):
        return  # another formula changes forward results, and these are right
    shared = list_formulas(implementation, cases[0])
    for case in cases[1:]:
        shared = [fields for fields in shared if fields in list_formulas(implementation, case)]
    for fields in shared:
        if {"soft_cap", "scaled_bias"} & fields.keys() or about_residuals:
            yield Candidate(fields)


def _iter_behaviour(finding: Finding, implementation: Implementation, cases: Sequence[Case]) -> Iterator[Candidate]:
    """Yield what an implementation may declare about rows without keys, hidden memory and gradients of residuals."""
    if all(case.mask != "full" or case.segments is not None or case.storage for case in cases) and all(
        draw_problem(case).empty_rows.any() for case in cases[:3]
    ):
        form = None if implementation.storage is None else FORMS[implementation.storage]
        values = ("zero", "mean", "undefined") if form is None or form.is_dense else ("zero", "undefined")
        for value in values:
            if value != implementation.empty_rows:
                yield Candidate({"empty_rows": value}, declines=value == "undefined")
    is_leak = finding.kind == BEHIND_MASK or set(finding.checks) <= {"poison", "decoding"}
    if implementation.behind_mask == "any" and is_leak:
        yield Candidate({"behind_mask": "finite"}, declines=True)
    if implementation.differentiable_residuals and _is_zero_for_residuals(finding):
        yield Candidate({"differentiable_residuals": False}, declines=True)


def _is_zero_for_residuals(finding: Finding) -> bool:
    """Return whether gradients are exactly zero where only `logsumexp` has a cotangent."""
    alone = [record for record in finding.own if record.observable.endswith(".lse")]
    return finding.kind == GRADIENTS and bool(alone) and all(r.worst and r.worst.got == 0 for r in alone)


def _iter_arithmetic(
    finding: Finding, implementation: Implementation, cases: Sequence[Case]
) -> Iterator[dict[str, Any]]:
    """Yield the fields of `Arithmetic` that could make a rounding error as large as those of the finding."""
    results = _get_results(finding)
    if is_wrong_form(finding.smallest) and results <= _RESIDUALS and implementation.arithmetic.residuals == "f32":
        yield {"residuals": "input"}
    is_of_f32 = {case.dtype == "f32" for case in cases}
    if finding.kind not in (FORWARD, GRADIENTS) or len(is_of_f32) > 1:
        return
    for record in finding.own:
        is_in_f32 = record.dtype == "f32" or get_result(record.observable) in _RESIDUALS
        largest = _LARGEST_IN_F32 if is_in_f32 else _LARGEST_IN_SIXTEEN_BITS
        if record.ratio is None or not record.ratio <= largest * (record.limit or 1.0):
            return
    grouped = all(case.num_q_heads > case.num_kv_heads for case in cases)
    for fields in list_weaker_arithmetic(implementation, cases[0]):
        if fields.keys() == {"group_sums"} and not (results <= {"dk", "dv"} and grouped):
            continue
        if fields.keys() == {"residuals"} and not results <= _RESIDUALS:
            continue
        if "products" in fields:
            continue  # bounds of f32 become thousands of times larger, so nearly every error would pass
        if fields.keys() == {"block_sums"} and results & _RESIDUALS:
            continue
        yield fields


def _iter_wrappers(finding: Finding, implementation: Implementation) -> Iterator[Candidate]:
    """Yield the conventions that no declaration has, for findings about all cases of a plain function."""
    if not isinstance(implementation.supports_case, PlainSupport) or implementation.storage is not None:
        return
    named = {level.name for level in finding.levels or ()}
    if finding.kind in (FORWARD, RAISES) and not named:
        yield Candidate({HEADS_FIRST: True})
    if finding.kind == FORWARD and named <= {"no scale"}:
        yield Candidate({SCALE_OF_ONE: True})


def _get_results(finding: Finding) -> set[str]:
    return {name.removesuffix("_with_residuals") for name in finding.results}


def _find_aligned_term(case: Case, causal: str) -> str | None:
    """Find a term of the case's mask that reaches a function as `causal` or `window` if they are aligned so."""
    offset = 0 if causal == "start" else case.kv_length - case.q_length
    wanted = f"-o{offset}" if offset else None
    terms = ((term, _SIDED.fullmatch(term)) for term in _TERM.split(case.mask))
    return next((term for term, match in terms if match is not None and match["offset"] == wanted), None)


def convert_case(case: Case, declarations: Mapping[str, Any]) -> Case:
    """Return the case whose calls under the declarations are those of `case` without them.

    With `causal="end"`, a mask that was passed as `causal=True` has the offset that aligns its last query with the last
    key.
    """
    if "causal" not in declarations:
        return case
    offset = case.kv_length - case.q_length
    before, after = ("", f"-o{offset}" if offset else "")
    if declarations["causal"] == "start":
        before, after = after, before

    def move(term: str) -> str:
        match = _SIDED.fullmatch(term)
        if match is None or (match["offset"] or "") != before:
            return term
        return term.removesuffix(before) + after if before else term + after

    parts = re.split(f"({_TERM.pattern})", case.mask)
    with contextlib.suppress(CaseIdError):
        return dataclasses.replace(case, mask="".join(map(move, parts)))
    return case


_CONCERNS: Mapping[str, Callable[[Case], bool]] = {
    "causal": lambda case: "causal" in case.mask or "window" in case.mask,
    "open_sides": lambda case: "window" in case.mask,
    "negative_ids": lambda case: case.segments is not None,
    "empty_rows": lambda case: case.mask != "full",
    "soft_cap": lambda case: case.soft_cap is not None and (case.bias is not None or case.alibi),
    "scaled_bias": lambda case: case.bias is not None,
    "logsumexp_base": lambda case: True,
    "logsumexp_sink": lambda case: bool(case.sinks),
    "logsumexp_empty": lambda case: case.mask != "full",
    HEADS_FIRST: lambda case: True,
    SCALE_OF_ONE: lambda case: True,
}
"""For each declaration that changes what is expected: whether it concerns a case."""


def concerns(declarations: Mapping[str, Any], case: str) -> bool:
    """Return whether declarations change what is expected of a case, or how it is called."""
    if parse_fields(case) is None:
        return False
    parsed = parse_case_id(case)
    return any(_CONCERNS[name](parsed) for name in declarations if name in _CONCERNS)


def estimate_size(case: str) -> float:
    """Return the number of multiplications of a case, by which the cheapest cases are chosen; infinity if unknown."""
    fields = parse_fields(case)
    if fields is None:
        return math.inf
    return math.prod(int(fields[name]) for name in ("batch", "num_q_heads", "q_length", "kv_length", "head_dim"))


def list_wrong_results(finding: Finding, check: str, case: str) -> frozenset[str]:
    """Return the results of a check on a case that are wrong by a finding."""
    records = (*finding.records, finding.smallest)
    return frozenset(get_result(r.observable) for r in records if (r.check, r.case) == (check, case))
