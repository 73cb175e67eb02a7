"""Calls that take their operands packed or in pages, asked about a dense problem.

The dense operands are stored, the call is made in its own convention, and what it returns is put back in its place. All
of that is traced with the call: programs take the dense operands and the tables, and gradients come back dense. So the
oracle, the bounds and every check are those of the dense problem (docs/contract.md, section 8).

    paged:  call(q, k_pages, v_pages, *, kv_lens, page_indices, cu_q_lens, num_seqs, window=None, ...)
    scaled: call(q, k_pages, v_pages, *, k_scales, v_scales, kv_lens, page_indices, cu_q_lens, num_seqs, ...)
    whole:  call(q, k_pages, v_pages, *, k_scale, v_scale, kv_lens, page_indices, cu_q_lens, num_seqs, ...)
    packed: call(q, k, v, *, cu_q_lens, cu_kv_lens, num_seqs, causal=False, window=None, ...)

One that writes pages is `call(q, k, v, k_pages, v_pages, *, kv_lens, ...)`. Here its pages are made for the call and
dropped behind it; what it wrote into pages that are kept is asked for by `conformance.executor_tasks.page_write_calls`. Those with a
latent are in `conformance.execution.latent_calls`.

Shapes are q `[total_q, N, H]`, pages `[pages, page_size, K, .]`, scales of pages `[pages, page_size, K]`, packed keys
and values `[total_kv, K, .]`, and out `[total_q, N, V]`, residuals `[total_q, N]`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases import quantization
from cases.storage_forms.page_writes import clear_written, find_slots
from cases.storage_forms.storage_layout import NOBODY, SCALES, TABLES, WHOLE_SCALES, Storage
from cases.storage_forms.storage_spec import Kind
from conformance.contract import Accelerator, BehindMask, Implementation
from conformance.execution import kernel_errors, latent_calls
from conformance.execution.latent_calls import LatentCall

# What memory may hold that nothing wrote, where it must be finite.
_FINITE_STALE = 2.0**6


def build_storage_arrays(
    storage: Storage, behind_mask: BehindMask, *, writes: bool = False
) -> Mapping[str, np.ndarray]:
    """What a call gets beside the dense operands: the tables, what lies where, and what lies where nothing does.

    One that writes pages gets also which dense key the token of each packed query is, and pages without these.
    """
    worst = np.nan if behind_mask == "any" else _FINITE_STALE
    stale = np.array(worst if storage.stale is None else storage.stale, np.float32)
    if not writes:
        return {**storage.arrays, "stale": stale}
    where = find_slots(storage)
    return {**storage.arrays, "held": clear_written(storage, where), "tokens": where.key, "stale": stale}


def build_storage_arrays_for(implementation: Implementation, storage: Storage) -> Mapping[str, np.ndarray]:
    """Likewise, for a call as `implementation` declares it."""
    return build_storage_arrays(storage, implementation.behind_mask, writes=implementation.writes_pages)


def add_padding(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arrays of a call, and zeros that are added where nobody's operands lie: their gradients are those of padding.

    Pages are not differentiated, and dense operands have no such places: they stay as they are.
    """
    storage = arrays.get("storage")
    if storage is None or "cu_kv_lens" not in storage:
        return arrays
    held = {"q": storage["q_rows"], "k": storage["held"], "v": storage["held"]}
    zeros = {name: jnp.zeros((*rows.shape, *arrays[name].shape[2:]), arrays[name].dtype) for name, rows in held.items()}
    return {**arrays, "padding": zeros}


def lower_implementation(implementation: Implementation) -> Implementation:
    """The implementation with each of its calls made on dense operands; itself if it takes no others."""
    if implementation.storage is None or isinstance(implementation.call, StoredCall | LatentCall):
        return implementation
    made = functools.partial(_lower_call, kind=implementation.storage, writes=implementation.writes_pages)
    return dataclasses.replace(
        implementation,
        call=made(implementation.call),
        variants={name: made(call) for name, call in implementation.variants.items()},
        accelerator=_lower_accelerator(implementation.accelerator, made),
    )


def _lower_call(call: Callable[..., Any], kind: Kind, writes: bool) -> StoredCall | LatentCall:
    return LatentCall(call) if kind == "latent" else StoredCall.of(call, kind, writes=writes)


def _lower_accelerator(
    accelerator: Accelerator, made: Callable[[Callable[..., Any]], StoredCall | LatentCall]
) -> Accelerator:
    native, interpreted = accelerator.native, accelerator.under_interpreter

    def under_interpreter(parameters: Any) -> Callable[..., Any]:
        assert interpreted is not None
        return made(interpreted(parameters))

    return dataclasses.replace(
        accelerator,
        native=None if native is None else made(native),
        under_interpreter=None if interpreted is None else under_interpreter,
    )


@dataclasses.dataclass(frozen=True)
class StoredCall:
    """The canonical call on dense operands, made by one that takes them stored.

    Attributes:
      call: the call in its own convention.
      kind: how it takes its operands.
      counts: whether it is told how many sequences there are. Else entries past the last one are those of sequences
        without queries and keys.
      writes: whether it writes the tokens of its queries into pages.
    """

    call: Callable[..., Any]
    kind: Kind
    counts: bool
    writes: bool = False

    @classmethod
    def of(cls, call: Callable[..., Any], kind: Kind, *, writes: bool = False) -> StoredCall:
        """The dense form of `call`, which is asked for what its signature has."""
        parameters = inspect.signature(call).parameters.values()
        counts = any(p.name == "num_seqs" or p.kind is p.VAR_KEYWORD for p in parameters)
        return cls(call, kind, counts, writes)

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
        """`out [B, T, N, V]`, with residuals `[B, N, T]` if asked.

        Args:
          q: `[B, T, N, H]`.
          k: `[B, S, K, H]`.
          v: `[B, S, K, V]`.
          storage: what `given` gives.
          padding: what `add_padding` adds, if gradients of padding are asked for.
          kv_scales: those of k and of v, `[B, S, K]`, where pages have scales, or a number of each.
          save_residuals: whether residuals are returned too.
          options: whatever else the call gets.

        Raises:
          WrongReturn: if the call returns something else than arrays of these shapes.
        """
        if kv_scales is not None and isinstance(kv_scales[0], float):
            options["kv_scales"], kv_scales = kv_scales, None
        taken = self.taken(q, k, v, storage, padding, kv_scales)
        shape = (*taken["q"].shape[:2], v.shape[-1])
        by_keyword = self.of_depth(v.shape[-1])
        if not save_residuals:
            out = kernel_errors.check_output(by_keyword(**taken, **options))
            return _scatter_back(_check_packed_shape("out", out, shape), storage["places"], 0.0)
        returned = by_keyword(**taken, **options, save_residuals=True)
        out, residuals = kernel_errors.check_residuals(returned)
        # A query that is not there is an empty row, of which the contract says what it is.
        sinks = options.get("sinks")
        nothing = {"logsumexp": -jnp.inf if sinks is None else sinks, "max_logits": -jnp.inf}
        dense = {
            name: jnp.moveaxis(
                _scatter_back(_check_packed_shape(name, x, shape[:2]), storage["places"], nothing.get(name, 0.0)), 1, 2
            )
            for name, x in residuals.items()
        }
        return _scatter_back(_check_packed_shape("out", out, shape), storage["places"], 0.0), dense

    def taken(
        self,
        q: Any,
        k: Any,
        v: Any,
        storage: Mapping[str, Any],
        padding: Mapping[str, Any] | None = None,
        kv_scales: tuple[Any, Any] | None = None,
    ) -> dict[str, Any]:
        """What `by_keyword` takes in place of dense operands: the stored ones, and the tables."""
        added, stale = padding or {}, storage["stale"]
        if self.kind == "latent_pages":
            return {
                "q": self.packed(q, storage, None),
                "latent_pages": _gather(k, storage["held"], stale)[..., 0, :],
                **self.tables(storage),
            }
        pages = {"k_pages": (k, "held"), "v_pages": (v, "held")} if self.writes else {}
        tokens = "tokens" if self.writes else "held"
        scales = {} if kv_scales is None else dict(zip(SCALES, kv_scales, strict=True))
        return {
            "q": self.packed(q, storage, added.get("q")),
            "k": _gather(k, storage[tokens], stale, added.get("k")),
            "v": _gather(v, storage[tokens], stale, added.get("v")),
            **{name: _gather(x, storage[held], stale) for name, (x, held) in pages.items()},
            **{name: _gather(x[..., None], storage["held"], stale)[..., 0] for name, x in scales.items()},
            **self.tables(storage),
        }

    def packed(self, q: Any, storage: Mapping[str, Any], padding: Any = None) -> jax.Array:
        """The queries as they are packed, `[total_q, N, H]`."""
        return _gather(q, storage["q_rows"], storage["stale"], padding)

    def tables(self, storage: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tables that it takes."""
        tables = {name: storage[name] for name in TABLES[self.kind]}
        return tables if self.counts else _close_tables(tables)

    def of_depth(self, value_dim: int) -> Callable[..., Any]:
        """The call in its own convention, with keywords alone, for values of this depth."""
        if self.kind == "latent_pages":
            return functools.partial(self._by_latent, value_dim)
        return self.by_keyword

    def by_keyword(self, *, q: Any, k: Any, v: Any, **others: Any) -> Any:
        """The call of keys and values in its own convention, with keywords alone; without the pages that it returns."""
        if (numbers := others.pop("kv_scales", None)) is not None:
            others |= dict(zip(WHOLE_SCALES, numbers, strict=True))
        if not self.writes:
            return self.call(q, k, v, **others)
        out, residuals, _ = self.writing(q=q, k=k, v=v, **others)
        return out if residuals is None else (out, residuals)

    def writing(
        self, *, q: Any, k: Any, v: Any, k_pages: Any, v_pages: Any, save_residuals: bool = False, **others: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """What a call that writes pages returns: `out`, the residuals or none, and the pages by name.

        Raises:
          WrongReturn: if it returns something else.
        """
        asked = {"save_residuals": True} if save_residuals else {}
        returned = self.call(q, k, v, k_pages, v_pages, **others, **asked)
        *first, keys, values = kernel_errors.check_pages(returned, save_residuals=save_residuals)
        return first[0], first[1] if save_residuals else None, {"k_pages": keys, "v_pages": values}

    def _by_latent(self, value_dim: int, *, q: Any, latent_pages: Any, **others: Any) -> Any:
        return self.call(q, latent_pages, **latent_calls.add_latent_options(q, value_dim, others))


def _gather(x: Any, held: Any, stale: Any, padding: Any = None) -> jax.Array:
    """`x [B, L, heads, depth]` where `held [...]` says: `[..., heads, depth]`, with `stale` where nobody is.

    `padding [..., heads, depth]` is added there.
    """
    flat = jnp.asarray(x).reshape(-1, *x.shape[2:])
    held = jnp.asarray(held)
    there = (held != NOBODY)[..., None, None]
    elsewhere = _cast_stale(jnp.asarray(stale), flat.dtype)
    return jnp.where(there, flat[jnp.maximum(held, 0)], elsewhere if padding is None else elsewhere + padding)


def _cast_stale(stale: jax.Array, dtype: Any) -> jax.Array:
    """What memory holds in a dtype: the largest number for what a dtype of quantised pages does not have."""
    top = quantization.find_largest(dtype)
    if top is None:
        return stale.astype(dtype)
    bad = jnp.nan if dtype == quantization.STORED["fp8"] else top
    return jnp.where(jnp.isnan(stale), bad, jnp.clip(stale, -top, top)).astype(dtype)


def _scatter_back(x: jax.Array, places: Any, otherwise: Any) -> jax.Array:
    """`x [total_q, N, ...]` at the places of the dense problem, `[B, T, N, ...]`, with `otherwise` where nobody is."""
    places = jnp.asarray(places)
    there = (places != NOBODY).reshape(*places.shape, *(1,) * (x.ndim - 1))
    return jnp.where(there, x[jnp.maximum(places, 0)], jnp.asarray(otherwise).astype(x.dtype))


def _check_packed_shape(name: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    if np.shape(x) != shape:
        raise kernel_errors.WrongReturn(
            f"{name} must have the shape {list(shape)} of the packed queries, got {list(x.shape)}"
        )
    return jnp.asarray(x)


def _close_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables for a call that is not told how many sequences there are: the others have neither queries nor keys."""
    count = jnp.asarray(tables["num_seqs"])[0]
    ended = {}
    for name, x in tables.items():
        table = jnp.asarray(x)
        if name.startswith("cu_"):
            ended[name] = jnp.where(jnp.arange(len(table)) <= count, table, table[count])
        elif name == "kv_lens":
            ended[name] = jnp.where(jnp.arange(len(table)) < count, table, 0)
        elif name != "num_seqs":
            ended[name] = table
    return ended
