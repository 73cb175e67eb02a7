"""Make the canonical call on dense operands by a call that takes them stored (docs/contract.md, section 8).

The dense operands are gathered to where the tables of a layout say, the call is made in its own convention, and its
results are put back in their dense places. All of this is traced with the call: programs take the dense operands and
the tables, and gradients come back dense. So the oracle, the bounds and every check are those of the dense problem.

A call that writes pages is `call(q, k, v, k_pages, v_pages, *, kv_lens, ...)`. Here its pages are made for the call and
dropped behind it; `conformance.executor_tasks.page_write_calls` judges what it wrote into pages that are kept.
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
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.page_writes import clear_written, find_slots
from cases.storage_forms.storage_form import StorageForm
from cases.storage_forms.storage_layout import NOBODY, Storage
from conformance.contract import Accelerator, BehindMask, Implementation
from conformance.execution import kernel_errors

# The number in unwritten memory, where it must be finite.
_FINITE_STALE = 2.0**6


def build_storage_arrays(
    storage: Storage, behind_mask: BehindMask, *, writes: bool = False
) -> Mapping[str, np.ndarray]:
    """Build the arrays that a stored call gets beside the dense operands.

    They are the tables, the places of queries and keys, and the number in memory that holds nothing (`stale`). A call
    that writes pages also gets the dense key of each packed token (`tokens`), and pages without these keys.
    """
    worst = np.nan if behind_mask == "any" else _FINITE_STALE
    stale = np.array(worst if storage.stale is None else storage.stale, np.float32)
    if not writes:
        return {**storage.arrays, "stale": stale}
    slots = find_slots(storage)
    return {**storage.arrays, "held": clear_written(storage, slots), "tokens": slots.key, "stale": stale}


def build_storage_arrays_for(implementation: Implementation, storage: Storage) -> Mapping[str, np.ndarray]:
    """Build the arrays that a stored call gets, as `implementation` declares it."""
    return build_storage_arrays(storage, implementation.behind_mask, writes=implementation.writes_pages)


def add_padding(arrays: Mapping[str, Any], form: str | None) -> Mapping[str, Any]:
    """Add zeros to stored operands where the problem has none, so that padding has gradients of its own.

    Caches are not differentiated, and dense operands have no such places: their arrays stay as they are.
    """
    storage = arrays.get("storage")
    if storage is None or form is None or FORMS[form].is_cache:
        return arrays
    held = {"q": storage["q_rows"], "k": storage["held"], "v": storage["held"]}
    zeros = {name: jnp.zeros((*rows.shape, *arrays[name].shape[2:]), arrays[name].dtype) for name, rows in held.items()}
    return {**arrays, "padding": zeros}


def lower_implementation(implementation: Implementation) -> Implementation:
    """Return the implementation with each of its calls made on dense operands; itself if it takes no others."""
    if implementation.storage is None or isinstance(implementation.call, StoredCall | LatentCall):
        return implementation
    lower = functools.partial(_lower_call, form=implementation.storage, writes=implementation.writes_pages)
    return dataclasses.replace(
        implementation,
        call=lower(implementation.call),
        variants={name: lower(call) for name, call in implementation.variants.items()},
        accelerator=_lower_accelerator(implementation.accelerator, lower),
    )


def _lower_call(call: Callable[..., Any], form: str, writes: bool) -> StoredCall | LatentCall:
    return LatentCall(call, FORMS[form]) if FORMS[form].is_dense else StoredCall.of(call, form, writes=writes)


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
    """The canonical call, made by a call that takes dense operands with one latent in place of keys and values.

    The gradient of the latent comes back as that of k; v gets zeros.

    Attributes:
      call: the call in its own convention.
      form: the storage form.
    """

    call: Callable[..., Any]
    form: StorageForm

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
        """Call it on `k [B, S, 1, H]`; of `v [B, S, 1, V]` only the depth counts."""
        arranged = self.form.arrange({"k": k})
        return self.call(q, *arranged.values(), **add_latent_options(q, v.shape[-1], options))


def add_latent_options(q: Any, value_dim: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Add `value_dim` to options, and the scale: its default would go by the depth of the expanded heads."""
    scale = options.get("scale")
    return {**options, "value_dim": value_dim, "scale": 1 / math.sqrt(q.shape[-1]) if scale is None else scale}


@dataclasses.dataclass(frozen=True)
class StoredCall:
    """The canonical call on dense operands, made by a call that takes them stored.

    Attributes:
      call: the call in its own convention.
      form: the storage form.
      counts: whether it gets the number of sequences. If not, entries past the last sequence are those of sequences
        without queries and keys.
      writes: whether it writes the tokens of its queries into pages.
    """

    call: Callable[..., Any]
    form: StorageForm
    counts: bool
    writes: bool = False

    @classmethod
    def of(cls, call: Callable[..., Any], form: str, *, writes: bool = False) -> StoredCall:
        """Return the dense form of `call`, which gets the tables that its signature has."""
        parameters = inspect.signature(call).parameters.values()
        counts = any(p.name == "num_seqs" or p.kind is p.VAR_KEYWORD for p in parameters)
        return cls(call, FORMS[form], counts, writes)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        storage: Mapping[str, jax.Array],
        padding: Mapping[str, jax.Array] | None = None,
        kv_scales: tuple[jax.Array, jax.Array] | tuple[float, float] | None = None,
        save_residuals: bool = False,
        **options: Any,
    ) -> Any:
        """Return `out [B, T, N, V]`, with residuals `[B, N, T]` if asked.

        Args:
          q: `[B, T, N, H]`.
          k: `[B, S, K, H]`.
          v: `[B, S, K, V]`.
          storage: the arrays of `build_storage_arrays`.
          padding: the zeros of `add_padding`, if gradients of padding are asked for.
          kv_scales: the scales of k and of v, `[B, S, K]` where each token has one, or a number of each.
          save_residuals: whether residuals are returned too.
          options: all other keywords of the call.

        Raises:
          WrongReturn: if the call returns something else than arrays of the right shapes.
        """
        if kv_scales is not None and isinstance(kv_scales[0], float):
            options["kv_scales"], kv_scales = kv_scales, None
        stored = self.store(q, k, v, storage, padding, kv_scales)
        *rows, heads, _ = stored["q"].shape
        call_by_keyword = self.bind_depth(v.shape[-1])
        places = storage["places"]
        if not save_residuals:
            out = kernel_errors.check_output(call_by_keyword(**stored, **options))
            return self._restore("out", out, (*rows, heads, v.shape[-1]), places, 0.0)
        returned = call_by_keyword(**stored, **options, save_residuals=True)
        out, residuals = kernel_errors.check_residuals(returned)
        # A query that is not there is an empty row, whose residuals the contract defines.
        sinks = options.get("sinks")
        nothing = {"logsumexp": -jnp.inf if sinks is None else sinks, "max_logits": -jnp.inf}
        in_rows = len(rows) > 1
        shape = (rows[0], heads, *rows[1:]) if in_rows else (*rows, heads)
        dense = {}
        for name, x in residuals.items():
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
    ) -> dict[str, Any]:
        """Return the stored operands and the tables, as `call_by_keyword` takes them in place of dense operands."""
        added, stale = padding or {}, storage["stale"]
        tokens = storage["tokens" if self.writes else "held"]
        keys = {"k": k} if self.form.is_tied else {"k": k, "v": v}
        gathered = {name: _gather(x, tokens, stale, added.get(name)) for name, x in keys.items()}
        pages = {"k_pages": k, "v_pages": v} if self.writes else {}
        scales = (
            {} if kv_scales is None else dict(zip(self._find_scale_names(as_numbers=False), kv_scales, strict=True))
        )
        return {
            "q": self.pack_queries(q, storage, added.get("q")),
            **self.form.arrange(gathered),
            **{name: _gather(x, storage["held"], stale) for name, x in pages.items()},
            **{name: _gather(x[..., None], storage["held"], stale)[..., 0] for name, x in scales.items()},
            **self.select_tables(storage),
        }

    def _find_scale_names(self, *, as_numbers: bool) -> tuple[str, str]:
        return next(pair.names for pair in self.form.scales if pair.as_numbers == as_numbers)

    def pack_queries(self, q: Any, storage: Mapping[str, Any], padding: Any = None) -> jax.Array:
        """Return the queries as they are stored, `[total_q, N, H]` or `[rows, T, N, H]`."""
        return _gather(q, storage["q_rows"], storage["stale"], padding)

    def select_tables(self, storage: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tables that the call takes."""
        tables = {name: storage[name] for name in self.form.tables}
        return tables if self.counts or "num_seqs" not in tables else _close_tables(tables)

    def bind_depth(self, value_dim: int) -> Callable[..., Any]:
        """Return the call in its own convention, with keywords alone, for values of this depth."""
        return functools.partial(self._call_tied, value_dim) if self.form.is_tied else self.call_by_keyword

    def call_by_keyword(self, **arguments: Any) -> Any:
        """Make the call in its own convention, with keywords alone; pages that it returns are dropped."""
        if (numbers := arguments.pop("kv_scales", None)) is not None:
            arguments |= dict(zip(self._find_scale_names(as_numbers=True), numbers, strict=True))
        if not self.writes:
            operands = [arguments.pop(name) for name in self.form.operands]
            return self.call(*operands, **arguments)
        out, residuals, _ = self.write(**arguments)
        return out if residuals is None else (out, residuals)

    def write(
        self, *, q: Any, k: Any, v: Any, k_pages: Any, v_pages: Any, save_residuals: bool = False, **others: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Make a call that writes pages, and return `out`, the residuals or None, and the pages by name.

        Raises:
          WrongReturn: if it returns something else.
        """
        asked = {"save_residuals": True} if save_residuals else {}
        returned = self.call(q, k, v, k_pages, v_pages, **others, **asked)
        *first, keys, values = kernel_errors.check_pages(returned, save_residuals=save_residuals)
        return first[0], first[1] if save_residuals else None, {"k_pages": keys, "v_pages": values}

    def _call_tied(self, value_dim: int, *, q: Any, **arguments: Any) -> Any:
        return self.call_by_keyword(q=q, **add_latent_options(q, value_dim, arguments))

    def _restore(self, name: str, x: Any, shape: tuple[int, ...], places: Any, absent: Any) -> jax.Array:
        """Return a result `[*rows, N, ...]` at the places of the dense problem, `[B, T, N, ...]`.

        Args:
          name: of the result, for messages.
          x: the result, of the shape of the stored queries.
          shape: the shape that it must have.
          places: `[B, T]`, the stored query that each dense one is.
          absent: the result of dense queries that are not there.
        """
        _check_shape(name, x, shape)
        flat = jnp.asarray(x).reshape(-1, *shape[len(shape) - (2 if name == "out" else 1) :])
        places = jnp.asarray(places)
        there = (places != NOBODY).reshape(*places.shape, *(1,) * (flat.ndim - 1))
        return jnp.where(there, flat[jnp.maximum(places, 0)], jnp.asarray(absent).astype(flat.dtype))


def _gather(x: Any, held: Any, stale: Any, padding: Any = None) -> jax.Array:
    """Return `x [B, L, heads, depth]` at the places `held [...]`, `[..., heads, depth]`, with `stale` elsewhere.

    `padding [..., heads, depth]` is added to `stale`.
    """
    flat = jnp.asarray(x).reshape(-1, *x.shape[2:])
    held = jnp.asarray(held)
    there = (held != NOBODY)[..., None, None]
    elsewhere = _cast_stale(jnp.asarray(stale), flat.dtype)
    return jnp.where(there, flat[jnp.maximum(held, 0)], elsewhere if padding is None else elsewhere + padding)


def _cast_stale(stale: jax.Array, dtype: Any) -> jax.Array:
    """Return the stale number in a dtype: the largest number for what a dtype of quantised pages does not have."""
    top = quantization.find_largest(dtype)
    if top is None:
        return stale.astype(dtype)
    bad = jnp.nan if dtype == quantization.STORED["fp8"] else top
    return jnp.where(jnp.isnan(stale), bad, jnp.clip(stale, -top, top)).astype(dtype)


def _check_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    if np.shape(x) != shape:
        raise kernel_errors.WrongReturn(
            f"{name} must have the shape {list(shape)} of the stored queries, got {list(np.shape(x))}"
        )


def _close_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables for a call without the number of sequences: others have neither queries nor keys."""
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
