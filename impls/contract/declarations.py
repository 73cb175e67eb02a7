"""Attach declarations to a plain attention function with the decorator `declare`, and read them back."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypedDict, TypeVar

from cases.name_suggestions import suggest_name
from cases.operand_registry import GRADIENT_OF
from impls.contract.argument_validation import validate_arguments
from impls.contract.implementation import (
    Arithmetic,
    BehindMask,
    CausalFrom,
    EmptyRows,
    Formulas,
    NegativeIds,
    OpenSide,
    Products,
    Refuses,
    ScaledQ,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ATTRIBUTE = "__attention_conformance__"
# Fields of `Declaration` by which arguments or exceptions are converted between the function and the contract.
_CONVENTIONS = ("refuses", "open_sides", "negative_ids", "empty_sequences")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a plain function declares by `declare`; the fields are explained there.

    docs/contract.md, section 9, has the defaults.
    """

    arithmetic: Arithmetic = dataclasses.field(default_factory=Arithmetic)
    formulas: Formulas = dataclasses.field(default_factory=Formulas)
    empty_rows: EmptyRows = "undefined"
    behind_mask: BehindMask = "any"
    causal: CausalFrom = "start"
    differentiable_residuals: bool = True
    gradients: Collection[str] | None = None
    unordered_sums: Collection[str] = ()
    refuses: Refuses = "NotImplementedError"
    open_sides: OpenSide = None
    negative_ids: NegativeIds = "ids"
    empty_sequences: bool = True
    memory: Literal["linear"] | None = None
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.gradients or ():
            if name not in GRADIENT_OF:
                known = ", ".join(map(repr, GRADIENT_OF))
                raise ValueError(
                    f"gradients names operands: {name!r} is none of {known}{suggest_name(name, GRADIENT_OF)}"
                )
        if unknown := sorted(set(self.unordered_sums) - set(GRADIENT_OF.values())):
            raise ValueError(f"unordered_sums names gradients, such as ('dq',), got {unknown[0]!r}")

    @property
    def conventions(self) -> tuple[str, ...]:
        """The conventions of the call that differ from the contract's, as they are written in code."""
        default = Declaration()
        changed = {name: x for name in _CONVENTIONS if (x := getattr(self, name)) != getattr(default, name)}
        return tuple(f'{name}="{x}"' if isinstance(x, str) else f"{name}={x!r}" for name, x in changed.items())


@validate_arguments
def declare(
    *,
    products: Products = "exact",
    logits: Literal["f32", "input"] = "f32",
    softmax: Literal["f32", "input"] = "f32",
    group_sums: Literal["f32", "input"] = "f32",
    block_sums: int | None = None,
    scaled_q: ScaledQ = False,
    residuals: Literal["f32", "input"] = "f32",
    logsumexp_base: Literal["e", 2] = "e",
    logsumexp_sink: bool = True,
    logsumexp_empty: Literal["-inf", "inf"] = "-inf",
    soft_cap: Literal["after_bias", "before_bias"] = "after_bias",
    empty_rows: EmptyRows = "undefined",
    behind_mask: BehindMask = "any",
    causal: CausalFrom = "start",
    differentiable_residuals: bool = True,
    gradients: Collection[str] | None = None,
    unordered_sums: Collection[str] = (),
    refuses: Refuses = "NotImplementedError",
    open_sides: OpenSide = None,
    negative_ids: NegativeIds = "ids",
    empty_sequences: bool = True,
    memory: Literal["linear"] | None = None,
    unsupported: Mapping[str, str] | None = None,
) -> Callable[[_Function], _Function]:
    """Return a decorator that attaches declarations to a plain attention function.

    They say what its signature cannot say, such as its arithmetic.

    Args:
      products: the precision of its products of f32 operands: `"exact"`, `"tf32"` or `"bf16"`.
      logits: `"input"` if bf16 and f16 logits are rounded to the operands' dtype before the softmax.
      softmax: `"input"` if the softmax itself, and its backward pass, are in the operands' dtype.
      group_sums: `"input"` if dk and dv are summed over the query heads of a group in the operands' dtype.
      block_sums: the number of keys or queries that are summed in f32 before the partial sum is rounded to the
        operands' dtype; None if partial sums are not rounded.
      scaled_q: True if `q * scale` is rounded to the operands' dtype before the product; `"base2"` if
        `q * scale * log2(e)` is.
      residuals: `"input"` if residuals are returned in the operands' dtype.
      logsumexp_base: 2 if `logsumexp` is a logarithm to base 2.
      logsumexp_sink: False if `logsumexp` leaves out the sink.
      logsumexp_empty: `"inf"` if `logsumexp` of a query that may attend to no key is +inf, as in flash-attention.
      soft_cap: `"before_bias"` if the soft cap limits logits before bias and ALiBi are added, as in flash-attention.
      empty_rows: the result for queries that may attend to no key: `"undefined"`, `"zero"` or `"mean"`.
      behind_mask: `"finite"` if keys and values behind the mask must be finite; `"any"` if they may be NaN.
      causal: how `causal=True` and `window` align queries and keys if T differs from S. With `"start"` the first query
        has the position of the first key. With `"end"` the last query has the position of the last key.
      differentiable_residuals: False if `logsumexp` carries no gradient.
      gradients: the operands that have a gradient, such as `("q", "k", "v")`; None if all floating-point operands have
        one. The others are constants: no check differentiates the function by them.
      unordered_sums: the gradients, such as `("dq",)`, whose last bits differ from call to call, as with atomic
        additions.
      refuses: `"ValueError"` if the function refuses calls that it does not support by `ValueError`. Such a case is
        shown as unsupported, with the message of the exception.
      open_sides: what `window` holds for a side that is open: None, -1, or `"length"` for the larger of T and S.
      negative_ids: `"padding"` if a token with a negative segment id is padding, which attends to nothing and which
        nothing attends to.
      empty_sequences: False if no sequence of a packed or paged call may be without queries or without keys.
      memory: `"linear"` if temporary memory of forward and backward grows no faster than the lengths.
      unsupported: a mapping from the name of a feature (`python -m conformance list features`) to the reason why the
        function does not support it.

    Raises:
      TypeError: for an argument of a wrong type, and if the decorated object is no function.
      ValueError: if an argument is not one of the allowed words.
    """
    declaration = Declaration(
        arithmetic=Arithmetic(
            products=products,
            logits=logits,
            softmax=softmax,
            group_sums=group_sums,
            block_sums=block_sums,
            scaled_q=scaled_q,
            residuals=residuals,
        ),
        formulas=Formulas(
            logsumexp_base=logsumexp_base,
            logsumexp_sink=logsumexp_sink,
            logsumexp_empty=logsumexp_empty,
            soft_cap=soft_cap,
        ),
        empty_rows=empty_rows,
        behind_mask=behind_mask,
        causal=causal,
        differentiable_residuals=differentiable_residuals,
        gradients=gradients,
        unordered_sums=unordered_sums,
        refuses=refuses,
        open_sides=open_sides,
        negative_ids=negative_ids,
        empty_sequences=empty_sequences,
        memory=memory,
        unsupported={} if unsupported is None else unsupported,
    )

    def mark(function: _Function) -> _Function:
        if not callable(function):
            raise TypeError(f"declare(...) is applied to a function, got {reprlib.repr(function)}")
        try:
            setattr(function, _ATTRIBUTE, declaration)
        except AttributeError as error:  # a method, or a function that is written in C
            raise TypeError(
                f"declare(...) is applied to a function with attributes, got {reprlib.repr(function)}: "
                "wrap it in functools.partial"
            ) from error
        return function

    return mark


class Declarations(TypedDict, total=False):
    """The keyword arguments of `declare`, for functions that pass them on."""

    products: Products
    logits: Literal["f32", "input"]
    softmax: Literal["f32", "input"]
    group_sums: Literal["f32", "input"]
    block_sums: int | None
    scaled_q: ScaledQ
    residuals: Literal["f32", "input"]
    logsumexp_base: Literal["e", 2]
    logsumexp_sink: bool
    logsumexp_empty: Literal["-inf", "inf"]
    soft_cap: Literal["after_bias", "before_bias"]
    empty_rows: EmptyRows
    behind_mask: BehindMask
    causal: CausalFrom
    differentiable_residuals: bool
    gradients: Collection[str] | None
    unordered_sums: Collection[str]
    refuses: Refuses
    open_sides: OpenSide
    negative_ids: NegativeIds
    empty_sequences: bool
    memory: Literal["linear"] | None
    unsupported: Mapping[str, str]


def redeclare(function: Callable[..., Any], declarations: Declarations) -> Callable[..., Any]:
    """Return the function with some of its declarations replaced; the function itself stays as it is.

    Raises:
      ValueError: for a value that is not one of the choices.
    """
    before = get_declaration(function)
    changed: dict[str, Any] = dict(declarations)
    for name in ("arithmetic", "formulas"):
        part = getattr(before, name)
        fields = {field.name: changed.pop(field.name) for field in dataclasses.fields(part) if field.name in changed}
        changed[name] = dataclasses.replace(part, **fields)
    wrapped = functools.partial(function)  # has attributes of its own
    setattr(wrapped, _ATTRIBUTE, dataclasses.replace(before, **changed))
    return wrapped


def unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside any nested `functools.partial` objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def get_declaration(function: Callable[..., Any]) -> Declaration:
    """Return what a function, or the function inside its partials, declares; the defaults if it declares nothing."""
    inner = getattr(unwrap_partial(function), _ATTRIBUTE, Declaration())
    found: Declaration = getattr(function, _ATTRIBUTE, inner)
    return found
