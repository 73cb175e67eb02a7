"""Turn a call that takes stored operands into the canonical call on dense operands (docs/contract.md, section 8).

Stored operands are packed, paged, latent or in a ring buffer. A `StoredCall` is called with dense operands and the
tables of a storage layout. It gathers the operands to the places that the tables say, makes the kernel's call, and puts
the results back in their dense places. All of this is traced with the call, so gradients come back dense too. So the
oracle, the bounds and every check work on the dense problem.

A call that writes pages is `call(q, k, v, k_pages, v_pages, *, kv_lens, ...)`, or has the operands of another form
(`cases.storage_forms.page_writes.WRITE_FORMS`). This module builds pages for each call and ignores the returned ones.
`conformance.executor_tasks.page_write_calls` returns the written pages to checks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases import quantization
from cases.operand_values import Problem
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.latent_pages_form import LATENT_SCALES, WHOLE_LATENT_SCALE
from cases.storage_forms.page_writes import WRITE_FORMS, build_raw_operands, clear_written, find_slots
from cases.storage_forms.paged_form import (
    BLOCK_SCALES,
    CHANNEL_SCALES,
    DESCALES,
    GLOBAL_SCALES,
    SCALES,
    WHOLE_SCALES,
    ZEROS,
)
from cases.storage_forms.storage_form import MASK_ARRAYS, StorageForm
from cases.storage_forms.storage_layout import JUNK_ENTRIES, NOBODY, Storage
from conformance.execution import kernel_errors, returned_values
from impls.contract.declarations import BehindMask, Formulas
from impls.contract.implementation import Accelerator, Implementation

_PAIRS = ("segment_ids", "indices", *MASK_ARRAYS)
DENSE_ARGUMENTS = ("q", "k", "v", "storage", "kv_scales", "kv_zeros", "q_descale", *_PAIRS)
"""The arrays by name that `StoredCall.store` turns into stored operands."""
# The number in unwritten memory, for kernels that declare `behind_mask="finite"`.
_FINITE_STALE = 2.0**6
_CONTRACT = Formulas()


def build_storage_arrays(
    storage: Storage, behind_mask: BehindMask, *, writes: bool = False
) -> Mapping[str, np.ndarray]:
    """Build the arrays that a stored call gets beside the dense operands.

    They are the tables, the dense index of each stored query (`q_rows`) and key (`held`), the stored index of each
    dense query (`places`), and the number in memory that holds nothing (`stale`). With `writes`, for a call that writes
    pages, `tokens` is the dense index of each new token, and `held` does not have these tokens.
    """
    worst = np.nan if behind_mask == "any" else _FINITE_STALE
    stale = np.array(worst if storage.stale is None else storage.stale, np.float32)
    if not writes:
        return {**storage.arrays, "stale": stale}
    slots = find_slots(storage)
    return {**storage.arrays, "held": clear_written(storage, slots), "tokens": slots.key, "stale": stale}


def build_storage_arrays_for(implementation: Implementation, problem: Problem) -> Mapping[str, Any]:
    """Call `build_storage_arrays` with what `implementation` declares about memory and page writes.

    For a call that writes quantised pages, `raw` has the dense `k` and `v` from which new tokens are taken. With scales
    of sequences, `rows` has the sequence of each row of the tables.
    """
    assert problem.storage is not None
    arrays = build_storage_arrays(problem.storage, implementation.behind_mask, writes=implementation.writes_pages)
    if problem.kv_scales is not None and problem.kv_scales[0].ndim == 2:
        assert problem.storage.rows is not None
        arrays = {**arrays, "rows": problem.storage.rows}
    if not implementation.writes_pages or problem.kv_scales is None:
        return arrays
    return {**arrays, "raw": build_raw_operands(problem)}


def list_scale_arguments(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers among the scales of a quantised problem, and the arrays beside `kv_scales`, by keyword."""
    numbers: dict[str, Any] = {}
    if problem.kv_scales is not None and problem.has_whole_scales:
        numbers["kv_scales"] = tuple(map(float, problem.kv_scales))
    if problem.kv_global_scales is not None:
        numbers["kv_global_scales"] = problem.kv_global_scales
    if problem.q_scale is not None:
        numbers["q_scale"] = problem.q_scale
    if problem.q_scale is not None or problem.q_descale is not None:
        numbers["out_dtype"] = problem.q.dtype
    arrays = {"q_descale": problem.q_descale, "kv_zeros": problem.kv_zeros}
    return numbers, {name: x for name, x in arrays.items() if x is not None}


def add_padding(arrays: Mapping[str, Any], form: str | None) -> Mapping[str, Any]:
    """Add arrays of zeros, `padding`, whose gradients are those of the padding in stored operands.

    `StoredCall` adds them to the padding of q, k and v, so the padding becomes differentiable. Caches are not
    differentiated, and dense operands have no padding: for them `arrays` is returned unchanged.
    """
    storage = arrays.get("storage")
    if storage is None or form is None or FORMS[form].is_cache:
        return arrays
    held = {"q": storage["q_rows"], "k": storage["held"], "v": storage["held"]}
    zeros = {name: jnp.zeros((*rows.shape, *arrays[name].shape[2:]), arrays[name].dtype) for name, rows in held.items()}
    return {**arrays, "padding": zeros}


def lower_implementation(implementation: Implementation) -> Implementation:
    """Return the implementation with each call wrapped to take dense operands; unchanged if it takes these already."""
    if implementation.storage is None or isinstance(implementation.call, StoredCall | LatentCall):
        return implementation
    lower = functools.partial(
        _lower_call,
        form=implementation.storage,
        writes=implementation.writes_pages,
        formulas=implementation.formulas,
    )
    return dataclasses.replace(
        implementation,
        call=lower(implementation.call),
        variants={name: lower(call) for name, call in implementation.variants.items()},
        accelerator=_lower_accelerator(implementation.accelerator, lower),
    )


def _lower_call(call: Callable[..., Any], form: str, writes: bool, formulas: Formulas) -> StoredCall | LatentCall:
    if FORMS[form].is_dense:
        return LatentCall(call, FORMS[form])
    return StoredCall.of(call, form, writes=writes, formulas=formulas)


def _lower_accelerator(
    accelerator: Accelerator, lower: Callable[[Callable[..., Any]], StoredCall | LatentCall]
) -> Accelerator:
    native, interpreted = accelerator.native, accelerator.under_interpreter

    def under_interpreter(parameters: Any) -> Callable[..., Any]:
        assert interpreted is not None
        return lower(interpreted(parameters))

    return dataclasses.replace(
        accelerator,
        native=None if native is None else lower(native),
        under_interpreter=None if interpreted is None else under_interpreter,
    )


@dataclasses.dataclass(frozen=True)
class LatentCall:
    """A call with one latent, wrapped to take dense q, k and v; k gets the latent's gradient, and v gets zeros."""

    call: Callable[..., Any]
    form: StorageForm

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
        """Make the call with `k [B, S, 1, H]` as the latent; `v [B, S, 1, V]` only gives the depth V of values."""
        arranged = self.form.arrange({"k": k})
        return self.call(q, *arranged.values(), **add_latent_options(q.shape[-1], v.shape[-1], options))


def add_latent_options(depth: int, value_dim: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Add `value_dim` and `scale` to the options of a call with a latent of this depth."""
    return {**options, "value_dim": value_dim, "scale": _choose_latent_scale(depth, options)}


def _choose_latent_scale(depth: int, options: Mapping[str, Any]) -> float:
    """Return the scale of a call with a latent, which is always passed.

    A latent kernel's own default may be that of its expanded heads, not `1 / sqrt(H)`.
    """
    scale: float | None = options.get("scale")
    return 1 / math.sqrt(depth) if scale is None else scale


def _compute_empty_logsumexp(formulas: Formulas, sinks: Any) -> Any:
    """Compute the `logsumexp` of a row without keys: the sinks `[N]` if it includes them, else an infinity.

    A sink of -inf is no sink: the infinity in its stead has no gradient.
    """
    nothing = jnp.inf if formulas.logsumexp_empty == "inf" else -jnp.inf
    if sinks is None or not formulas.logsumexp_sink:
        return nothing
    return jnp.where(jnp.isneginf(sinks), nothing, sinks / math.log(2) if formulas.logsumexp_base == 2 else sinks)


@dataclasses.dataclass(frozen=True)
class StoredCall:
    """A call that takes stored operands, wrapped to take dense q, k and v and to return dense results."""

    call: Callable[..., Any]  # the kernel's call, which takes stored operands and tables
    form: StorageForm
    # Whether the call takes `num_seqs`. If not, table entries past the last sequence describe sequences without queries
    # and keys.
    counts: bool
    takes_out_dtype: bool = False  # whether the call takes `out_dtype`, the dtype of `out` for queries in fp8
    takes_update: bool = False  # whether the call takes `update_kv_cache`, and writes nothing if that is False
    writes: bool = False  # whether the call writes the new tokens into pages
    formulas: Formulas = _CONTRACT  # the formulas of the call, for the residuals of queries that it does not get

    @classmethod
    def of(
        cls, call: Callable[..., Any], form: str, *, writes: bool = False, formulas: Formulas = _CONTRACT
    ) -> StoredCall:
        """Wrap `call`, which takes operands in the storage form `form`; its signature says if it takes `num_seqs`."""
        parameters = inspect.signature(call).parameters
        counts = any(p.name == "num_seqs" or p.kind is p.VAR_KEYWORD for p in parameters.values())
        takes = ("out_dtype" in parameters, "update_kv_cache" in parameters)
        return cls(call, FORMS[form], counts, *takes, writes, formulas)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        storage: Mapping[str, jax.Array],
        padding: Mapping[str, jax.Array] | None = None,
        kv_scales: tuple[jax.Array, jax.Array] | tuple[float, float] | None = None,
        q_descale: jax.Array | None = None,
        kv_zeros: tuple[jax.Array, jax.Array] | None = None,
        save_residuals: bool = False,
        **options: Any,
    ) -> Any:
        """Return `out [B, T, N, V]`; with `save_residuals`, also the residuals `[B, N, T]` by name.

        Args:
          q: dense queries `[B, T, N, H]`.
          k: dense keys `[B, S, K, H]`.
          v: dense values `[B, S, K, V]`.
          storage: the arrays of `build_storage_arrays`.
          padding: the zeros of `add_padding`, if padding is to have gradients.
          kv_scales: the scales of k and of v: an array for each, as `cases.quantization.quantize` gives them, or one
            number for each.
          q_descale: the scales of queries in fp8, `[B, K]`, if each sequence and key/value head has its own.
          kv_zeros: the zero points of k and of v, if their numbers have some.

        Raises:
          WrongReturn: if the call does not return arrays of the right shapes.
        """
        if kv_scales is not None and isinstance(kv_scales[0], float):
            options["kv_scales"], kv_scales = kv_scales, None
        pairs = {name: options.pop(name) for name in _PAIRS if name in options}
        stored = self.store(q, k, v, storage, padding, kv_scales, options.get("q_scale"), q_descale, kv_zeros, **pairs)
        rows, heads = storage["q_rows"].shape, q.shape[2]
        call_by_keyword = self.bind_depth(v.shape[-1])
        places = storage["places"]
        if not save_residuals:
            out = returned_values.check_output(call_by_keyword(**stored, **options))
            return self._restore("out", out, (*rows, heads, v.shape[-1]), places, 0.0)
        returned = call_by_keyword(**stored, **options, save_residuals=True)
        out, residuals = returned_values.check_residuals(returned)
        # A dense query that no stored query stands for is an empty row, whose residuals the formulas define.
        nothing = {"logsumexp": _compute_empty_logsumexp(self.formulas, options.get("sinks")), "max_logits": -jnp.inf}
        in_rows = len(rows) > 1
        shape = (rows[0], heads, *rows[1:]) if in_rows else (*rows, heads)
        dense = {}
        for name, x in residuals.items():
            if name == "head_max_logits":  # it has no rows
                dense[name] = x
                continue
            _check_shape(name, x, shape)
            moved = jnp.moveaxis(jnp.asarray(x), 1, 2) if in_rows else x
            restored = self._restore(name, moved, (*rows, heads), places, nothing.get(name, 0.0))
            dense[name] = jnp.moveaxis(restored, 1, 2)
        return self._restore("out", out, (*rows, heads, v.shape[-1]), places, 0.0), dense

    def store(
        self,
        q: Any,
        k: Any,
        v: Any,
        storage: Mapping[str, Any],
        padding: Mapping[str, Any] | None = None,
        kv_scales: tuple[Any, Any] | None = None,
        q_scale: float | None = None,
        q_descale: Any = None,
        kv_zeros: tuple[Any, Any] | None = None,
        **pairs: Any,
    ) -> dict[str, Any]:
        """Return the stored operands and the tables, as `call_by_keyword` takes them in place of dense operands.

        `pairs` are masks, lists of keys and segment ids of the dense problem.
        """
        added, stale = padding or {}, storage["stale"]
        keys = {"k": k} if self.form.is_tied else {"k": k, "v": v}
        arranged = self.form.arrange(
            {name: _gather(x, storage["held"], stale, added.get(name)) for name, x in keys.items()}
        )
        if q_descale is not None:  # the quotients are exact (`cases.quantization.quantize_queries`)
            of_heads = jnp.repeat(q_descale, q.shape[2] // k.shape[2], axis=1)
            q = jnp.asarray(q).astype(jnp.float32) / of_heads[:, None, :, None]
        queries = self.pack_queries(q, storage, added.get("q"), q_scale if q_descale is None else 1.0)
        named = {"q": queries, **arranged}
        if self.writes:
            made, raw = WRITE_FORMS[self.form.name], storage.get("raw", keys)
            new = self.form.arrange({name: _gather(x, storage["tokens"], stale) for name, x in raw.items()})
            named = {
                **made.name_queries(queries, v.shape[-1]),
                **made.name_tokens(tuple(new.values()), v.shape[-1]),
                **dict(zip(made.pools, arranged.values(), strict=True)),
            }
        return {
            **named,
            **({} if kv_scales is None else _store_scales(kv_scales, kv_zeros, storage, is_tied=self.form.is_tied)),
            **({} if q_descale is None else {"q_descale": _gather_sequences(q_descale, storage)}),
            **pack_pairs(pairs, storage),
            **self.select_tables(storage),
        }

    def pack_queries(
        self, q: Any, storage: Mapping[str, Any], padding: Any = None, q_scale: float | None = None
    ) -> jax.Array:
        """Gather dense queries into their stored form, `[total_q, N, H]` or `[rows, T, N, H]`.

        With `q_scale`, they become the float8_e4m3fn numbers `q / q_scale`.
        """
        packed = _gather(q, storage["q_rows"], storage["stale"], padding)
        if q_scale is None:
            return packed
        dtype = quantization.STORED["fp8"]
        largest = quantization.find_largest(dtype)
        assert largest is not None
        return jnp.clip(packed.astype(jnp.float32) / q_scale, -largest, largest).astype(dtype)

    def select_tables(self, storage: Mapping[str, Any]) -> Mapping[str, Any]:
        """Select the tables that the call takes from the arrays of `build_storage_arrays`."""
        tables = {name: storage[name] for name in self.form.tables}
        return tables if self.counts or "num_seqs" not in tables else _close_tables(tables)

    def bind_depth(self, value_dim: int) -> Callable[..., Any]:
        """Return the kernel's call, with all arguments by keyword, for values of the depth `value_dim`."""
        if self.form.is_tied and not self.writes:
            return functools.partial(self._call_tied, value_dim)
        return self.call_by_keyword

    def call_by_keyword(self, **arguments: Any) -> Any:
        """Make the kernel's call on stored operands that are given by keyword; ignore pages that it returns."""
        if not self.writes:
            arguments = self._name_numbers(arguments)
            operands = [arguments.pop(name) for name in self.form.operands]
            return self.call(*operands, **arguments)
        out, residuals, _ = self.write(**arguments)
        return out if residuals is None else (out, residuals)

    def write(self, *, save_residuals: bool = False, **arguments: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Make a call that writes pages; return `out`, residuals or None, and pages by name. Raises `WrongReturn`.

        `arguments` are all arguments of the call by name, the stored operands too.
        """
        made = WRITE_FORMS[self.form.name]
        operands = {name: arguments.pop(name) for name in made.operands}
        if self.form.is_tied:
            depth = sum(operands[name].shape[-1] for name in made.queries)
            arguments["scale"] = _choose_latent_scale(depth, arguments)
        asked = {"save_residuals": True} if save_residuals else {}
        names = (*made.pools, *(name for name in made.scales if name in arguments))
        returned = self.call(*operands.values(), **self._name_numbers(arguments), **asked)
        found = returned_values.check_pages(returned, names, save_residuals=save_residuals)
        return found[0], found[1] if save_residuals else None, dict(zip(names, found[-len(names) :], strict=True))

    def _name_numbers(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with pairs of numbers, for all keys and for all values, by the call's names.

        Without `out_dtype` if the call does not take it.
        """
        named = {name: x for name, x in arguments.items() if name != "out_dtype" or self.takes_out_dtype}
        of_all = WHOLE_LATENT_SCALE if self.form.is_tied else WHOLE_SCALES
        for pair, names in (("kv_scales", of_all), ("kv_global_scales", GLOBAL_SCALES)):
            if (numbers := named.pop(pair, None)) is not None:
                named |= dict(zip(names, numbers, strict=False))  # values of latents share the scale of keys
        return named

    def _call_tied(self, value_dim: int, *, q: Any, **arguments: Any) -> Any:
        return self.call_by_keyword(q=q, **add_latent_options(q.shape[-1], value_dim, arguments))

    def _restore(self, name: str, x: Any, shape: tuple[int, ...], places: Any, absent: Any) -> jax.Array:
        """Gather a result for stored queries, `[*rows, N, ...]`, into its dense form `[B, T, N, ...]`.

        Args:
          shape: the shape that `x` must have.
          places: the index of the stored query for each dense query, `[B, T]`; `NOBODY` if there is none.
          absent: the value of the result for dense queries without a stored query.
        """
        _check_shape(name, x, shape)
        flat = jnp.asarray(x).reshape(-1, *shape[len(shape) - (2 if name == "out" else 1) :])
        places = jnp.asarray(places)
        there = (places != NOBODY).reshape(*places.shape, *(1,) * (flat.ndim - 1))
        return jnp.where(there, flat[jnp.maximum(places, 0)], jnp.asarray(absent).astype(flat.dtype))


def _gather(x: Any, held: Any, stale: Any, padding: Any = None) -> jax.Array:
    """Gather dense tokens into their stored form.

    Args:
      x: the dense tokens, `[B, L, heads, depth]`.
      held: the index in `B * L` of the token at each stored place, `[...]`; `NOBODY` if the place holds none.
      stale: the number at places that hold no token.
      padding: zeros `[..., heads, depth]` that are added to `stale`, so that these places have gradients.

    Returns:
      The stored tokens, `[..., heads, depth]`.
    """
    flat = jnp.asarray(x).reshape(-1, *x.shape[2:])
    held = jnp.asarray(held)
    there = (held != NOBODY)[..., None, None]
    elsewhere = _cast_stale(jnp.asarray(stale), flat.dtype)
    return jnp.where(there, flat[jnp.maximum(held, 0)], elsewhere if padding is None else elsewhere + padding)


def _store_scales(
    kv_scales: tuple[Any, Any], kv_zeros: tuple[Any, Any] | None, storage: Mapping[str, Any], *, is_tied: bool
) -> dict[str, Any]:
    """Return the arrays of scales and zero points by the call's names, in their stored form."""
    held, stale = storage["held"], storage["stale"]
    if is_tied:  # values share the scales of keys
        return {LATENT_SCALES[0]: _gather(kv_scales[0][..., None], held, stale)[..., 0, 0]}
    if kv_zeros is not None:
        named = zip((CHANNEL_SCALES, ZEROS), (kv_scales, kv_zeros), strict=True)
        return {
            name: x
            for (of_keys, of_values), (k, v) in named
            for name, x in (
                (of_keys, _gather(k, held[:, 0], stale)),  # all tokens of a page have those of its first row
                (of_values, _gather(v[..., None], held, stale)[..., 0]),
            )
        }
    if kv_scales[0].ndim == 2:  # of sequences
        return {name: _gather_sequences(x, storage) for name, x in zip(DESCALES, kv_scales, strict=True)}
    if kv_scales[0].ndim == 4:  # of blocks
        return {name: _gather(x, held, stale) for name, x in zip(BLOCK_SCALES, kv_scales, strict=True)}
    return {name: _gather(x[..., None], held, stale)[..., 0] for name, x in zip(SCALES, kv_scales, strict=True)}


def _gather_sequences(x: Any, storage: Mapping[str, Any]) -> jax.Array:
    """Gather `x [B, K]` for each row of the tables, `[max_seqs, K]`; rows of no sequence hold the stale number."""
    return _gather(jnp.asarray(x)[:, None, :, None], storage["rows"], storage["stale"])[..., 0]


def _gather_rows(x: Any, held: Any, absent: Any) -> jax.Array:
    """Gather rows of `x [B, L, ...]` by their index in `B * L`, `[..., ...]`; `absent` where `held` is `NOBODY`."""
    flat, held = jnp.asarray(x).reshape(-1, *x.shape[2:]), jnp.asarray(held)
    there = (held != NOBODY).reshape(*held.shape, *(1,) * (flat.ndim - 1))
    return jnp.where(there, flat[jnp.maximum(held, 0)], absent)


def pack_pairs(arrays: Mapping[str, Any], storage: Mapping[str, Any]) -> dict[str, Any]:
    """Return `arrays` by name, with masks, lists of keys and segment ids of the dense problem in their stored form."""
    packed = dict(arrays)
    if (ids := packed.get("segment_ids")) is not None:
        held = (storage["q_rows"], storage["held"])
        # Tokens of nobody have an id that other tokens have.
        packed["segment_ids"] = tuple(_gather_rows(x, rows, x[0, 0]) for x, rows in zip(ids, held, strict=True))
    if (lists := packed.get("indices")) is not None:
        packed["indices"] = _pack_lists(lists, storage["q_rows"])
    for name in MASK_ARRAYS:
        if packed.get(name) is not None:
            packed[name] = _pack_mask(name, packed[name], storage)
    return packed


def _pack_mask(name: str, mask: Any, storage: Mapping[str, Any]) -> jax.Array:
    """Pack booleans `[b, 1, T, S]` for packed queries; columns that no query may read are true.

    Returns:
      For `mask`, booleans `[total_q, S]`, by the place of the key in its sequence. For `tree_mask`, booleans
      `[total_q, T]`, by its place among the queries' own keys. For `parents`, int32 `[total_q]`: the place of the last
      of these before the query's own, or -1.
    """
    batch, q_length = storage["places"].shape
    rows = _gather_rows(jnp.broadcast_to(mask[:, 0], (batch, *mask.shape[2:])), storage["q_rows"], True)
    ends, queries, own = _find_own_places(storage)
    if name == "mask":
        return rows | (jnp.arange(rows.shape[1]) >= ends[:, None])
    column = jnp.arange(q_length)
    places = jnp.clip((ends - queries)[:, None] + column, 0, rows.shape[1] - 1)
    tree = jnp.take_along_axis(rows, places, axis=1) | (column >= queries[:, None])
    if name == "tree_mask":
        return tree
    before = tree & (column < own[:, None])
    return jnp.max(jnp.where(before, column, -1), axis=1).astype(jnp.int32)


def _find_own_places(storage: Mapping[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Find the numbers of keys and queries of each packed query's sequence, and its place among these queries."""
    starts, count = jnp.asarray(storage["cu_q_lens"]), jnp.asarray(storage["num_seqs"])[0]
    row = jnp.arange(len(storage["q_rows"]))
    is_sequence = jnp.arange(len(starts) - 1) < count
    number = (is_sequence & (row[:, None] >= starts[1:])).sum(axis=1)
    number = jnp.minimum(number, count - 1)
    queries = starts[number + 1] - starts[number]
    if "kv_lens" in storage:
        ends = jnp.asarray(storage["kv_lens"])[number]
    else:
        of_keys = jnp.asarray(storage["cu_kv_lens"])
        ends = of_keys[number + 1] - of_keys[number]
    return ends, queries, row - starts[number]


def _pack_lists(indices: Any, q_rows: Any) -> jax.Array:
    """Gather lists of keys `[B, T, k]` into their stored form, `[total_q, k]`; those of padding may be any integers."""
    q_rows, flat = jnp.asarray(q_rows), jnp.asarray(indices).reshape(-1, indices.shape[-1])
    place = jnp.arange(q_rows.size)[:, None] + jnp.arange(flat.shape[1])
    junk = jnp.asarray(JUNK_ENTRIES, jnp.int32)[place % len(JUNK_ENTRIES)]
    return jnp.where((q_rows != NOBODY)[:, None], flat[jnp.maximum(q_rows, 0)], junk)


def _cast_stale(stale: jax.Array, dtype: Any) -> jax.Array:
    """Cast the number in unwritten memory to a dtype, or to its largest number if the dtype lacks NaN or infinity."""
    top = quantization.find_largest(dtype)
    if top is None:
        return stale.astype(dtype)
    bad = jnp.nan if dtype == quantization.STORED["fp8"] else top
    low = 0 if dtype == jnp.uint8 else -top
    return jnp.where(jnp.isnan(stale), bad, jnp.clip(stale, low, top)).astype(dtype)


def _check_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    if np.shape(x) != shape:
        raise kernel_errors.WrongReturn(
            f"{name} must have the shape {list(shape)} of the stored queries, got {list(np.shape(x))}"
        )


def _close_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables for a call without `num_seqs`: entries past the last sequence become sequences without tokens."""
    count = jnp.asarray(tables["num_seqs"])[0]
    closed = {}
    for name, x in tables.items():
        table = jnp.asarray(x)
        if name.startswith("cu_"):
            closed[name] = jnp.where(jnp.arange(len(table)) <= count, table, table[count])
        elif name == "kv_lens":
            closed[name] = jnp.where(jnp.arange(len(table)) < count, table, 0)
        elif name != "num_seqs":
            closed[name] = table
    return closed
