"""What is declared that asks less than the defaults, and which such declarations might explain a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from cases.case import Case
from cases.operand_registry import OPTIONAL, OptionalOperand
from cases.storage_forms.form_registry import FORMS
from conformance.contract import Arithmetic, Implementation

# Tried in this order: of f32 operands, and of the others.
_WEAKER_FOR_F32: tuple[Mapping[str, Any], ...] = ({"products": "tf32"}, {"products": "bf16"})
_WEAKER_FOR_SIXTEEN_BITS: tuple[Mapping[str, Any], ...] = (
    {"group_sums": "input"},
    {"logits": "input"},
    {"residuals": "input"},
    {"block_sums": 64},
    {"softmax": "input"},
    {"scaled_q": True},
    # Together: plain code that multiplies q by its scale and leaves all else in the operands' dtype, also of groups.
    {"softmax": "input", "scaled_q": True},
    {"softmax": "input", "scaled_q": True, "group_sums": "input"},
)
# Fields of `Arithmetic` whose other value asks more.
_STRICTER_FIELDS = frozenset({"probabilities"})


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Declarations as they are written, one or several, and the implementation that declares them too."""

    declaration: str
    implementation: Implementation

    @property
    def keeps_expectation(self) -> bool:
        """Whether what is expected stays as it was found: nothing but the question changes."""
        return self.declaration.startswith("behind_mask")


def iter_weaker_declarations(implementation: Implementation, case: Case) -> Iterator[Remedy]:
    """Each declaration that the implementation does not make and that could matter on this case."""
    if implementation.behind_mask == "any":
        finite = dataclasses.replace(implementation, behind_mask="finite")
        yield Remedy(_format_declaration("behind_mask", "finite"), finite)
    declared = implementation.arithmetic
    seen = set()
    for fields in _WEAKER_FOR_F32 if case.dtype == "f32" else _WEAKER_FOR_SIXTEEN_BITS:
        new = {
            name: value
            for name, value in fields.items()
            if getattr(declared, name) == getattr(Arithmetic(), name)
            and (name != "group_sums" or case.num_q_heads > case.num_kv_heads)
        }
        written = ", ".join(_format_declaration(name, value) for name, value in new.items())
        if new and written not in seen:
            seen.add(written)
            arithmetic = dataclasses.replace(declared, **new)
            yield Remedy(written, dataclasses.replace(implementation, arithmetic=arithmetic))


def list_lenient_declarations(implementation: Implementation) -> list[str]:
    """What the implementation declares that asks less of it than the defaults, as it is written."""
    default = Arithmetic()
    found = [
        _format_declaration(field.name, value)
        for field in dataclasses.fields(default)
        if field.name not in _STRICTER_FIELDS
        and (value := getattr(implementation.arithmetic, field.name)) != getattr(default, field.name)
    ]
    if implementation.behind_mask == "finite":
        found.append(_format_declaration("behind_mask", "finite"))
    form = None if implementation.storage is None else FORMS[implementation.storage]
    stored = form is not None and not form.is_dense  # packed or a cache
    reads_a_cache = stored or any(name.startswith("kv_") for name in implementation.offers)
    if not reads_a_cache and "train" not in implementation.unsupported:
        own = ("dq", "dk") if form is not None and form.is_tied else ("dq", "dk", "dv")
        beside = tuple(
            operand.gradient for operand in OPTIONAL if operand.gradient and _accepts_operand(implementation, operand)
        )
        lacking = [name for name in (*own, *beside) if name not in implementation.gradients]
        found += [f"no {' '.join(lacking)}"] if lacking else []
        if (
            "logsumexp" in implementation.residuals - implementation.differentiable_residuals
            and implementation.gradients
        ):
            found.append("no gradient of logsumexp")
    return found


def _accepts_operand(implementation: Implementation, operand: OptionalOperand) -> bool:
    offered = operand.name in implementation.offers if operand.opt_in else True
    return offered and operand.name not in implementation.unsupported


def _format_declaration(name: str, value: object) -> str:
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
