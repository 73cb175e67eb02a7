"""Find the Pallas calls of a traced TPU program: their grids, their scalar operands, and the HBM traffic of blocks.

Before a kernel starts, it fetches scalar operands to scalar memory: lists of the blocks to visit. As a rule these lists
depend on the mask, and not on the operands of attention. Then this module computes them on the host from the constants
in the traced program. Lists that depend on an operand are unknown. `tpu_figures` uses the results to estimate cycles.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core

_MAX_ELEMENTS = 2**22
"""Number of elements of the largest array that is computed on the host; lists of blocks are shorter."""
_MAX_STEPS = 2**20
_CALL_PRIMITIVES = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}
)
_UNMOVED = (pl.ANY, pltpu.HBM)
"""Memory spaces of operands that Pallas leaves where they are."""
_TILE = re.compile(r"\(([\d,]+)\)")


class UnknownValue(Exception):
    """A value cannot be computed on the host, as a rule because it depends on the operands of the program."""


@dataclasses.dataclass(frozen=True, eq=False)
class PallasCall:
    """One call of a Pallas kernel."""

    name: str
    grid: tuple[int, ...]  # number of steps along each axis of the grid; empty if it is not known
    lists: Mapping[int, np.ndarray]  # by index of a scalar operand, its values; only operands whose values are known
    # Bytes of all blocks that move between HBM and the kernel. A block moves in each step that uses another block than
    # the step before. None if the number is not known.
    hbm_bytes: int | None


def find_pallas_calls(program: core.ClosedJaxpr) -> list[PallasCall]:
    """Find every call of a Pallas kernel in a traced program, with its scalar operands as far as they are known."""
    found = []
    with jax.enable_x64(False), jax.ensure_compile_time_eval():
        known = {v: _KnownValue(value) for v, value in zip(program.jaxpr.constvars, program.consts, strict=True)}
        for equation, env in _iter_calls(program.jaxpr, known):
            found.append(_build_call(equation, env))
    return found


class _LazyValue:
    """A result of a jaxpr equation, computed on the host when it is first read."""

    def __init__(self, equation: Any, env: Mapping[Any, Any], number: int) -> None:
        self.equation, self.env, self.number = equation, env, number

    @functools.cached_property
    def value(self) -> Any:
        """The equation's result. Raises `UnknownValue` if it depends on operands, or cannot be computed on the host."""
        if any(math.prod(v.aval.shape) > _MAX_ELEMENTS for v in self.equation.outvars):
            raise UnknownValue
        given = [_get_value(v, self.env) for v in self.equation.invars]
        try:
            found = self.equation.primitive.bind(*given, **self.equation.params)
        except Exception as error:  # some primitives cannot run outside their program, and raise any type
            raise UnknownValue from error
        return found[self.number] if self.equation.primitive.multiple_results else found


@dataclasses.dataclass(frozen=True)
class _KnownValue:
    """A constant of the program, or another value that needs no computation."""

    value: Any


def _get_value(v: Any, env: Mapping[Any, Any]) -> Any:
    """Return the value of a jaxpr literal, or of a variable in `env`. Raises `UnknownValue` if it is not known."""
    if isinstance(v, core.Literal):
        return v.val
    if v not in env:
        raise UnknownValue
    return env[v].value


def _iter_calls(jaxpr: Any, env: dict[Any, Any]) -> Iterator[tuple[Any, Mapping[Any, Any]]]:
    """Yield each equation that calls a Pallas kernel, with the values known at that place.

    The search enters inner jaxprs: called functions with their known arguments, and the bodies of loops without them.

    Args:
      env: known values by variable; values that the program computes are added.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation, env
            continue
        inner = [sub for value in equation.params.values() for sub in _iter_subprograms(value)]
        if equation.primitive.name in _CALL_PRIMITIVES and len(inner) == 1:
            body, consts = inner[0]
            given = [env.get(v) if not isinstance(v, core.Literal) else _KnownValue(v.val) for v in equation.invars]
            within = {v: _KnownValue(value) for v, value in zip(body.constvars, consts, strict=True)}
            within |= {v: known for v, known in zip(body.invars, given, strict=True) if known is not None}
            yield from _iter_calls(body, within)
            for outer, v in zip(equation.outvars, body.outvars, strict=True):
                known = _KnownValue(v.val) if isinstance(v, core.Literal) else within.get(v)
                if known is not None:
                    env[outer] = known
            continue
        within_loops = [
            found
            for body, consts in inner
            for found in _iter_calls(
                body, {v: _KnownValue(value) for v, value in zip(body.constvars, consts, strict=True)}
            )
        ]
        yield from within_loops
        if not within_loops:
            env.update((v, _LazyValue(equation, env, number)) for number, v in enumerate(equation.outvars))


def _iter_subprograms(value: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the jaxprs inside a parameter of an equation, each with its constants."""
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr, value.consts
    elif isinstance(value, core.Jaxpr):
        yield value, ()
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _iter_subprograms(part)


def _build_call(equation: Any, env: Mapping[Any, Any]) -> PallasCall:
    """Build the description of one kernel call from its `pallas_call` equation and the known values."""
    mapping = equation.params["grid_mapping"]
    bounds = mapping.num_dynamic_grid_bounds  # lengths of the grid that are operands; they precede the other operands
    lists = {}
    for number, v in enumerate(equation.invars[: bounds + mapping.num_index_operands]):
        try:
            lists[number] = np.asarray(_get_value(v, env))
        except UnknownValue:
            continue
    name = str(equation.params["name"])
    if len(lists) < bounds + mapping.num_index_operands:
        return PallasCall(name, (), lists, None)
    known = [int(lists[number]) for number in range(bounds)]
    grid = tuple(size if isinstance(size, int) else known.pop(0) for size in mapping.grid)
    return PallasCall(name, grid, lists, _count_hbm_bytes(mapping, grid, list(lists.values())[bounds:]))


def _count_hbm_bytes(mapping: Any, grid: tuple[int, ...], lists: Sequence[np.ndarray]) -> int | None:
    """Count the bytes of blocks that Pallas moves between HBM and the kernel; None if the number is not known.

    Pallas moves a block in each step that uses another block of the array than the step before. It moves nothing of
    arrays that stay in HBM, from which a kernel copies by itself.

    Args:
      lists: the scalar operands, on which the index of a block may depend.
    """
    steps = math.prod(grid)
    if not steps or steps > _MAX_STEPS:
        return None
    total = 0
    for block in mapping.block_mappings:
        if block.block_aval.memory_space in _UNMOVED:
            continue
        told = f"{block.index_map_jaxpr} {block.block_shape}"
        crossings = _count_crossings(_BlockAccess(told, grid, tuple(map(np.ndarray.tobytes, lists)), block, lists))
        if crossings is None:
            return None
        sizes = [getattr(size, "block_size", 1) for size in block.block_shape]
        array = block.array_aval
        elements = math.prod(min(size, length) for size, length in zip(sizes, array.shape, strict=True))
        total += crossings * elements * array.dtype.itemsize
    return total


@dataclasses.dataclass(frozen=True)
class _BlockAccess:
    """The way in which the steps of a grid access the blocks of one array; the cache key of `_count_crossings`."""

    told: str  # text of the index map and of the block's shape; part of the cache key
    grid: tuple[int, ...]  # number of steps along each axis of the grid; part of the cache key
    steered: tuple[bytes, ...]  # bytes of the scalar operands; part of the cache key
    block: Any = dataclasses.field(compare=False)  # Pallas's block mapping
    lists: Sequence[np.ndarray] = dataclasses.field(compare=False)  # the scalar operands


@functools.lru_cache(maxsize=512)
def _count_crossings(way: _BlockAccess) -> int | None:
    """Count the steps of the grid that use another block than the step before, including the first step.

    The count is None if the position of a block is not a single index. Results are cached: several arrays of a kernel
    share an access pattern, and each pattern takes tens of milliseconds.
    """
    steps = math.prod(way.grid)
    places = [place.astype(np.int32) for place in np.unravel_index(np.arange(steps), way.grid or (1,))]

    def start(*place: Any) -> Any:
        return way.block.compute_start_indices_interpret(place[: len(way.grid)], *way.lists)

    try:
        starts = jax.vmap(start)(*places)
    except ValueError:  # the position of the block is not a single index
        return None
    at = np.stack([np.broadcast_to(axis, steps) for axis in starts])
    return 1 + int((at[:, 1:] != at[:, :-1]).any(axis=0).sum())


def lay_out_words(values: np.ndarray, layout: str) -> np.ndarray:
    """Compute the words of an array in the order in which they lie in scalar memory.

    Args:
      layout: layout of the array in the memory that it is copied from, in HLO text: `1,0:T(8,128)(4,1)S(1)`.

    Returns:
      the words as int32, `[words]`.

    Raises:
      ValueError: if the last axis is not the innermost one.
    """
    order, _, tiling = layout.partition(":")
    if [int(axis) for axis in re.findall(r"\d+", order)] != list(range(values.ndim))[::-1]:
        raise ValueError(f"{layout} does not lay out the last axis innermost")
    for found in _TILE.findall(tiling.partition("S(")[0]):
        values = _tile(values, [int(size) for size in found.split(",")])
    return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.int32)


def _tile(values: np.ndarray, tile: Sequence[int]) -> np.ndarray:
    """Split the last axes into padded tiles: first the axes that index a tile, then the axes inside the tile."""
    lead = values.ndim - len(tile)
    padding = [(0, -length % size) for length, size in zip(values.shape[lead:], tile, strict=True)]
    values = np.pad(values, [(0, 0)] * lead + padding)
    cut = [part for length, size in zip(values.shape[lead:], tile, strict=True) for part in (length // size, size)]
    last = range(lead, lead + len(cut))
    return values.reshape(*values.shape[:lead], *cut).transpose([*range(lead), *last[::2], *last[1::2]])
