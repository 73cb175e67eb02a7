"""Define an implementation under test: its call, its declarations, and the validation of its operands.

Every kernel reaches the judge as an `Implementation`: a function with the signature below and what the kernel declares
about it.

The canonical call (docs/contract.md, section 1):

    call(q, k, v, *, mask, segment_ids=None, soft_cap=None, sinks=None, bias=None, scale=None, save_residuals=False)

Its operands are those of `cases.operand_registry`, which has their shapes, and `mask` is a `cases.masks.Mask`. It
returns `out [B, T, N, V]` in q's dtype, or `(out, residuals)` with `save_residuals=True`. Residuals map `"logsumexp"`
and `"max_logits"` to f32 `[B, N, T]`, and have the `further_results` too. An opt-in operand is a parameter only of
calls that offer it: `kv_scales` with k and v in int8, int4 or float8_e4m3fn, `alibi_slopes`, `logit_scale`, and
`score_mod`, a function `(score, b, n, i, j) -> score`, which with `captures` may be a `jax.tree_util.Partial`.

An implementation may also offer `parts`: attention over some of the keys that is not normalised, to be merged with
parts over the other keys (docs/contract.md, section 4):

    parts(q, k, v, *, mask, soft_cap=None, sinks=None, scale=None) -> (out, max, sum)

These are f32 `[B, T, N, V]`, `[B, T, N, 1]` and `[B, T, N, 1]`. `out / sum` is attention. `max` is the logit that was
subtracted from all others: the largest one, the sink included. Without keys, `out`, `max` and `sum` are zero, -inf and
zero.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from cases import mask_spec
from cases.case import FEATURES, OPT_IN, Case
from cases.masks import Full, Mask, MaskFunction, has_formula, iter_leaves
from cases.name_suggestions import suggest_name
from cases.operand_registry import FURTHER_RESULTS, GRADIENTS, OPTIONAL, RESIDUALS
from cases.operand_validation import CallSizes, validate_array, validate_dtype
from cases.quantization import STORED
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.page_writes import WRITE_FORMS
from cases.storage_forms.stored_cases import find_refusal, lower_stored_mask
from impls.contract.argument_validation import validate_arguments
from impls.contract.declarations import (
    Arithmetic,
    Behaviour,
    BehindMask,
    CausalFrom,
    EmptyRows,
    Formulas,
    NegativeIds,
    OpenSide,
    Products,
    Refuses,
    ScaledQ,
    document,
)
from impls.contract.tunable import Tunable

__all__ = [
    "FLOATS",
    "Accelerator",
    "Arithmetic",
    "BehindMask",
    "CausalFrom",
    "EmptyRows",
    "Formulas",
    "Implementation",
    "Lowering",
    "NegativeIds",
    "OpenSide",
    "Products",
    "Refuses",
    "ScaledQ",
    "mask_function",
    "structured_mask",
    "validate_mask",
    "validate_operands",
]

Lowering = Callable[[Mask, int, int, int, int], tuple[Mapping[str, Hashable], Mapping[str, Any]]]


def structured_mask(
    mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
    """Pass the mask object itself as the argument `mask`; this is the default lowering.

    The mask is a traced operand if it, or a mask inside it, has fields that JAX traces. Otherwise it is static.
    """
    del batch, num_q_heads, q_length, kv_length
    if any(leaf.traced for leaf in iter_leaves(mask)):
        return {}, {"mask": mask}
    return {"mask": mask}, {}


def mask_function(
    mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
    """Lower a mask for calls that take `mask_mod(b, n, i, j) -> booleans` (docs/contract.md, section 3).

    A full mask gives no `mask_mod`. A mask that is not a formula of positions is unsupported.
    """
    del batch, num_q_heads, q_length, kv_length
    return ({} if isinstance(mask, Full) else {"mask_mod": MaskFunction(mask)}), {}


@validate_arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The accelerator that a kernel is written for, and how to run and compile the kernel without it.

    The defaults describe portable code.

    Attributes:
      platform: `"tpu"` or `"gpu"`; None for portable code.
      interpreted: True where this process runs the kernel in an interpreter instead of on its accelerator.
      absent: why this process cannot run the kernel; None if it can. For example, the accelerator is missing and no
        interpreter runs the kernel, or a library is not installed. The kernel's cases are then unjudged, with this
        reason.
      native: the canonical call lowered for `platform`'s real compiler, never interpreted; None if there is no such
        call. The judge compiles it for every generation of the accelerator, also on machines without an accelerator.
      under_interpreter: `parameters -> call`: the canonical call run by JAX's interpreter of TPU kernels, or of Mosaic
        GPU kernels, with these `InterpretParams` or `InterpretGPUParams`. It gets cases with one batch row only, since
        the interpreter of TPU kernels has no `vmap`. There are two exceptions: one decode case with lengths, where the
        kernel has a batch axis of its own, and stored operands, which hold several sequences.
    """

    platform: Literal["tpu", "gpu"] | None = None
    interpreted: bool = False
    absent: str | None = None
    native: Callable[..., Any] | None = None
    under_interpreter: Callable[[Any], Callable[..., Any]] | None = None


@validate_arguments
@document
@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation(Behaviour):
    """An attention implementation and what it declares.

    Attributes:
      name: how reports and `--impl` name it.
      call: the canonical call (module docstring).
      description: one line for `list`.
      unsupported: feature name (`cases.case.FEATURES`) to the reason why it is not supported. A call that asks for such
        a feature must raise `NotImplementedError`.
      offers: the features of `cases.case.OPT_IN` that it supports. Those not listed here are unsupported.
      supports_case: a function `case -> reason or None` for further limits: why a case is not supported.
      arithmetic: the dtypes and roundings of its computation.
      formulas: where its formulas differ from the contract's.
      residuals: the names in `cases.operand_registry.RESIDUALS` that it returns.
      further_results: the names in `cases.operand_registry.FURTHER_RESULTS` that it returns among its residuals.
      differentiable_residuals: the returned residuals that carry gradients.
      gradients: the names in `cases.operand_registry.GRADIENTS` that it offers. Gradients of optional operands that it
        does not take are ignored.
      validates: True if wrong operands raise `ValueError` or `TypeError` naming the operand (docs/contract.md, section
        7).
      lower_mask: `(mask, B, N, T, S) -> (static keywords, array keywords)`: how the mask reaches `call`.
      storage: the name of a storage form (`cases.storage_forms.form_registry`), if `call` takes its operands in that
        form (docs/contract.md, section 8) and in no other; None for dense operands. The mask reaches stored calls as
        `causal` or `window`, except for dense latents. The gradient of a latent is `dk`.
      writes_pages: True if the call gets new tokens, writes them into pages and returns the pages as well: a `"paged"`
        call `call(q, k, v, k_pages, v_pages, ...)`, or a `"latent_pages"` call `call(q_nope, q_pe, c_kv, k_pe,
        latent_pages, ...)`.
      accelerator: the accelerator that the kernel is written for, and how it is run without one.
      tunable: settings such as block sizes that `python -m conformance tune` may choose.
      variants: by name, other calls that must give the same results, for example with other block sizes or schedules.
      parts: the call that returns a part (module docstring). Its mask is lowered by `lower_mask`, as for `call`.
      merge: a function that merges a sequence of parts into the part over all their keys; None if it has none of its
        own.
      checkpoint_names: names under which the residuals of the backward are tagged for `jax.checkpoint` policies.
      refuses_by_signature: True if the signature has no parameter for unsupported features, so no call can request
        them.
      front_end: a model's own front end in place of `conformance.reference.front_end_reference.apply_front_end`, with
        the same signature.
      devices: the number of devices that a call needs. With fewer devices the implementation is not judged.
      on_devices: for context parallelism, `(number of devices, check_vma) -> call`: the call whose sequence so many
        devices share, in a `shard_map` with this `check_vma`. None if the number of devices is fixed.
      conventions: further declarations of the plain function that `call` adapts, as they are written in code; the
        verdict names them.
      redeclare: for an adapted plain function, `declarations -> Implementation`: the same function with some of its
        declarations replaced. None for others, whose call does not depend on declarations.
      unasked: parameters of the plain function that `call` adapts to which no run passes anything. If one is probably
        an operand (`cases.parameter_names`), the implementation does not conform.
      open_questions: what has to be answered before the declarations of the plain function count as meant. If there is
        a question, the implementation does not conform.
    """

    name: str
    call: Callable[..., Any]
    description: str = ""
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)
    offers: frozenset[str] = frozenset()
    supports_case: Callable[[Case], str | None] | None = None
    arithmetic: Arithmetic = Arithmetic()
    formulas: Formulas = Formulas()
    residuals: frozenset[str] = frozenset(RESIDUALS)
    further_results: frozenset[str] = frozenset()
    differentiable_residuals: frozenset[str] = frozenset({"logsumexp"})
    gradients: frozenset[str] = frozenset(GRADIENTS)
    validates: bool = False
    lower_mask: Lowering = structured_mask
    storage: str | None = None
    writes_pages: bool = False
    accelerator: Accelerator = Accelerator()
    tunable: Tunable | None = None
    variants: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    parts: Callable[..., Any] | None = None
    merge: Callable[[Sequence[Any]], Any] | None = None
    checkpoint_names: tuple[str, ...] = ()
    refuses_by_signature: bool = False
    front_end: Callable[..., Any] | None = None
    devices: int = 1
    on_devices: Callable[[int, bool], Callable[..., Any]] | None = None
    conventions: tuple[str, ...] = ()
    redeclare: Callable[..., Any] | None = None
    unasked: tuple[str, ...] = ()
    open_questions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name or not self.name.isprintable():
            raise ValueError(f"name must be text that shows as it is, got {self.name!r}")
        if self.devices < 1:
            raise ValueError(f"{self.name}: devices must be at least 1, got {self.devices}")
        self._apply_storage(self.storage)
        for field, names, known in (
            ("unsupported", self.unsupported, FEATURES),
            ("offers", self.offers, OPT_IN),
            ("residuals", self.residuals, RESIDUALS),
            ("further_results", self.further_results, FURTHER_RESULTS),
            ("differentiable_residuals", self.differentiable_residuals, self.residuals),
            ("gradients", self.gradients, GRADIENTS),
        ):
            if unknown := sorted(set(names) - set(known)):
                closest = suggest_name(unknown[0], known)
                raise ValueError(f"{self.name}: {field} names {unknown}, known are {sorted(known)}{closest}")

    def _apply_storage(self, name: str | None) -> None:
        """Refuse declarations that contradict the storage form, and set those that follow from it."""
        if name is not None and name not in FORMS:
            raise ValueError(f"storage must be one of {', '.join(map(repr, (*FORMS, None)))}, got {name!r}")
        if self.writes_pages and name not in WRITE_FORMS:
            raise ValueError(
                f"{self.name}: writes_pages needs storage {' or '.join(map(repr, WRITE_FORMS))}, got {name!r}"
            )
        if name is None:
            return
        form = FORMS[name]
        if self.further_results and self.writes_pages:
            raise ValueError(f"{self.name}: a call that writes pages has no further_results")
        if not form.is_dense and (weights := sorted(self.further_results - {"head_max_logits"})):
            raise ValueError(f"{self.name}: {weights[0]!r} has no shape for a {name} call, which has no S keys")
        if form.is_tied:
            object.__setattr__(self, "gradients", self.gradients - {"dv"})
        object.__setattr__(self, "offers", self.offers | {name})
        if form.is_dense:
            return
        if self.empty_rows == "mean":
            raise ValueError(f"{self.name}: empty_rows 'mean' has no meaning for a {name} call, which has no S keys")
        if self.lower_mask is structured_mask:
            object.__setattr__(self, "lower_mask", functools.partial(lower_stored_mask, form=name))

    @property
    def has_residual_call(self) -> bool:
        """Whether a call with `save_residuals=True` returns anything beside `out`."""
        return bool(self.residuals or self.further_results)

    def with_contract_logsumexp(self) -> Implementation:
        """Return the implementation with the contract's formula of `logsumexp` declared."""
        formulas = Formulas(soft_cap=self.formulas.soft_cap, scaled_bias=self.formulas.scaled_bias)
        return dataclasses.replace(self, formulas=formulas)

    def supports(self, case: Case) -> str | None:
        """Return why the implementation does not support `case`, or None if it does."""
        for feature in case.features:
            if feature in self.unsupported:
                return f"{feature}: {self.unsupported[feature]}"
            if feature in OPT_IN and feature not in self.offers:
                return f"{feature}: not declared ({FEATURES[feature]})"
        if stored := self.storage and find_refusal(case, self.storage, writes=self.writes_pages):
            return stored
        sizes = (case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
        if self.lower_mask is mask_function and not has_formula(mask_spec.build_mask(case.mask, *sizes)):
            return f"{mask_spec.list_mask_features(case.mask)[0]}: an array, and mask_mod is a function of places"
        return self.supports_case(case) if self.supports_case else None


FLOATS = ("float32", "bfloat16", "float16")
"""The dtypes of the operands, by name."""


def validate_operands(q: Any, k: Any, v: Any, *, dtypes: Collection[str] = FLOATS, **operands: Any) -> None:
    """Check the operands of the canonical call.

    Args:
      k: keys, in the dtype of a quantised cache if `operands` has `kv_scales`.
      v: values, in the same dtype as the keys.
      dtypes: names of the dtypes that floating-point operands may have.
      **operands: optional operands by name (`cases.operand_registry.OPTIONAL`); None for one that is not given.

    Raises:
      TypeError: an operand is not an array, or a number is not known before tracing; the message says what to do.
      ValueError: an operand is wrong. The message names the operand, what it is and what it must be.
    """
    given = {name: value for name, value in operands.items() if value is not None}
    if unknown := sorted(set(operands) - {operand.name for operand in OPTIONAL}):
        raise TypeError(f"the canonical call has no operand {', '.join(unknown)}")
    sizes = _validate_shapes(q, k, v)
    if "kv_scales" in given:
        _validate_stored_dtypes(k, v)
        validate_dtype("q", q, dtypes)
    else:
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
        validate_dtype("q, k and v", q, dtypes)
    for operand in OPTIONAL:
        if operand.name in given:
            operand.validate(operand.name, given[operand.name], sizes, dtypes)


def _validate_shapes(q: Any, k: Any, v: Any) -> CallSizes:
    """Raise unless q, k and v are arrays whose shapes fit each other; return their sizes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate_array(name, x)
        if np.ndim(x) != 4:
            raise ValueError(f"{name} must have 4 axes, [batch, length, heads, depth], got shape {np.shape(x)}")
        if 0 in x.shape:
            raise ValueError(f"{name} must have a size of at least 1 in batch, length, heads and depth, got {x.shape}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, length and heads, got k {k.shape} and v {v.shape}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}, q has {q.shape[0]}: they must be equal")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"k has head_dim {k.shape[3]}, q has {q.shape[3]}: they must be equal")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads, which must be a multiple of the {k.shape[2]} heads of k and v")
    return CallSizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def _validate_stored_dtypes(k: Any, v: Any) -> None:
    """Raise unless k and v have one of the dtypes that a quantised cache stores."""
    names = ", ".join(dtype.name for dtype in STORED.values())
    if k.dtype != v.dtype or k.dtype not in STORED.values():
        raise ValueError(f"k and v must have one dtype of {names} with kv_scales, got dtype {k.dtype} and {v.dtype}")


def validate_mask(
    mask: Any, batch: int, num_q_heads: int, q_length: int, kv_length: int, *, offers: Collection[str] = ()
) -> None:
    """Check that `mask` fits the operands; `offers` names the opt-in mask features that the implementation supports.

    Raises:
      ValueError: if the mask does not fit. The message says what the mask is and what it must be.
      NotImplementedError: if the mask needs a special kernel and `offers` does not name it. Such a mask depends on q
        and k, or is a window that moves with each batch row.
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a cases.masks.Mask, got {type(mask).__name__}; wrap booleans in Dense")
    for leaf in iter_leaves(mask):
        if leaf.refusal and (missing := [feature for feature in leaf.features if feature not in offers]):
            raise NotImplementedError(f"{missing[0]}: this implementation {leaf.refusal}")
    mask.check_operands(batch, num_q_heads, q_length, kv_length)
