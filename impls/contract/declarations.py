"""Define what a kernel may declare: the one table of declarations, and the decorator `declare` that attaches them.

A declaration is a field of a class of this module: its name, its type, its default, what it says and what it loosens.
An `Implementation` has an `Arithmetic` and `Formulas`, and is a `Behaviour`. A plain function declares all fields flat.
Documents, the codec of a kernel's process, the run record and the verdict follow from the fields. Only type checkers
need their names and types again, in `Declarations`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import reprlib
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from cases.name_suggestions import suggest_name
from cases.operand_registry import GRADIENT_OF, GRADIENTS
from impls.contract.argument_validation import validate_arguments

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type[Any])
_ATTRIBUTE = "__attention_conformance__"

BehindMask = Literal["any", "finite"]
DropoutMask = Literal["places", "shape", "blocks", "given"]
CausalFrom = Literal["start", "end"]
EmptyRows = Literal["undefined", "zero", "mean"]
NegativeIds = Literal["ids", "padding"]
OpenSide = Literal[None, -1, "length"]
Products = Literal["exact", "tf32", "bf16"]
Refuses = Literal["NotImplementedError", "ValueError"]
Rounding = Literal["f32", "input"]
CheckVma = Literal[False, True, "both"]
TokenOrder = Literal["contiguous", "balanced", "striped"]
ScaledQ = Literal[False, True, "base2"]

TANGENTS = ("out", "logsumexp", "gradients")
"""The names of results that may have tangents in forward mode."""


def declared(default: Any, says: str, *, loosens: str = "nothing") -> Any:
    """Return the field of a declaration; `loosens` says what the field lets be judged less strictly, or not at all."""
    return dataclasses.field(default=default, metadata={"says": says, "loosens": loosens})


def describe_fields(kind: type[Any]) -> str:
    """Return what the declarations of a class say, as entries of a docstring."""
    entries = [f"{field.name}: {field.metadata['says']}." for field in list_fields(kind)]
    wrapper = textwrap.TextWrapper(116, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, entries))


def list_fields(kind: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a class that are declarations."""
    return [field for field in dataclasses.fields(kind) if "says" in field.metadata]


def document(kind: _Class) -> _Class:
    """Decorate a class: its docstring gets the declarations that are its fields."""
    text = inspect.getdoc(kind) or ""
    heading = "" if "Attributes:" in text else "\n\nAttributes:"
    kind.__doc__ = f"{text}{heading}\n{describe_fields(kind)}"
    return kind


@validate_arguments
@document
@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The declared arithmetic of an implementation, from which error bounds follow (docs/contract.md, section 6)."""

    products: Products = declared(
        "exact",
        "how f32 operands are multiplied; bf16 and f16 operands always multiply exactly into f32",
        loosens="results of f32 cases may be as far off as products in tf32 or bf16 make them",
    )
    logits: Rounding = declared(
        "f32",
        '`"input"` if bf16 and f16 logits are rounded to the operands\' dtype before the softmax',
        loosens="one rounding of every logit, in all results of bf16 and f16",
    )
    softmax: Rounding = declared(
        "f32",
        '`"input"` if logits and every operation on them, weights, their sum, probabilities and the gradients of '
        "all these have the operands' dtype; a sum is still accumulated in f32 and rounded at its end",
        loosens="many roundings of each pair of query and key, in all results of bf16 and f16",
    )
    group_sums: Rounding = declared(
        "f32",
        '`"input"` if `dk` and `dv` are summed over the query heads of a group in the operands\' dtype, as in the '
        "derivative of a repeat (`jnp.repeat`) in JAX",
        loosens="one rounding of each partial sum, in bf16 and f16",
    )
    block_sums: int | None = declared(
        None,
        "the number of keys (for `out` and `dq`) or queries (for `dk` and `dv`) that are summed in f32 before the "
        "sum so far is rounded to the operands' dtype, as in the derivative of a scan over blocks in JAX; None if "
        "the whole sum is in f32",
        loosens="one rounding of what each block adds, and one of the sum after it, in bf16 and f16",
    )
    probabilities: Literal["input", "f32"] = declared(
        "input",
        "the dtype in which probabilities and their gradients enter a product; the default allows one rounding of "
        'both in bf16 and f16, and `"f32"` is stricter',
    )
    scaled_q: ScaledQ = declared(
        False,
        'True if `q * scale` is rounded to the operands\' dtype before the product; `"base2"` if `q * scale * '
        "log2(e)` is, for a softmax by powers of 2",
        loosens="one rounding of `q` in every logit, and one of `dq`; with True, nothing if the scale is a power of "
        'two. With `"base2"`, the check `ensemble` is unsupported, and a factor `scale * log2(e)` that is rounded '
        "too may pass",
    )
    residuals: Rounding = declared(
        "f32",
        '`"input"` if residuals are returned in the operands\' dtype',
        loosens="one rounding of each residual in bf16 and f16",
    )
    cache: Rounding = declared(
        "f32",
        "the dtype in which stored keys and values of a quantised cache, multiplied by their scales, enter a product",
        loosens="one rounding of keys and values to the operands' dtype",
    )

    def __post_init__(self) -> None:
        if self.block_sums is not None and self.block_sums < 1:
            raise ValueError(f"block_sums must be a whole number of keys or queries, at least 1, got {self.block_sums}")


@validate_arguments
@document
@dataclasses.dataclass(frozen=True, kw_only=True)
class Formulas:
    """The formulas of an implementation where they differ from the contract's (docs/contract.md, section 9)."""

    logsumexp_base: Literal["e", 2] = declared(
        "e",
        "the base of the logarithm in `logsumexp`; 2 as in FlashInfer",
        loosens="`ratio_flash` is not computed",
    )
    logsumexp_sink: bool = declared(
        True,
        "False if `logsumexp` leaves out the sink, which `out` includes in any case",
        loosens="`ratio_flash` is not computed",
    )
    logsumexp_empty: Literal["-inf", "inf"] = declared(
        "-inf",
        '`logsumexp` of a row without keys, and without a sink that it includes; `"inf"` as in flash-attention. It '
        'is judged under `empty_rows="zero"`',
        loosens="`ratio_flash` is not computed",
    )
    soft_cap: Literal["after_bias", "before_bias"] = declared(
        "after_bias",
        '`"after_bias"` if the soft cap limits logits with bias and ALiBi; `"before_bias"` if bias and ALiBi are '
        "added to capped logits, as in flash-attention: a bias of -inf then hides its key under a soft cap too. A "
        "function that gets the soft cap as part of `score_mod` has the contract's order",
    )

    scaled_bias: bool = declared(
        False,
        "True if the bias is added before the scale, which multiplies it too",
    )

    @property
    def has_contract_logsumexp(self) -> bool:
        """Return whether `logsumexp` is that of the contract."""
        return (self.logsumexp_base, self.logsumexp_sink, self.logsumexp_empty) == ("e", True, "-inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What else an implementation declares about its results, its memory and what it reads."""

    empty_rows: EmptyRows = declared(
        "undefined",
        '`out` of a query that may attend to no key: `"zero"` (then `logsumexp` is -inf or the sink, and '
        '`max_logits` -inf), `"mean"` of v over all keys, or `"undefined"`',
        loosens='with `"undefined"`, these rows are not judged; with `"mean"`, neither are their residuals, nor '
        "gradients of a case with such rows while `poison` changes its dead memory",
    )
    behind_mask: BehindMask = declared(
        "any",
        '`"any"` if keys and values that no query may attend to may hold anything, NaN included; `"finite"` if they '
        "must be finite",
        loosens="NaN and infinity are unsupported in the check `poison`, and the check `decoding` leaves finite "
        "numbers in unused parts of the cache",
    )
    unordered_sums: Collection[str] = declared(
        (),
        'the gradients, such as `("dq",)`, whose last bits differ from call to call, as with atomic additions',
        loosens="the checks `independence` and `linearity` compare them within the bounds of both calls, not by "
        "their bits, and do not ask that the same call gives the same bits",
    )
    memory: Literal["linear"] | None = declared(
        None,
        '`"linear"` if temporary memory of forward and backward grows no faster than the lengths, which the check '
        "`memory` then tests",
    )
    tangents: Collection[str] = declared(
        (),
        'what `jax.jvp` differentiates in forward mode, which the check `tangents` then judges: `("out", '
        '"logsumexp")`, and `"gradients"` if gradients have tangents as well',
    )
    dropout_mask: DropoutMask = declared(
        "shape",
        'what decides, beside the key, whether a weight is dropped: `"places"` if only its batch row, head, query and '
        'key do, so that it does not depend on the sizes of the call; `"shape"` if the sizes do too; `"blocks"` if '
        'block sizes do. With `"given"` the caller decides, by a mask in place of the key; a plain function with the '
        "parameter `dropout_mask` has it without declaring it",
        loosens='with `"blocks"`, variants with other block sizes may drop other weights',
    )
    dropout_shared: Collection[str] = declared(
        (),
        'the axes, such as `("batch", "heads")`, along which all weights are dropped alike',
        loosens="masks need not differ along these axes, and must be equal there",
    )
    check_vma: CheckVma = declared(
        False,
        "the settings of `check_vma` under which a call on several devices is right, for a function with "
        "`context_axes`: a `psum` in a custom backward pass is right with True, and too large with False",
    )
    batch_invariant: bool | Collection[int] = declared(
        False,
        "True if the bits of a sequence's results do not depend on the other sequences of the call, on the place of "
        "the sequence, on padding or on chunks, which the check `batch_invariance` then tests; numbers of keys, such "
        "as `(1024, 4096)`, from which the kernel splits them, bring cases beyond these too",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.batch_invariant, bool):
            if not self.batch_invariant or min(self.batch_invariant) < 1:
                raise ValueError(f"batch_invariant is True, False or numbers of keys, got {self.batch_invariant!r}")
            object.__setattr__(self, "batch_invariant", tuple(sorted(self.batch_invariant)))
        if unknown := sorted(set(self.unordered_sums) - set(GRADIENTS)):
            raise ValueError(f"unordered_sums names gradients, such as ('dq',), got {unknown[0]!r}")
        if unknown := sorted(set(self.dropout_shared) - {"batch", "heads"}):
            raise ValueError(f"dropout_shared names 'batch', 'heads' or both, got {unknown[0]!r}")
        object.__setattr__(self, "dropout_shared", tuple(sorted(self.dropout_shared)))
        object.__setattr__(self, "unordered_sums", tuple(name for name in GRADIENTS if name in self.unordered_sums))
        if unknown := sorted(set(self.tangents) - set(TANGENTS)):
            known = ", ".join(map(repr, TANGENTS))
            raise ValueError(f"tangents names results: {unknown[0]!r} is none of {known}")
        object.__setattr__(self, "tangents", tuple(name for name in TANGENTS if name in self.tangents))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conventions:
    """How the call of a plain function differs from the contract's; the judge converts arguments and exceptions."""

    causal: CausalFrom = declared(
        "start",
        'what `causal=True` and `window` mean if T is not S: with `"start"`, the first query is at the first key; '
        'with `"end"`, the last query is at the last key',
    )
    refuses: Refuses = declared(
        "NotImplementedError",
        '`"ValueError"` if the function refuses calls that it does not support by `ValueError`',
        loosens="such a case is unsupported, with the message of the exception; once a call was accepted, a "
        "`ValueError` of a later call with the same shapes, dtypes and options is an error",
    )
    open_sides: OpenSide = declared(
        None,
        'what `window` holds for a side that is open: None, -1, or `"length"` for the larger of T and S',
    )
    negative_ids: NegativeIds = declared(
        "ids",
        '`"padding"` if a token with a negative segment id attends to nothing, and nothing attends to it',
        loosens="tokens without a partner get the id -1, and no other id is negative",
    )
    empty_sequences: bool = declared(
        True,
        "False if no sequence of a packed or paged call may be without queries or without keys",
        loosens="cases with such sequences are unsupported; so are tables with unused entries, for a function "
        "without `num_seqs`",
    )
    ignores: Collection[str] = declared(
        (),
        'the parameters, such as `("window_size",)`, that never get a value and need none to be judged: their '
        "defaults are all that is used",
        loosens="what these parameters do is not judged, and the verdict does not count them as never called",
    )

    captures: bool = declared(
        False,
        "True if `mask_mod` and `score_mod` may capture arrays: each is a `jax.tree_util.Partial`, which can be called "
        "and whose leaves are the arrays",
    )
    context_axes: Collection[str] = declared(
        (),
        'the mesh axes, such as `("context",)`, if the function is called inside a `shard_map` with the tokens of one '
        "device; with two axes, the second is the inner one and has two devices",
        loosens="cases are unsupported if the devices do not divide their lengths",
    )
    token_order: TokenOrder = declared(
        "contiguous",
        'which tokens a device has, with `context_axes`: `"contiguous"` parts, `"balanced"` (chunks `r` and '
        '`2 * n - 1 - r` of `2 * n`), or `"striped"` (each `n`th token)',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration(Conventions, Behaviour, Formulas, Arithmetic):
    """All that a plain function declares by `declare`."""

    differentiable_residuals: bool = declared(
        True,
        "False if `logsumexp` carries no gradient",
        loosens="the check `gradients_lse` is unsupported, and no check gives `logsumexp` a cotangent",
    )
    gradients: Collection[str] | None = declared(
        None,
        'the operands that have a gradient, such as `("q", "k", "v")`; None if all floating-point operands have one',
        loosens="the others are constants: no check differentiates the function by them",
    )
    unsupported: Mapping[str, str] | None = declared(
        None,
        "a mapping from the name of a feature (`python -m conformance list features`) to the reason why the "
        "function does not support it, in addition to those that its signature lacks",
        loosens="cases that need the feature are unsupported",
    )
    open_questions: Collection[str] = declared(
        (),
        "what somebody has to answer before the other declarations count as meant; `adapt` writes such questions. "
        "Until they are deleted, the function conforms only on condition that each answer is yes, and a run exits "
        "with 1",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        Arithmetic.__post_init__(self)
        for name in self.gradients or ():
            if name not in GRADIENT_OF:
                known = ", ".join(map(repr, GRADIENT_OF))
                raise ValueError(
                    f"gradients names operands: {name!r} is none of {known}{suggest_name(name, GRADIENT_OF)}"
                )
        object.__setattr__(self, "context_axes", tuple(self.context_axes))
        if len(self.context_axes) > 2:
            raise ValueError(f"context_axes must be one or two mesh axes, got {self.context_axes}")
        for name in () if self.context_axes else ("token_order", "check_vma"):
            if getattr(self, name) != getattr(Declaration, name):
                raise ValueError(f"{name} needs context_axes, the mesh axes of a function that runs on each device")

    def select(self, kind: type[Any]) -> dict[str, Any]:
        """Return the declarations that are fields of a class, as keyword arguments."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(kind)}


class Declarations(TypedDict, total=False):
    """The keyword arguments of `declare`, for type checkers and for functions that pass them on."""

    products: Products
    logits: Rounding
    softmax: Rounding
    group_sums: Rounding
    block_sums: int | None
    probabilities: Literal["input", "f32"]
    scaled_q: ScaledQ
    residuals: Rounding
    cache: Rounding
    logsumexp_base: Literal["e", 2]
    logsumexp_sink: bool
    logsumexp_empty: Literal["-inf", "inf"]
    soft_cap: Literal["after_bias", "before_bias"]
    scaled_bias: bool
    empty_rows: EmptyRows
    behind_mask: BehindMask
    unordered_sums: Collection[str]
    dropout_mask: DropoutMask
    dropout_shared: Collection[str]
    memory: Literal["linear"] | None
    tangents: Collection[str]
    batch_invariant: bool | Collection[int]
    causal: CausalFrom
    refuses: Refuses
    open_sides: OpenSide
    negative_ids: NegativeIds
    empty_sequences: bool
    ignores: Collection[str]
    captures: bool
    context_axes: Collection[str]
    token_order: TokenOrder
    check_vma: CheckVma
    open_questions: Collection[str]
    differentiable_residuals: bool
    gradients: Collection[str] | None
    unsupported: Mapping[str, str] | None


@validate_arguments
def declare(**declarations: Unpack[Declarations]) -> Callable[[_Function], _Function]:
    """Return a decorator that attaches declarations to a plain attention function.

    They say what its signature cannot say, such as its arithmetic. Section 9 of docs/contract.md lists them.

    Raises:
      TypeError: for an argument of a wrong type, and if the decorated object is no function.
      ValueError: if an argument is not one of the allowed words.
    """
    declaration = Declaration(**declarations)

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


_about, _raises = (inspect.getdoc(declare) or "").split("Raises:")
declare.__doc__ = f"{_about}Args:\n{describe_fields(Declaration)}\n\nRaises:{_raises}"
vars(declare)["__signature__"] = inspect.signature(Declaration).replace(return_annotation="Callable[[F], F]")


def redeclare(function: Callable[..., Any], declarations: Declarations) -> Callable[..., Any]:
    """Return the function with some of its declarations replaced; the function itself stays as it is."""
    wrapped = functools.partial(function)  # has attributes of its own
    setattr(wrapped, _ATTRIBUTE, dataclasses.replace(get_declaration(function), **declarations))
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


def list_declared(holder: object, kind: type[Any]) -> tuple[str, ...]:
    """List the declarations of a class that an object makes, each as it is written in code."""
    values = {field: getattr(holder, field.name) for field in list_fields(kind)}
    return tuple(format_declaration(field.name, value) for field, value in values.items() if value != field.default)


def format_declaration(name: str, value: object) -> str:
    """Format one declaration as a keyword argument."""
    return f"{name}={value!r}".replace("'", '"')
