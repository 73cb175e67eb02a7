"""What an implementation is: the canonical call, what it declares, and operand validation.

The canonical call (docs/contract.md, section 1):

    call(q, k, v, *, mask, segment_ids=None, soft_cap=None, sinks=None, bias=None, scale=None, save_residuals=False)

with the operands of `cases.operand_registry`, which has their shapes, and `mask` a `cases.masks.Mask`. It returns
`out [B, T, N, V]` in q's dtype, or `(out, residuals)` with `save_residuals=True`, where residuals maps `"logsumexp"`
and `"max_logits"` to f32 `[B, N, T]`. An operand that has to be offered is a parameter only where it is: `kv_scales`,
with k and v in int8, int4 or float8_e4m3fn, where a quantised cache is offered, `alibi_slopes`, and `score_mod`, a
function `(score, b, n, i, j) -> score`.

An implementation may also offer attention that is not normalised, as a part to be merged with others (contract,
section 4):

    parts(q, k, v, *, mask, soft_cap=None, sinks=None, scale=None) -> (out, max, sum)

f32 of `[B, T, N, V]`, `[B, T, N, 1]` and `[B, T, N, 1]`, with `out / sum` attention, and `max` the largest logit, the
sink among them, that the others were shifted by; zero, -inf and zero where there is no key.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from cases import mask_spec
from cases.case import FEATURES, OPT_IN, Case
from cases.masks import Full, Mask, MaskFunction, has_formula, iter_leaves
from cases.operand_registry import GRADIENTS, RESIDUALS
from cases.quantization import STORED
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.stored_cases import find_refusal, lower_sides
from conformance.tunable import Tunable

EmptyRows = Literal["zero", "mean", "undefined"]
BehindMask = Literal["any", "finite"]
Products = Literal["exact", "tf32", "bf16"]
CausalFrom = Literal["start", "end"]


def reject_unknown_choices(declared: object) -> None:
    """Refuse a declaration that is none of those there are.

    Raises:
      ValueError: if a field of the dataclass that is one of a few words has another value.
    """
    for name, choices in _list_choices(type(declared)).items():  # type: ignore[arg-type] # classes can be hashed
        if (value := getattr(declared, name)) not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


@functools.cache
def _list_choices(declaring: type) -> dict[str, tuple[Any, ...]]:
    """The fields that are one of a few words, or that or None."""
    found = {}
    for name, hint in get_type_hints(declaring).items():
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if any(get_origin(part) is Literal for part in parts):
            found[name] = tuple(x for part in parts for x in (get_args(part) or (None,)))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How an implementation computes; error bounds follow from it (contract, section 6).

    Attributes:
      products: how f32 operands are multiplied. bf16 and f16 operands always multiply exactly into f32.
      logits: dtype of the logits between the two products, `"f32"` or `"input"`.
      softmax: dtype of the softmax, `"f32"` or `"input"`: of the logits and all that happens to them, of the weights,
        their sum and the probabilities, and of the same on the way back. A sum is still accumulated in f32 and rounded
        at its end.
      group_sums: dtype in which dk and dv are summed over the query heads of a group, `"f32"` or `"input"`.
      block_sums: how many keys (of `out` and dq) or queries (of dk and dv) are summed in f32 before the sum so far is
        rounded to the operands' dtype; none if sums stay in f32 to their end.
      probabilities: dtype in which probabilities and their gradient enter a product, `"input"` or `"f32"`.
      scaled_q: True if `q * scale` is rounded to the operands' dtype before the product.
      residuals: dtype of the returned residuals, `"f32"` or `"input"`.
      cache: dtype in which stored keys and values, multiplied by their scales, enter a product, `"f32"` or `"input"`.
    """

    products: Products = "exact"
    logits: Literal["f32", "input"] = "f32"
    softmax: Literal["f32", "input"] = "f32"
    group_sums: Literal["f32", "input"] = "f32"
    block_sums: int | None = None
    probabilities: Literal["input", "f32"] = "input"
    scaled_q: bool = False
    residuals: Literal["f32", "input"] = "f32"
    cache: Literal["f32", "input"] = "f32"

    def __post_init__(self) -> None:
        reject_unknown_choices(self)
        whole = isinstance(self.block_sums, int) and not isinstance(self.block_sums, bool)
        if self.block_sums is not None and not (whole and self.block_sums > 0):
            raise ValueError(
                f"block_sums must be a whole number of keys or queries, at least 1, got {self.block_sums!r}"
            )


Lowering = Callable[[Mask, int, int, int, int], tuple[Mapping[str, Hashable], Mapping[str, Any]]]


def structured_mask(
    mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
    """The default lowering: the call gets the mask object itself, one with an array to be traced as an operand."""
    del batch, num_q_heads, q_length, kv_length
    if any(leaf.traced for leaf in iter_leaves(mask)):
        return {}, {"mask": mask}
    return {"mask": mask}, {}


def mask_function(
    mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
    """The lowering for calls that take `mask_mod(b, n, i, j) -> booleans` (contract, section 3); none of a full mask.

    A mask that is no formula of places is unsupported.
    """
    del batch, num_q_heads, q_length, kv_length
    return ({} if isinstance(mask, Full) else {"mask_mod": MaskFunction(mask)}), {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The accelerator that a kernel is written for, and how it is run and compiled without one; by default, none.

    Attributes:
      platform: `"tpu"` or `"gpu"`, none for portable code.
      interpreted: True where this process runs the kernel in an interpreter instead of on its accelerator.
      absent: why this process cannot run it at all, none if it can: its accelerator is missing and nothing interprets
        it, or its library is not installed. Its cases are unjudged, for this reason.
      native: the canonical call lowered for `platform`'s real compiler, never interpreted; none if there is no such
        call. It is compiled for every generation of the accelerator, on machines without one too.
      under_interpreter: `parameters -> call`: the canonical call run by JAX's interpreter of TPU kernels, or of
        Mosaic GPU kernels, with these `InterpretParams` or `InterpretGPUParams`. It gets cases with one batch row only,
        since the interpreter of TPU kernels has no `vmap`; one of decode with lengths, where the kernel has a batch
        axis of its own; and stored ones, of several sequences.
    """

    platform: str | None = None
    interpreted: bool = False
    absent: str | None = None
    native: Callable[..., Any] | None = None
    under_interpreter: Callable[[Any], Callable[..., Any]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """An attention implementation and what it declares.

    Attributes:
      name: how reports and `--impl` name it.
      call: the canonical call (module docstring).
      description: one line for `list`.
      unsupported: feature name (`cases.case.FEATURES`) to the reason why it is not supported. A call that asks for
        such a feature must raise `NotImplementedError`.
      offers: which of `cases.case.OPT_IN` it has; the others are unsupported without being named.
      supports_case: further limits, as `case -> reason or None`.
      arithmetic: how it computes.
      residuals: which of `cases.operand_registry.RESIDUALS` it returns.
      differentiable_residuals: which of them carry gradients.
      gradients: which of `cases.operand_registry.GRADIENTS` it offers, of optional operands only those that it takes.
      empty_rows: `out` of a query that may attend to nothing: `"zero"` (then `logsumexp` is -inf or the sink, and
        `max_logits` -inf), `"mean"` of v over all keys, or `"undefined"`.
      behind_mask: `"any"` if nothing in keys and values that no query may attend to can matter, `"finite"` if they
        must be finite.
      validates: True if wrong operands raise `ValueError` or `TypeError` naming the operand (contract, section 7).
      lower_mask: `(mask, B, N, T, S) -> (static keywords, array keywords)`: how the mask reaches `call`.
      storage: the name of a storage form (`cases.storage_forms.form_registry`), if `call` takes its operands in that
        form (contract, section 8) and in no other; none for dense operands. The mask reaches stored calls as `causal`
        or `window`, except for dense latents. The gradient of a latent is `dk`.
      writes_pages: True if a `"paged"` call is `call(q, k, v, k_pages, v_pages, ...)`, and returns the pages as well.
      accelerator: the accelerator that the kernel is written for, and how it is run without one.
      refuses_by_signature: True if unsupported features cannot even be asked for, so that there is nothing to refuse.
      variants: other calls that must give the same results, by name: other block sizes, other schedules.
      memory: `"linear"` if the temporary memory of forward and backward grows no faster than the lengths.
      parts: the call that gives a part (module docstring); the mask reaches it as `lower_mask` makes it.
      merge: a sequence of parts to the part over the keys of all; none if it offers none of its own.
      checkpoint_names: names under which the residuals of the backward are tagged for `jax.checkpoint` policies.
      front_end: a model's own front end in place of `conformance.reference.front_end_reference.apply_front_end`, with the signature of
        that one.
      tunable: block sizes and the like that `python -m conformance tune` may choose.
      devices: how many devices a call takes; with fewer it is not judged.
    """

    name: str
    call: Callable[..., Any]
    description: str = ""
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)
    offers: frozenset[str] = frozenset()
    supports_case: Callable[[Case], str | None] | None = None
    arithmetic: Arithmetic = Arithmetic()
    residuals: frozenset[str] = frozenset(RESIDUALS)
    differentiable_residuals: frozenset[str] = frozenset({"logsumexp"})
    gradients: frozenset[str] = frozenset(GRADIENTS)
    empty_rows: EmptyRows = "undefined"
    behind_mask: BehindMask = "any"
    validates: bool = False
    lower_mask: Lowering = structured_mask
    storage: str | None = None
    writes_pages: bool = False
    accelerator: Accelerator = Accelerator()
    tunable: Tunable | None = None
    variants: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    memory: Literal["linear"] | None = None
    parts: Callable[..., Any] | None = None
    merge: Callable[[Sequence[Any]], Any] | None = None
    checkpoint_names: tuple[str, ...] = ()
    refuses_by_signature: bool = False
    front_end: Callable[..., Any] | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise ValueError(f"name must be text that shows as it is, got {self.name!r}")
        if not callable(self.call):
            raise ValueError(f"{self.name}: call must be a function, got a {type(self.call).__name__}")
        reject_unknown_choices(self)
        self._apply_storage(self.storage)
        for field, names, known in (
            ("unsupported", self.unsupported, FEATURES),
            ("offers", self.offers, OPT_IN),
            ("residuals", self.residuals, RESIDUALS),
            ("differentiable_residuals", self.differentiable_residuals, self.residuals),
            ("gradients", self.gradients, GRADIENTS),
        ):
            if unknown := sorted(set(names) - set(known)):
                raise ValueError(f"{self.name}: {field} names {unknown}, known are {sorted(known)}")

    def _apply_storage(self, name: str | None) -> None:
        if name is not None and name not in FORMS:
            raise ValueError(f"storage must be one of {', '.join(map(repr, (*FORMS, None)))}, got {name!r}")
        if self.writes_pages and name != "paged":
            raise ValueError(f"{self.name}: writes_pages needs storage 'paged', got {name!r}")
        if name is None:
            return
        form = FORMS[name]
        if form.is_tied:
            object.__setattr__(self, "gradients", self.gradients - {"dv"})
        object.__setattr__(self, "offers", self.offers | {name})
        if form.is_dense:
            return
        if self.empty_rows == "mean":
            raise ValueError(f"{self.name}: empty_rows 'mean' has no meaning for a {name} call, which has no S keys")
        if self.lower_mask is structured_mask:
            object.__setattr__(self, "lower_mask", functools.partial(lower_sides, form=name))

    def supports(self, case: Case) -> str | None:
        """Why the implementation does not support `case`, or None if it does."""
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


def validate_operands(
    q: Any,
    k: Any,
    v: Any,
    *,
    segment_ids: tuple[Any, Any] | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Any = None,
    scale: float | None = None,
    kv_scales: tuple[Any, Any] | None = None,
    alibi_slopes: Any = None,
    score_mod: Any = None,
    dtypes: Collection[str] = FLOATS,
) -> None:
    """Check the operands of the canonical call; with `kv_scales`, k and v are as a cache stores them.

    `dtypes` are the names of those that q, k, v, sinks, bias and slopes may have.

    Raises:
      TypeError: naming an operand that is no array, or no number that is known before tracing, and what to do.
      ValueError: naming the operand, what it is and what it must be.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _validate_array(name, x)
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
    if kv_scales is not None:
        _validate_cache(k, v, kv_scales)
    elif not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    _validate_dtype("q" if kv_scales is not None else "q, k and v", q, dtypes)
    (batch, q_length, num_q_heads, _), kv_length = q.shape, k.shape[1]
    if segment_ids is not None:
        _validate_pair("segment_ids", segment_ids)
        for name, ids, length in zip(("q", "kv"), segment_ids, (q_length, kv_length), strict=True):
            _validate_array(f"segment_ids of {name}", ids)
            if np.shape(ids) != (batch, length):
                raise ValueError(f"segment_ids of {name} must have shape {(batch, length)}, got {np.shape(ids)}")
        for name, ids in zip(("q", "kv"), segment_ids, strict=True):
            if not np.issubdtype(ids.dtype, np.integer):
                raise ValueError(f"segment_ids of {name} must be integers, of dtype int32, got {ids.dtype}")
    _validate_number("soft_cap", soft_cap, none="no cap")
    _validate_number("scale", scale, none="1/sqrt(head_dim)")
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a function (score, b, n, i, j) -> score, got {type(score_mod).__name__}")
    for name, x, one in (("sinks", sinks, "logit"), ("alibi_slopes", alibi_slopes, "slope")):
        if x is not None:
            _validate_array(name, x)
            if np.shape(x) != (num_q_heads,):
                raise ValueError(f"{name} must have shape {(num_q_heads,)}, one {one} a query head, got {np.shape(x)}")
            _validate_dtype(name, x, dtypes)
    if bias is not None:
        _validate_array("bias", bias)
        full = (batch, num_q_heads, q_length, kv_length)
        if np.ndim(bias) != 4 or not all(n in (1, m) for n, m in zip(np.shape(bias), full, strict=True)):
            raise ValueError(f"bias must have 4 axes broadcastable to {full}, got shape {np.shape(bias)}")
        _validate_dtype("bias", bias, dtypes)


def _validate_array(name: str, x: Any) -> None:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: make one of it by jax.numpy.asarray")


def _validate_pair(name: str, x: Any) -> None:
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise TypeError(f"{name} must be a pair of arrays, one of the queries or keys and one of the keys or values")


def _validate_dtype(name: str, x: Any, dtypes: Collection[str]) -> None:
    if str(x.dtype) not in dtypes:
        raise ValueError(f"{name} must have dtype {' or '.join(dtypes)}, got {x.dtype}: cast with astype")


def _validate_number(name: str, x: Any, *, none: str) -> None:
    if x is None:
        return
    try:
        number = None if isinstance(x, str | bool) else float(x)
    except (TypeError, ValueError):  # what JAX raises of a number that is traced, among others
        number = None
    if number is None:
        raise TypeError(
            f"{name} must be a number that is known before tracing (None for {none}), got {type(x).__name__}: "
            f"pass a Python number, or make it static in jit"
        )
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite (None for {none}), got {x}")


def _validate_cache(k: Any, v: Any, kv_scales: tuple[Any, Any]) -> None:
    names = ", ".join(dtype.name for dtype in STORED.values())
    _validate_pair("kv_scales", kv_scales)
    if k.dtype != v.dtype or k.dtype not in STORED.values():
        raise ValueError(f"k and v must have one dtype of {names} with kv_scales, got dtype {k.dtype} and {v.dtype}")
    for name, scales in zip(("k", "v"), kv_scales, strict=True):
        _validate_array(f"kv_scales of {name}", scales)
        fits = np.ndim(scales) == 3 and all(n in (1, m) for n, m in zip(np.shape(scales), k.shape[:3], strict=True))
        if not fits or np.shape(scales)[2] != k.shape[2]:
            full = "[batch or 1, length or 1, heads]"
            raise ValueError(f"kv_scales of {name} must be {full} of {k.shape[:3]}, got {np.shape(scales)}")


def validate_mask(
    mask: Any, batch: int, num_q_heads: int, q_length: int, kv_length: int, *, offers: Collection[str] = ()
) -> None:
    """Check that `mask` fits the operands; `offers` are the features of masks that have to be offered.

    Raises:
      ValueError: naming the mask, what it is and what it must be.
      NotImplementedError: for a mask that needs a kernel of its own and is not offered: one that depends on q and k, a
        window that moves with each batch row.
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a cases.masks.Mask, got {type(mask).__name__}; wrap booleans in Dense")
    for leaf in iter_leaves(mask):
        if leaf.refusal and leaf.feature not in offers:
            raise NotImplementedError(f"{leaf.feature}: this implementation {leaf.refusal}")
    mask.check_operands(batch, num_q_heads, q_length, kv_length)
