"""Plain functions as implementations, read by their signature, and by one trace for the residuals.

    def attention(q, k, v, *, causal=False, window=None, mask=None, bias=None, save_residuals=False): ...

A function may have any other optional operand too, by its name (`cases.operands.REMOVABLE`) and as the canonical call
has it (`conformance.contract`). A parameter that it lacks is a feature that it does not support.

`mask` arrives as booleans broadcastable to `[B, N, T, S]`. A function with the parameters gets `causal=True` and
`window=(left, right)` instead, for a mask that is one of these or the conjunction of both. Whatever is left of the mask
arrives in `mask`.

A function that takes its operands packed or in pages has parameters of its own (`conformance.calling.plain_stored`).

A function returns `out`, or `(out, {"logsumexp": ..., "max_logits": ...})` with `save_residuals=True`. An entry that is
missing is a residual that it does not offer.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import numpy as np

from cases import mask_spec
from cases.case import OPT_IN, Case
from cases.inputs import draw
from cases.masks import Causal, Full, Mask, Window, conjuncts
from cases.operands import GRADIENT_OF, REMOVABLE, RESIDUALS
from cases.serving.spec import Kind
from conformance.calling import plain_stored, stored
from conformance.contract import (
    Arithmetic,
    BehindMask,
    CausalFrom,
    EmptyRows,
    Implementation,
    Products,
    reject_unknown_choices,
)

_OPTIONS = ("causal", "window", "mask", *(operand.name for operand in REMOVABLE), "save_residuals")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_ATTRIBUTE = "__attention_conformance__"


class NotAnAttentionFunction(TypeError):  # noqa: N818 -- a statement, as the message is
    """The object cannot be judged as an attention function; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a plain function declares beyond its signature; docs/contract.md, section 9, has the defaults."""

    arithmetic: Arithmetic = dataclasses.field(default_factory=Arithmetic)
    empty_rows: EmptyRows = "undefined"
    behind_mask: BehindMask = "any"
    causal: CausalFrom = "start"
    differentiable_residuals: bool = True
    memory: Literal["linear"] | None = None
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        reject_unknown_choices(self)
        if not isinstance(self.unsupported, Mapping):
            raise ValueError(f"unsupported must name features with their reasons, got {self.unsupported!r}")


def declare(
    *,
    products: Products = "exact",
    logits: Literal["f32", "input"] = "f32",
    softmax: Literal["f32", "input"] = "f32",
    group_sums: Literal["f32", "input"] = "f32",
    block_sums: int | None = None,
    scaled_q: bool = False,
    residuals: Literal["f32", "input"] = "f32",
    empty_rows: EmptyRows = "undefined",
    behind_mask: BehindMask = "any",
    causal: CausalFrom = "start",
    differentiable_residuals: bool = True,
    memory: Literal["linear"] | None = None,
    unsupported: Mapping[str, str] | None = None,
) -> Callable[[_Function], _Function]:
    """Decorate a plain attention function with what its signature cannot say.

    Args:
      products: how it multiplies f32 operands.
      logits: `"input"` if bf16 and f16 logits are rounded to the operands' dtype before the softmax.
      softmax: `"input"` if the softmax itself, and its backward pass, are in the operands' dtype.
      group_sums: `"input"` if dk and dv are summed over the query heads of a group in the operands' dtype.
      block_sums: how many keys or queries are summed in f32 before the sum so far is rounded to the operands' dtype.
      scaled_q: True if `q * scale` is rounded to the operands' dtype before the product.
      residuals: `"input"` if residuals are returned in the operands' dtype.
      empty_rows: what it returns for queries that may attend to nothing.
      behind_mask: `"finite"` if keys and values behind the mask must be finite.
      causal: where queries stand for `causal=True` and `window` where T is not S: `"start"`, the first at the first
        key, or `"end"`, the last at the last.
      differentiable_residuals: False if `logsumexp` carries no gradient.
      memory: `"linear"` if temporary memory of forward and backward grows no faster than the lengths.
      unsupported: feature name (`python -m conformance list features`) to the reason why it is not supported.

    Raises:
      ValueError: for a word that is none of those there are.
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
        empty_rows=empty_rows,
        behind_mask=behind_mask,
        causal=causal,
        differentiable_residuals=differentiable_residuals,
        memory=memory,
        unsupported={} if unsupported is None else unsupported,
    )

    def mark(function: _Function) -> _Function:
        setattr(function, _ATTRIBUTE, declaration)
        return function

    return mark


def from_function(function: Callable[..., Any], name: str, *, products: Products | None = None) -> Implementation:
    """The implementation that a plain function is.

    Args:
      function: the function, possibly decorated with `declare`.
      name: how reports name it.
      products: overrides how it declares to multiply f32 operands.

    Raises:
      NotAnAttentionFunction: if its signature cannot take `q, k, v`, or needs parameters that nobody can fill.
    """
    signature = _signature(function, name)
    kind = _storage(signature, name)
    parameters = _options(signature, name, _OPTIONS if kind is None else plain_stored.OPTIONS[kind])
    others = tuple(name for name in list(signature.parameters)[3:] if name not in parameters)
    declaration = _declaration(function)
    has = [operand.name for operand in REMOVABLE if operand.name in parameters]
    # Pages are a cache, which is read.
    pulled = () if kind == "paged" else ("q", "k", "v", *has)
    gradients = frozenset(GRADIENT_OF[name] for name in pulled if name in GRADIENT_OF)
    stated = _stated(signature)
    narrow = "input" in (declaration.arithmetic.logits, declaration.arithmetic.softmax)

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        keep = {n: value for n, value in options.items() if value is not None and value is not False}
        for option in keep:
            if option not in parameters:
                raise NotImplementedError(f"{name} has no parameter {option!r}")
        return function(q, k, v, **{**stated, **keep})

    if kind is not None:
        vars(call)["__signature__"] = signature  # which says whether it is told how many sequences there are
    implementation = Implementation(
        name=name,
        call=call,
        description=(inspect.getdoc(_innermost(function)) or "").split("\n")[0],
        unsupported={**_missing(parameters, others), **declaration.unsupported},
        offers=OPT_IN.intersection(has),
        supports_case=PlainSupport(parameters, declaration.causal, narrow, kind, others),
        arithmetic=dataclasses.replace(declaration.arithmetic, products=products or declaration.arithmetic.products),
        residuals=frozenset(RESIDUALS if "save_residuals" in parameters else ()),
        differentiable_residuals=frozenset(),
        gradients=gradients,
        empty_rows=declaration.empty_rows,
        memory=declaration.memory,
        behind_mask=declaration.behind_mask,
        lower_mask=plain_stored.lowering(parameters, kind) if kind else _lowering(parameters, declaration.causal),
        storage=kind,
        refuses_by_signature=True,
    )
    residuals = _returned_residuals(implementation) if implementation.residuals else frozenset()
    differentiable = residuals & {"logsumexp"} if declaration.differentiable_residuals else frozenset()
    return dataclasses.replace(implementation, residuals=residuals, differentiable_residuals=differentiable)


_PHASES: tuple[dict[str, Any], ...] = ({"phase": "train"}, {"phase": "prefill"}, {"phase": "decode", "q_length": 1})


def _returned_residuals(implementation: Implementation) -> frozenset[str]:
    """The residuals in what the call returns, seen by tracing it once on a plain case that is supported.

    If the call raises, or returns something else, all residuals: then the checks say what is wrong.
    """
    import jax  # imported late: reading a signature needs none of it

    storage = {None: None, "packed": "packed", "paged": "paged16"}[implementation.storage]
    implementation = stored.on_dense_operands(implementation)
    # What is not for training, or for nothing but steps, is not supported on the first of these.
    phases = _PHASES if storage is None else _PHASES[1:]
    for phase, dtype, mask in itertools.product(phases, ("f32", "bf16", "f16"), ("full", "causal")):
        case = Case(**phase, dtype=dtype, mask=mask, storage=storage)
        if implementation.supports(case) is not None:
            continue
        problem = draw(case)
        static, extra = implementation.lower_mask(
            problem.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length
        )
        if problem.storage is not None:
            extra = {**extra, "storage": stored.given(problem.storage, implementation.behind_mask)}
        call = functools.partial(implementation.call, **static, save_residuals=True)
        try:
            returned = jax.eval_shape(call, problem.q, problem.k, problem.v, **extra)
        except Exception:  # whatever it is, a check will say so, with the case
            continue
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            known = frozenset(RESIDUALS) & set(returned[1])
            if known or not returned[1]:
                return known
    return implementation.residuals


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that partial application wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _declaration(function: Callable[..., Any]) -> Declaration:
    inner = getattr(_innermost(function), _ATTRIBUTE, Declaration())
    found: Declaration = getattr(function, _ATTRIBUTE, inner)
    return found


def _stated(signature: inspect.Signature) -> dict[str, Any]:
    """Options to pass although the case has no such operand: leaving them out would mean something else, or raise."""
    stated: dict[str, Any] = {}
    for p in signature.parameters.values():
        required = p.default is p.empty and p.kind is not p.VAR_KEYWORD
        if p.name in ("causal", "save_residuals") and p.default is not False:
            stated[p.name] = False
        elif p.name in _OPTIONS and required:
            stated[p.name] = None
    return stated


def _signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    if not callable(function):
        raise NotAnAttentionFunction(f"{name} is a {type(function).__name__}, not a function or an Implementation")
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise NotAnAttentionFunction(f"{name} has no signature that can be read: {error}") from error


def _without_types(signature: inspect.Signature) -> inspect.Signature:
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=signature.empty)


def _storage(signature: inspect.Signature, name: str) -> Kind | None:
    parameters = [p.name for p in list(signature.parameters.values())[3:]]
    kind = plain_stored.kind_of(parameters)
    if kind is not None and (lacks := plain_stored.lacking(parameters, kind)):
        raise NotAnAttentionFunction(f"{name}{_without_types(signature)} {lacks}")
    return kind


def _options(signature: inspect.Signature, name: str, known: tuple[str, ...]) -> frozenset[str]:
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) < 3 and not variadic:
        raise NotAnAttentionFunction(
            f"{name}{_without_types(signature)} does not take q, k, v: "
            f"an attention function takes them as its first three arguments"
        )
    for p in positional[:3]:
        if p.name in known:
            raise NotAnAttentionFunction(
                f"{name}{signature} takes {p.name!r} where q, k or v must be: an attention function takes these first"
            )
    for p in parameters:
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if required and p not in positional[:3] and (p.name not in known or p.kind is p.POSITIONAL_ONLY):
            raise NotAnAttentionFunction(
                f"{name}{signature} needs the argument {p.name!r}, which is none of {', '.join(known)} by keyword: "
                f"give it a default or wrap the function"
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(known) - OPT_IN  # who takes whatever there is has not said that it knows these
    return frozenset(p.name for p in parameters if p.name in known and p.kind is not p.POSITIONAL_ONLY)


def _missing(parameters: frozenset[str], others: Iterable[str]) -> dict[str, str]:
    names = [operand.name for operand in REMOVABLE if operand.name not in parameters]
    return {name: f"the function has no parameter {name!r}{_meant(name, others)}" for name in names}


def _meant(name: str, others: Iterable[str]) -> str:
    """Parameters of other names that may mean `name`, as `is_causal` does, in words; empty if there are none."""
    alike = [repr(other) for other in others if name in other]
    return f" (nothing is passed to its {' and '.join(alike)})" if alike else ""


@dataclasses.dataclass(frozen=True)
class PlainSupport:
    """Which masks and values a plain function supports, by what its signature and its declarations say.

    Attributes:
      parameters: the options that it has.
      causal: where queries stand for `causal=True` and `window`.
      narrow: whether its logits are in the dtype of the operands.
      storage: how it takes its operands, none if dense.
      others: its further parameters, to which nothing is passed.
    """

    parameters: frozenset[str]
    causal: CausalFrom
    narrow: bool
    storage: Kind | None = None
    others: tuple[str, ...] = ()

    def __call__(self, case: Case) -> str | None:
        """Why the function does not support `case`, or None if it does."""
        if self.narrow and case.dtype == "f16" and case.distribution == "huge":
            return "huge: logits beyond 65504, the largest number of f16, in which they are declared to be"
        if self.storage is not None:
            return plain_stored.unsupported(case, self.parameters, self.storage)
        if case.mask == "full" or "mask" in self.parameters:
            return None
        mask = mask_spec.build(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
        _, left = _split(mask, self.parameters, _first(self.causal, case.q_length, case.kv_length))
        if left is None:
            return None
        kind = mask_spec.features(case.mask)[0]
        meant = _meant(kind, self.others) or _meant("mask", self.others)
        return f"{kind}: the function has no parameter 'mask'{meant}"


def _first(causal: CausalFrom, q_length: int, kv_length: int) -> int:
    """The key at which the first query stands for `causal=True` and `window`."""
    return 0 if causal == "start" else kv_length - q_length


def _split(mask: Mask, parameters: frozenset[str], first: int) -> tuple[dict[str, Hashable], Mask | None]:
    """`causal` and `window`, if the function has them and the mask is made of them; and what is left of the mask."""
    static: dict[str, Hashable] = {}
    left: Mask | None = None
    for part in conjuncts(mask):
        if isinstance(part, Full):
            continue
        if part == Causal(first) and "causal" in parameters and "causal" not in static:
            static["causal"] = True
        elif isinstance(part, Window) and part.offset == first and "window" in parameters and "window" not in static:
            static["window"] = (part.left, part.right)
        else:
            left = part if left is None else left & part
    return static, left


def _lowering(
    parameters: frozenset[str], causal: CausalFrom
) -> Callable[[Mask, int, int, int, int], tuple[Mapping[str, Hashable], Mapping[str, np.ndarray]]]:
    def lower(
        mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
    ) -> tuple[Mapping[str, Hashable], Mapping[str, np.ndarray]]:
        static, left = _split(mask, parameters, _first(causal, q_length, kv_length))
        return static, ({} if left is None else {"mask": left.dense(q_length, kv_length)})

    return lower
