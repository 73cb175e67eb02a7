"""Serialize the declarations of an implementation in its process, and rebuild an implementation from them in the judge.

The rebuilt implementation has all declarations. Its functions are proxies, which call the kernel's process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cases.case import Case
from conformance.execution.executor import Executor
from conformance.execution.plain_support import PlainSupport
from conformance.sandbox.handshake import MAX_TEXT
from impls.contract.implementation import Accelerator, Arithmetic, Formulas, Implementation
from reports.printable_text import make_printable

_SET_FIELDS = ("offers", "residuals", "differentiable_residuals", "gradients", "unordered_sums")
_PLAIN_FIELDS = (
    *("name", "description", "empty_rows", "behind_mask", "validates", "memory", "refuses_by_signature", "devices"),
    "writes_pages",
)


def serialize_declarations(implementation: Implementation) -> dict[str, Any]:
    """Return the declarations of an implementation as plain data: numbers, strings, lists and dicts."""
    support, accelerator = implementation.supports_case, implementation.accelerator
    return {
        **{name: getattr(implementation, name) for name in _PLAIN_FIELDS},
        **{name: sorted(getattr(implementation, name)) for name in _SET_FIELDS},
        "unsupported": dict(implementation.unsupported),
        "arithmetic": dataclasses.asdict(implementation.arithmetic),
        "formulas": dataclasses.asdict(implementation.formulas),
        "storage": implementation.storage,
        "checkpoint_names": list(implementation.checkpoint_names),
        "conventions": list(implementation.conventions),
        "variants": list(implementation.variants),
        "parts": implementation.parts is not None,
        "merge": implementation.merge is not None,
        "front_end": implementation.front_end is not None,
        "accelerator": {
            "platform": accelerator.platform,
            "interpreted": accelerator.interpreted,
            "absent": accelerator.absent,
            "native": accelerator.native is not None,
            "under_interpreter": accelerator.under_interpreter is not None,
        },
        "asks": support is not None and not isinstance(support, PlainSupport),
        "plain": {
            "parameters": sorted(support.parameters),
            "causal": support.causal,
            "narrow": support.narrow,
            "storage": support.storage,
            "others": list(support.others),
            "scales": list(support.scales),
            "empty_sequences": support.empty_sequences,
        }
        if isinstance(support, PlainSupport)
        else None,
    }


def parse_declarations(
    declared: Mapping[str, Any], call: Callable[..., Any], query_support: Callable[[Case], str | None]
) -> Implementation:
    """Return an implementation with these declarations.

    Args:
      declared: data of the kernel's process, as `serialize_declarations` returns them. The kernel may forge them.
      call: the function that replaces each function of the kernel.
      query_support: asks the kernel's process whether the kernel supports a case. Used if the kernel has a function
        for this.

    Raises:
      TypeError: if a declaration has a value of a wrong type.
      ValueError: if a declaration has a value that no implementation may declare.
    """
    names = (*declared["variants"], *declared["checkpoint_names"], *declared["conventions"])
    if unprintable := [name for name in names if not (isinstance(name, str) and name.isprintable())]:
        raise ValueError(f"names must be text that shows as it is, got {unprintable[0]!r}")
    functions: dict[str, Any] = {name: call if declared[name] else None for name in ("parts", "merge", "front_end")}
    accelerator = dict(declared["accelerator"])
    for name in ("native", "under_interpreter"):
        accelerator[name] = call if accelerator[name] else None
    supports: Callable[[Case], str | None] | None = query_support if declared["asks"] else None
    if declared["plain"] is not None:
        plain = declared["plain"]
        supports = PlainSupport(
            frozenset(plain["parameters"]),
            plain["causal"],
            bool(plain["narrow"]),
            plain["storage"],
            tuple(map(make_printable, plain["others"])),
            tuple(map(make_printable, plain["scales"])),
            bool(plain["empty_sequences"]),
        )
    fields: dict[str, Any] = {name: declared[name] for name in _PLAIN_FIELDS}
    fields |= {name: frozenset(declared[name]) for name in _SET_FIELDS}
    found = Implementation(
        call=call,
        **fields,
        unsupported=declared["unsupported"],
        arithmetic=Arithmetic(**declared["arithmetic"]),
        formulas=Formulas(**declared["formulas"]),
        storage=declared["storage"],
        checkpoint_names=tuple(declared["checkpoint_names"]),
        conventions=tuple(declared["conventions"]),
        variants=dict.fromkeys(declared["variants"], call),
        accelerator=Accelerator(**accelerator),
        supports_case=supports,
        **functions,
    )
    return dataclasses.replace(
        found,
        description=make_printable(found.description[:MAX_TEXT]),
        unsupported={feature: make_printable(reason[:MAX_TEXT]) for feature, reason in found.unsupported.items()},
    )


def evaluate_support(executor: Executor, case: Case) -> str | None:
    """Return why the implementation's own function `supports_case` declines a case; None if the case is supported.

    This runs in the kernel's process.
    """
    supports_case = executor.implementation.supports_case
    return None if supports_case is None else supports_case(case)
