"""List what an implementation declares, and the declarations that might explain a failure; replace declarations.

Reports list the former. The second judgement of a failure (`conformance.judging.rejudgement`) tries declarations that
are not made and by which the judge asks less of the implementation than by default. The follow-up of a run tries them
and others on whole findings (`conformance.follow_up.declaration_trials`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from cases.case import Case
from cases.operand import OptionalOperand
from cases.operand_registry import OPTIONAL
from cases.storage_forms.form_registry import FORMS
from conformance.execution.plain_support import PlainSupport
from conformance.execution.stored_calls import LatentCall, StoredCall
from conformance.sandbox.sandboxed_executor import KernelProxy
from impls.contract.declarations import (
    Arithmetic,
    Behaviour,
    Formulas,
    format_declaration,
    list_declared,
    list_fields,
)
from impls.contract.implementation import Implementation

# Fields of `Arithmetic` to try as an explanation of a failure, in this order: the first table for f32 operands, the
# second for bf16 and f16.
_WEAKER_FOR_F32: tuple[Mapping[str, Any], ...] = ({"products": "tf32"}, {"products": "bf16"})
_WEAKER_FOR_SIXTEEN_BITS: tuple[Mapping[str, Any], ...] = (
    {"group_sums": "input"},
    {"logits": "input"},
    {"residuals": "input"},
    {"block_sums": 64},
    {"softmax": "input"},
    {"scaled_q": True},
    {"scaled_q": "base2"},
    # Plain JAX code often needs several at once: it multiplies q by the scale and computes the rest in the operands'
    # dtype.
    {"softmax": "input", "scaled_q": True},
    {"softmax": "input", "scaled_q": True, "group_sums": "input"},
)
# Fields of `Formulas` to try as an explanation of a failure.
_OTHER_FORMULAS: tuple[Mapping[str, Any], ...] = (
    {"logsumexp_base": 2},
    {"logsumexp_sink": False},
    {"logsumexp_empty": "inf"},
    {"logsumexp_base": 2, "logsumexp_sink": False},
    {"soft_cap": "before_bias"},
    {"scaled_bias": True},
)


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A declaration, as code, that might explain a failure, and a copy of the implementation that makes it."""

    declaration: str
    implementation: Implementation

    @property
    def keeps_expectation(self) -> bool:
        """Whether the oracle's results and bounds stay the same under the declaration, so trying it is cheap."""
        return self.declaration.startswith("behind_mask")


def iter_weaker_declarations(implementation: Implementation, case: Case) -> Iterator[Remedy]:
    """Yield lenient declarations that the implementation does not make and that could matter on this case.

    Each comes with a copy of the implementation that makes it. Whether a declaration matters depends on the case's
    dtype, and on whether query heads share key/value heads.
    """
    if implementation.behind_mask == "any":
        finite = dataclasses.replace(implementation, behind_mask="finite")
        yield Remedy(format_declaration("behind_mask", "finite"), finite)
    formulas = list_formulas(implementation, case) if implementation.formulas == Formulas() else []
    for fields in (*formulas, *list_weaker_arithmetic(implementation, case)):
        yield Remedy(format_declarations(fields), redeclare_implementation(implementation, fields))


def list_weaker_arithmetic(implementation: Implementation, case: Case) -> list[dict[str, Any]]:
    """List the fields of `Arithmetic`, each alone or several together, that allow more rounding on a case."""
    found: list[dict[str, Any]] = []
    for fields in _WEAKER_FOR_F32 if case.dtype == "f32" else _WEAKER_FOR_SIXTEEN_BITS:
        fields_to_add = {
            name: value
            for name, value in fields.items()
            if getattr(implementation.arithmetic, name) == getattr(Arithmetic(), name)
            and (name != "group_sums" or case.num_q_heads > case.num_kv_heads)
        }
        if fields_to_add and fields_to_add not in found:
            found.append(fields_to_add)
    return found


def list_formulas(implementation: Implementation, case: Case) -> list[dict[str, Any]]:
    """List the fields of `Formulas`, each alone or two together, that could change expected results of a case."""
    return [
        dict(formulas) for formulas in _OTHER_FORMULAS if all(_matters(name, implementation, case) for name in formulas)
    ]


def format_declarations(declarations: Mapping[str, Any]) -> str:
    """Format declarations as the keyword arguments of a call."""
    return ", ".join(format_declaration(name, value) for name, value in declarations.items())


def redeclare_implementation(implementation: Implementation, declarations: Mapping[str, Any]) -> Implementation:
    """Return an implementation with some of its declarations replaced.

    Declarations of arithmetic, formulas and behaviour leave the call as it is, so compiled programs are shared. Those
    of the conventions of a plain function change how its calls are made, and so do all if its operands are stored.
    """
    kinds = [
        {name: value for name, value in declarations.items() if name in {field.name for field in list_fields(kind)}}
        for kind in (Arithmetic, Formulas, Behaviour)
    ]
    arithmetic, formulas, behaviour = kinds
    found = dataclasses.replace(
        implementation,
        arithmetic=dataclasses.replace(implementation.arithmetic, **arithmetic),
        formulas=dataclasses.replace(implementation.formulas, **formulas),
        **behaviour,
    )
    if not declarations.get("differentiable_residuals", True):
        found = dataclasses.replace(found, differentiable_residuals=frozenset())
    known = {*arithmetic, *formulas, *behaviour, "differentiable_residuals"}
    of_call = {name: value for name, value in declarations.items() if name not in known}
    if implementation.storage is not None and isinstance(implementation.supports_case, PlainSupport):
        of_call = dict(declarations)
    return _change_call(found, of_call) if of_call else found


def _change_call(implementation: Implementation, declarations: Mapping[str, Any]) -> Implementation:
    """Return the implementation of a plain function whose calls are made by these declarations."""
    call, support = implementation.call, implementation.supports_case
    if isinstance(call, StoredCall | LatentCall):  # an executor has wrapped it
        changed = _change_call(dataclasses.replace(implementation, call=call.call), declarations)
        wrapped = dataclasses.replace(call, call=changed.call)
        if isinstance(wrapped, StoredCall):
            wrapped = dataclasses.replace(wrapped, formulas=implementation.formulas)
        return dataclasses.replace(changed, call=wrapped)
    if isinstance(call, KernelProxy) and isinstance(support, PlainSupport):
        proxy = KernelProxy(call.process, tuple(declarations.items()))
        support = dataclasses.replace(support, causal=declarations.get("causal", support.causal))
        return dataclasses.replace(implementation, call=proxy, supports_case=support)
    if implementation.redeclare is None:
        raise ValueError(f"{implementation.name} is no plain function, and has no {', '.join(declarations)}")
    changed = implementation.redeclare(declarations)
    return dataclasses.replace(
        implementation, call=changed.call, supports_case=changed.supports_case, lower_mask=changed.lower_mask
    )


def _matters(formula: str, implementation: Implementation, case: Case) -> bool:
    """Tell whether another formula than the contract's could change results of the implementation on the case."""
    if formula == "scaled_bias":
        return case.bias is not None
    if formula == "soft_cap":
        return case.soft_cap is not None and (case.bias is not None or case.alibi)
    if "logsumexp" not in implementation.residuals:
        return False
    has_zero_rows = implementation.empty_rows == "zero"
    return {"logsumexp_sink": bool(case.sinks), "logsumexp_empty": has_zero_rows}.get(formula, True)


def list_declarations(implementation: Implementation) -> list[str]:
    """List what an implementation declares, as it is written in code, and the gradients that it lacks."""
    found = [
        *list_declared(implementation.arithmetic, Arithmetic),
        *list_declared(implementation, Behaviour),
        *list_declared(implementation.formulas, Formulas),
        *implementation.conventions,
    ]
    form = None if implementation.storage is None else FORMS[implementation.storage]
    stored = form is not None and not form.is_dense  # the implementation takes packed sequences or a cache
    reads_a_cache = stored or any(name.startswith("kv_") for name in implementation.offers)
    if not reads_a_cache and "train" not in implementation.unsupported:
        required = ("dq", "dk") if form is not None and form.is_tied else ("dq", "dk", "dv")
        optional = tuple(
            operand.gradient for operand in OPTIONAL if operand.gradient and _accepts_operand(implementation, operand)
        )
        lacking = [name for name in (*required, *optional) if name not in implementation.gradients]
        found += [f"no {' '.join(lacking)}"] if lacking else []
        if (
            "logsumexp" in implementation.residuals - implementation.differentiable_residuals
            and implementation.gradients
        ):
            found.append("no gradient of logsumexp")
    return found


def _accepts_operand(implementation: Implementation, operand: OptionalOperand) -> bool:
    """Tell whether the implementation takes an optional operand."""
    offered = operand.name in implementation.offers if operand.opt_in else True
    return offered and operand.name not in implementation.unsupported
