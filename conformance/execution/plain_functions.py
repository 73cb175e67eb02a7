"""Build an `Implementation` from a plain function: an attention function without the harness's protocol.

The features of a plain function are read from its signature, and its residuals from one trace. A missing parameter is a
feature that the function does not support. docs/reference/plain-functions.md lists the parameters. A mask is passed in
up to eight of them (`plain_support`), as far as the function has them: `causal` and `window` for these conjuncts,
`kv_lengths`, `indices` and `local_window`, `moba`, `mask_mod` for other formulas of indices, and `mask` for the rest.
Without a parameter `soft_cap`, the soft cap is part of `score_mod`. A function that takes stored operands has other
parameters (`cases.storage_forms`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from cases.case import OPT_IN, Case
from cases.masks import FIRST_TOKENS, LOCAL_WINDOW
from cases.masks.mask_functions import MaskFunction
from cases.name_suggestions import suggest_or_list
from cases.operand_registry import FURTHER_RESULTS, GRADIENT_OF, REMOVABLE, RESIDUALS
from cases.operand_values import draw_problem
from cases.parameter_names import is_tuning
from cases.quantization import split_level
from cases.score_functions import FormulaScore, Score, ThenCapped
from cases.storage_forms.form_cases import load_form_cases
from cases.storage_forms.form_registry import FORMS, find_form
from cases.storage_forms.paged_form import QUERY_PARAMETERS
from cases.storage_forms.storage_form import FIRST_PARAMETER, MASK_PARAMETERS, StorageForm
from conformance.execution import indexer_functions, kernel_errors, plain_storage, plain_support, stored_calls
from conformance.execution.call_conventions import CALL_CONVENTIONS, convert_calls
from conformance.execution.plain_support import suggest_parameters
from impls.contract.declarations import (
    Arithmetic,
    Behaviour,
    Conventions,
    Formulas,
    Products,
    get_declaration,
    list_declared,
    redeclare,
    unwrap_partial,
)
from impls.contract.implementation import Implementation

# Parameters for masks that `**options` does not stand for.
_MASKS_BY_NAME = ("mask_mod", "kv_lengths", "indices", LOCAL_WINDOW, "moba")
_FUNCTIONS = ("mask_mod", "score_mod")  # parameters that are functions of places
# Parameters of dropout. A function has the rate and one of the others, or none of them.
_DROPOUT = ("dropout_rate", "dropout_key", "dropout_mask")
_OPTIONS: tuple[str, ...] = ("causal", "window", *_MASKS_BY_NAME, "mask", *(operand.name for operand in REMOVABLE))
_OPTIONS += (*_DROPOUT, "save_residuals")


_CONTEXT_DEVICES = 4  # the check `sharding` takes other numbers too
_NONE = re.compile(r"\bNone(Type)?\b")


class NotAnAttentionFunction(TypeError):
    """The object cannot be judged as an attention function; the message says why."""


def build_implementation(
    function: Callable[..., Any], name: str, *, products: Products | None = None
) -> Implementation:
    """Build an implementation from a plain function.

    Args:
      function: the function, possibly decorated with `declare`.
      products: overrides the declared precision of products of f32 operands.

    Raises:
      NotAnAttentionFunction: if its signature cannot take q, k and v (or those of its storage form), or has a required
        parameter that the harness does not know. Also if it declares to ignore what is no such parameter.
    """
    signature = _get_signature(function, name)
    if indexer_functions.is_indexer(signature):
        return indexer_functions.build_indexer(function, name, signature)
    form = _find_storage_form(signature, name)
    writes = plain_storage.find_write_form(signature, form)
    operands = ("q", "k", "v") if form is None else form.operands
    known = _OPTIONS if form is None else form.parameters
    if form is not None and writes is not None:
        known = plain_storage.list_writer_options(signature, form, writes)
        operands = () if form.is_tied else operands  # all of them are passed by name
    parameters = _find_options(signature, name, known, operands)
    declaration = get_declaration(function)
    if parameters.issuperset(_DROPOUT):  # the key decides, so a mask gets nothing, unless it is declared
        parameters -= {"dropout_key" if declaration.dropout_mask == "given" else "dropout_mask"}
    if "dropout_rate" not in parameters or not parameters & {*_DROPOUT[1:]}:
        parameters -= {*_DROPOUT}  # one without the other drops nothing
    if not parameters & {"q_scale", "q_descale"}:  # the dtype of `out` follows from that of q
        parameters -= {"out_dtype"}
    if "indices" not in parameters:
        parameters -= {LOCAL_WINDOW}
    others = _list_others(signature, len(operands), parameters)
    captures = declaration.captures
    if captures and form is not None:
        raise NotAnAttentionFunction(f"{name} declares captures, and stored operands have no functions of places")
    if captures and not parameters.intersection(_FUNCTIONS):
        raise NotAnAttentionFunction(f"{name} declares captures, and has no parameter mask_mod or score_mod")
    # The parameters, and the arrays that `mask_mod` captures where the function has no parameter for them.
    reachable = parameters | ({"mask", "segment_ids"} if captures and "mask_mod" in parameters else set())
    if wrong := [one for one in declaration.ignores if one not in others]:
        hint = suggest_or_list(wrong[0], others)
        raise NotAnAttentionFunction(f"{name} ignores {wrong[0]!r}, which is no parameter that gets nothing{hint}")
    settled = {*declaration.ignores, *_list_bound_arguments(function)}
    if products is not None:
        declaration = dataclasses.replace(declaration, products=products)
    if "soft_cap" not in parameters:  # the cap is the last step of `score_mod`, which comes after the bias
        declaration = dataclasses.replace(declaration, soft_cap="after_bias")
    has = [operand.name for operand in REMOVABLE if operand.name in reachable]
    pulled = () if form is not None and form.is_cache else ("q", "k", "v", *(n for n in has if n in GRADIENT_OF))
    if captures and "score_mod" in parameters:
        pulled = (*pulled, "score_table")
    differentiated = frozenset(GRADIENT_OF if declaration.gradients is None else declaration.gradients)
    gradients = frozenset(GRADIENT_OF[name] for name in pulled if name in differentiated)
    constants = frozenset(GRADIENT_OF) - differentiated
    explicit = _list_explicit_options(signature)
    if plain_storage.UPDATE in parameters:
        explicit[plain_storage.UPDATE] = True
    invoke = _refuse_by_value_error(function) if declaration.refuses == "ValueError" else function
    narrow = "input" in (declaration.logits, declaration.softmax)
    axes, order = declaration.context_axes, declaration.token_order
    if "dropout_mask" in parameters and declaration.dropout_mask not in ("given", Behaviour.dropout_mask):
        raise NotAnAttentionFunction(
            f"{name} declares dropout_mask={declaration.dropout_mask!r}, and takes the mask itself: its caller decides "
            "which weights are dropped"
        )
    if declaration.dropout_mask == "given" and "dropout_mask" not in parameters:
        raise NotAnAttentionFunction(f"{name} declares dropout_mask='given', and takes no dropout_mask")
    if axes and form is not None:
        raise NotAnAttentionFunction(f"{name} declares context_axes, and stored operands have no axis of tokens")

    def call_by_position(
        *operands: Any, devices: int = _CONTEXT_DEVICES, check_vma: bool = declaration.check_vma is True, **options: Any
    ) -> Any:
        if "score_mod" in parameters and "soft_cap" not in parameters and options.get("soft_cap") is not None:
            options["score_mod"] = _append_soft_cap(options.get("score_mod"), options.pop("soft_cap"))
        given = {n: value for n, value in options.items() if value is not None and value is not False}
        if plain_storage.UPDATE in options:
            given[plain_storage.UPDATE] = options[plain_storage.UPDATE]
        for option in given:
            if option not in reachable:
                raise NotImplementedError(f"{name} has no parameter {option!r}")
        given |= {n: _stop_gradient(given[n]) for n in constants if n in given}
        formulas = {n: given[n] for n in _FUNCTIONS if n in given}
        given |= {
            n: _build_closure(x) for n, x in formulas.items() if isinstance(x, MaskFunction | FormulaScore | ThenCapped)
        }
        if captures:
            from conformance.execution.captured_arrays import capture_arrays  # imports JAX

            given = capture_arrays(given, parameters, is_constant="score_table" in constants)
        # A latent, which stands in place of k, has the gradient of k.
        first = zip(("q", "k", "v"), operands, strict=False)
        operands = (*(_stop_gradient(x) if n in constants else x for n, x in first), *operands[3:])
        if declaration.negative_ids == "padding" and "segment_ids" in given:
            given["segment_ids"] = _mark_padding(*given["segment_ids"])
        if writes is not None:
            return plain_storage.call_page_writer(invoke, signature, writes, operands, {**explicit, **given})
        run = invoke
        if axes:
            from conformance.execution.context_calls import bind_devices  # imports JAX

            run = bind_devices(invoke, axes=axes, order=order, devices=devices, check_vma=check_vma)
        with _hint_at_open_sides(given.get("window")):
            return run(*operands, **{**explicit, **given})

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return call_by_position(q, k, v, **options)

    if form is None or form.is_dense:
        lower_mask = plain_support.build_lowering(reachable, declaration.causal)
    else:
        lower_mask = plain_storage.build_lowering(parameters, form.name)
    if form is not None:
        call = call_by_position
        vars(call)["__signature__"] = signature  # `StoredCall` reads here whether the function takes `num_seqs`
    implementation = Implementation(
        name=name,
        call=call,
        description=(inspect.getdoc(unwrap_partial(function)) or "").split("\n")[0],
        unsupported={
            **_list_missing_features(reachable, others),
            **plain_storage.list_missing_masks(signature, form),
            **(declaration.unsupported or {}),
        },
        offers=OPT_IN.intersection(has)
        | (parameters & {"moba", "indices", LOCAL_WINDOW})
        | ({"dropout"} if "dropout_rate" in parameters else set())
        | ({"captures"} if captures else set())
        | ({FIRST_TOKENS} if FIRST_PARAMETER in parameters else set())
        | plain_storage.find_scale_features(parameters, form, writes=writes is not None)
        | plain_storage.find_mask_features(signature, form)
        | ({"q_fp8"} if "q_scale" in parameters else set())
        | (parameters & {"q_descale"}),
        supports_case=plain_support.PlainSupport(
            reachable,
            declaration.causal,
            narrow,
            None if form is None else form.name,
            others,
            scales=plain_storage.find_required_scales(signature, form),
            lists="indices" in parameters and signature.parameters["indices"].default is inspect.Parameter.empty,
            empty_sequences=declaration.empty_sequences,
            multiple=(2 if order == "balanced" else 1) * _CONTEXT_DEVICES if axes else 1,
        ),
        arithmetic=Arithmetic(**declaration.select(Arithmetic)),
        formulas=Formulas(**declaration.select(Formulas)),
        residuals=frozenset(RESIDUALS if "save_residuals" in parameters else ()),
        differentiable_residuals=frozenset(),
        gradients=gradients,
        **{**declaration.select(Behaviour), **({"dropout_mask": "given"} if "dropout_mask" in parameters else {})},
        lower_mask=plain_support.replace_open_sides(lower_mask, declaration.open_sides),
        storage=None if form is None else form.name,
        writes_pages=writes is not None,
        refuses_by_signature=True,
        devices=_CONTEXT_DEVICES if axes else 1,
        on_devices=(lambda count, vma: functools.partial(call, devices=count, check_vma=vma)) if axes else None,
        conventions=list_declared(declaration, Conventions),
        open_questions=tuple(declaration.open_questions),
        redeclare=functools.partial(_rebuild, function, name, products),
        unasked=tuple(one for one in others if one not in settled and not is_tuning(one)),
    )
    returned = _find_returned_residuals(implementation) if implementation.residuals else frozenset()
    residuals = returned & set(RESIDUALS)
    return dataclasses.replace(
        implementation,
        residuals=residuals,
        further_results=returned - residuals,
        differentiable_residuals=residuals & {"logsumexp"} if declaration.differentiable_residuals else frozenset(),
    )


@contextlib.contextmanager
def _hint_at_open_sides(window: Any) -> Iterator[None]:
    """Add a hint to an error about None, if that is what the call got for a side of its window that is open."""
    try:
        yield
    except Exception as error:
        if isinstance(window, tuple) and None in window and _NONE.search(str(error)):
            kernel_errors.add_hint(
                error,
                "`window` has None for a side that is open: declare open_sides=-1, or open_sides='length', if the "
                "function takes that number there",
            )
        raise


def _rebuild(
    function: Callable[..., Any], name: str, products: Products | None, changes: Mapping[str, Any]
) -> Implementation:
    """Build the implementation of the same function with other declarations, or other conventions of its calls."""
    converted = convert_calls(function, changes.keys() & set(CALL_CONVENTIONS))
    declarations: Any = {name: value for name, value in changes.items() if name not in CALL_CONVENTIONS}
    return build_implementation(redeclare(converted, declarations), name, products=products)


def _append_soft_cap(score: Any, soft_cap: float) -> Any:
    """Return a score function followed by a soft cap; it may be None, or a `Partial` with the arrays it captures."""
    if score is None or isinstance(score, Score):
        return ThenCapped(score, soft_cap)
    from jax.tree_util import Partial  # imported late, since most uses of this module do not need JAX

    return Partial(ThenCapped(score.func, soft_cap), *score.args)


@functools.lru_cache(maxsize=1 << 10)
def _build_closure(formula: MaskFunction | FormulaScore | ThenCapped) -> Callable[..., Any]:
    """Return a function of places as users write it: a closure. Equal formulas give the same closure.

    All closures have one code object, so a kernel that takes functions of the same code for the same is found out.
    """

    def function(*places: Any) -> Any:
        return formula(*places)

    return function


def _stop_gradient(x: Any) -> Any:
    """Return an operand as a constant of differentiation. An array that is not traced is a constant already."""
    import jax  # imported late, since most uses of this module do not need JAX

    return jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x


_PHASES: tuple[dict[str, Any], ...] = ({"phase": "train"}, {"phase": "prefill"}, {"phase": "decode", "q_length": 1})


def _find_returned_residuals(implementation: Implementation) -> frozenset[str]:
    """Find the names of the residuals and further results that the call returns.

    It is traced on the first simple case that it supports.

    If every trace fails or returns something else, all residuals are assumed: then the checks report what is wrong.
    """
    import jax  # imported late, since most uses of this module do not need JAX

    form = None if implementation.storage is None else FORMS[implementation.storage]
    num_kv_heads, v_head_dim = (1, 48) if form is not None and form.is_tied else (2, 64)
    storage = None if form is None else form.example
    shape: dict[str, Any] = {"storage": storage, "num_kv_heads": num_kv_heads, "v_head_dim": v_head_dim}
    implementation = stored_calls.lower_implementation(implementation)
    # A kernel that supports no training cases, or decoding only, does not support the first phases.
    phases = _PHASES if form is None else _PHASES[1:]
    caches = load_form_cases(form.name).caches if form is not None else (None,)
    asked = itertools.product(caches, phases, ("f32", "bf16", "f16"), ("full", "causal"))
    for cache, phase, dtype, mask in asked:
        case = Case(**phase, **shape, dtype=dtype, mask=mask, **split_level(cache))
        if implementation.supports(case) is not None:
            continue
        problem = draw_problem(case)
        static, extra = implementation.lower_mask(
            problem.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length
        )
        if problem.storage is not None:
            extra = {**extra, "storage": stored_calls.build_storage_arrays_for(implementation, problem)}
        if problem.kv_scales is not None and not problem.has_whole_scales:
            extra = {**extra, "kv_scales": problem.kv_scales}
        numbers, arrays = stored_calls.list_scale_arguments(problem)
        static, extra = {**static, **numbers}, {**extra, **arrays}
        call = functools.partial(implementation.call, **static, save_residuals=True)
        try:
            returned = jax.eval_shape(call, problem.q, problem.k, problem.v, **extra)
        except Exception:  # ignored here: a check makes the same call and reports the exception
            continue
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            known = frozenset((*RESIDUALS, *FURTHER_RESULTS)) & set(returned[1])
            if known or not returned[1]:
                return known
    return implementation.residuals


def _list_explicit_options(signature: inspect.Signature) -> dict[str, Any]:
    """Return the arguments that must be passed even if the case does not have the option.

    They are `False` for `causal` and `save_residuals` with another default, and None for required options.
    """
    explicit: dict[str, Any] = {}
    for p in signature.parameters.values():
        required = p.default is p.empty and p.kind is not p.VAR_KEYWORD
        if p.name in ("causal", "save_residuals") and p.default is not False:
            explicit[p.name] = False
        elif p.name in _OPTIONS and required:
            explicit[p.name] = None
    return explicit


def _get_signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    if not callable(function):
        raise NotAnAttentionFunction(f"{name} is a {type(function).__name__}, not a function or an Implementation")
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise NotAnAttentionFunction(f"{name} has no signature that can be read: {error}") from error


def _list_others(signature: inspect.Signature, count: int, options: Collection[str]) -> tuple[str, ...]:
    """List the named parameters of a function besides its operands, the first `count`, and these options."""
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    operands = [p.name for p in named if p.kind is not p.KEYWORD_ONLY][:count]
    return tuple(p.name for p in named if p.name not in (*operands, *options))


def _list_bound_arguments(function: Callable[..., Any]) -> list[str]:
    """List the keywords to which `functools.partial` gives values, also where a decorator wraps the partial object."""
    bound: list[str] = []
    inner: Any = function
    while inner is not None:
        bound += inner.keywords if isinstance(inner, functools.partial) else ()
        inner = inner.func if isinstance(inner, functools.partial) else getattr(inner, "__wrapped__", None)
    return bound


def _strip_annotations(signature: inspect.Signature) -> inspect.Signature:
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=signature.empty)


def _find_storage_form(signature: inspect.Signature, name: str) -> StorageForm | None:
    parameters = list(signature.parameters)
    form = FORMS["latent_pages"] if plain_storage.find_latent_writes(parameters) else find_form(parameters)
    for other in FORMS.values():
        if not other.marks and not other.is_dense and other.operands[1] in parameters and form is not other:
            raise NotAnAttentionFunction(
                f"{name}{_strip_annotations(signature)} must take {other.operands[1]!r} as its second argument, "
                "after q: wrap it as docs/contract.md, section 8, shows"
            )
    if form is not None and (lacks := plain_storage.describe_missing_parameters(parameters, form)):
        raise NotAnAttentionFunction(f"{name}{_strip_annotations(signature)} {lacks}")
    return form


def _find_options(
    signature: inspect.Signature, name: str, known: tuple[str, ...], operands: tuple[str, ...]
) -> frozenset[str]:
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    count = len(operands)
    if len(positional) < count and not variadic:
        raise NotAnAttentionFunction(
            f"{name}{_strip_annotations(signature)} does not take {', '.join(operands)}: "
            f"an attention function takes them as its first {'three' if count == 3 else 'two'} arguments"
        )
    for p in positional[:count]:
        if p.name in known:
            raise NotAnAttentionFunction(
                f"{name}{signature} takes {p.name!r} where q, k or v must be: an attention function takes these first"
            )
    for p in parameters:
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if required and p not in positional[:count] and (p.name not in known or p.kind is p.POSITIONAL_ONLY):
            raise NotAnAttentionFunction(
                f"{name}{signature} needs the argument {p.name!r}, which is none of {', '.join(known)} by keyword: "
                f"give the argument a default, or wrap the function"
            )
    named = frozenset(p.name for p in parameters if p.name in known and p.kind is not p.POSITIONAL_ONLY)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        # `**options` is taken to accept every option except those that are opt-in. An opt-in option must be a named
        # parameter.
        of_caches = {*plain_storage.SCALE_PARAMETERS, *QUERY_PARAMETERS, plain_storage.UPDATE, FIRST_PARAMETER}
        of_masks = {*_MASKS_BY_NAME, *_DROPOUT, *MASK_PARAMETERS[2:]}
        return named | (frozenset(known) - OPT_IN - of_masks - of_caches)
    return named


def _list_missing_features(parameters: frozenset[str], others: Iterable[str]) -> dict[str, str]:
    has = parameters | ({"soft_cap"} if "score_mod" in parameters else set())
    names = [operand.name for operand in REMOVABLE if operand.name not in has]
    return {name: f"the function has no parameter {name!r}{suggest_parameters(name, others)}" for name in names}


def _refuse_by_value_error(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with each `ValueError` that leaves it raised as `NotImplementedError`, with its message.

    A call that was accepted before is an exception: a later call with arguments of the same shapes, dtypes and options
    keeps its `ValueError`. The function supports such a call, so its failure is an error.
    """
    accepted: set[Any] = set()

    @functools.wraps(function)
    def refusing(*operands: Any, **options: Any) -> Any:
        call = _describe_arguments((operands, options))
        try:
            returned = function(*operands, **options)
        except ValueError as error:
            if call in accepted:
                raise
            lines = str(error).strip().splitlines() or ["no message"]
            raise NotImplementedError(f"ValueError: {lines[0]}") from error
        accepted.add(call)
        return returned

    return refusing


def _describe_arguments(x: Any) -> Any:
    """Return a hashable description of arguments: shapes and dtypes of arrays, and the text of all other values."""
    if isinstance(x, Mapping):
        return tuple((name, _describe_arguments(value)) for name, value in sorted(x.items()))
    if isinstance(x, tuple | list):
        return tuple(map(_describe_arguments, x))
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return np.shape(x), str(x.dtype)
    return repr(x)


def _mark_padding(q_ids: Any, kv_ids: Any) -> tuple[Any, Any]:
    """Return the segment ids with -1 for each token that has no partner, and no other negative id.

    A query without a key of its id attends to nothing, and nothing attends to a key without a query of its id. So they
    may count as padding. Any other id becomes the index of the first key that has it. Which pairs may attend stays the
    same.

    Args:
      q_ids: ids of the queries, `[B, T]`, or `[T]` under `vmap`.
      kv_ids: ids of the keys, `[B, S]`, or `[S]` under `vmap`.
    """
    import jax.numpy as jnp  # imported late, since plain functions are also read without JAX

    q_ids, kv_ids = jnp.asarray(q_ids), jnp.asarray(kv_ids)
    same = q_ids[..., :, None] == kv_ids[..., None, :]
    first = (kv_ids[..., :, None] == kv_ids[..., None, :]).argmax(axis=-1)
    return (
        jnp.where(same.any(axis=-1), same.argmax(axis=-1), -1).astype(jnp.int32),
        jnp.where(same.any(axis=-2), first, -1).astype(jnp.int32),
    )
