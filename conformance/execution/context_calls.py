"""Call a plain function that runs on the tokens of one device, with the tokens of whole arrays on several devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from impls.contract.declarations import TokenOrder

_POSITIONAL = ("q", "k", "v")
# The axis of tokens in each operand that has one, and of a second one, along which every device has all tokens.
_TOKEN_AXES = {
    "q": (1,),
    "k": (1,),
    "v": (1,),
    "segment_ids": (1,),
    "mask": (2, 3),
    "bias": (2, 3),
    "dropout_mask": (2, 3),
}


def order_tokens(order: TokenOrder, length: int, devices: int) -> np.ndarray:
    """Return the sequence positions of tokens in the order in which devices have them (docs/contract.md, section 9)."""
    positions = np.arange(length)
    if order == "striped":
        return positions.reshape(-1, devices).T.ravel()
    if order == "balanced":
        chunks = positions.reshape(2 * devices, -1)
        return np.stack([chunks[:devices], chunks[devices:][::-1]], axis=1).ravel()
    return positions


def bind_devices(function: Callable[..., Any], **devices: Any) -> Callable[..., Any]:
    """Return the function of whole arrays that calls `function` on several devices, by `call_on_devices`."""
    return lambda *operands, **options: call_on_devices(function, operands, options, **devices)


def call_on_devices(
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    options: dict[str, Any],
    *,
    axes: Collection[str],
    order: TokenOrder,
    devices: int,
    check_vma: bool,
) -> Any:
    """Call `function` in a `shard_map` over mesh axes, and return its results in the order of the sequence.

    Raises:
      NotImplementedError: the call is inside a `shard_map`, its operands lie on a mesh of explicit axes, or the devices
        do not divide the lengths.
    """
    if jax.sharding.get_abstract_mesh().manual_axes or any(map(_lies_on_explicit_mesh, jax.tree.leaves(operands))):
        raise NotImplementedError("the judge makes the mesh on which the function is called")
    given = {**dict(zip(_POSITIONAL, operands, strict=True)), **options}
    arrays = {name: x for name, x in given.items() if x is not None and all(map(_is_array, _list_parts(x)))}
    static = {name: x for name, x in given.items() if name not in arrays}
    multiple = count_multiple(order, devices)
    lengths = [arrays[name].shape[1] for name in "qk"]
    if any(length % multiple for length in lengths):
        raise NotImplementedError(f"{devices} devices in {order} order do not divide {lengths[0]} and {lengths[1]}")
    tokens = tuple(axes)
    results = PartitionSpec(None, tokens)
    rows = PartitionSpec(None, None, tokens)
    move = functools.partial(_move_tokens, order=order, devices=devices)
    moved = {name: _map_parts(functools.partial(move, axes=_TOKEN_AXES.get(name, ())), x) for name, x in arrays.items()}
    specs = {name: _map_parts(functools.partial(_build_spec, name, tokens), x) for name, x in arrays.items()}

    def on_device(arrays: dict[str, Any]) -> Any:
        first = [arrays[name] for name in _POSITIONAL]
        return function(*first, **{name: x for name, x in arrays.items() if name not in _POSITIONAL}, **static)

    returned = jax.shard_map(
        on_device,
        mesh=_build_mesh(tokens, devices),
        in_specs=(specs,),
        out_specs=(results, rows) if static.get("save_residuals") else results,
        check_vma=check_vma,
    )(moved)
    back = functools.partial(move, inverse=True)
    if not static.get("save_residuals"):
        return back(returned, axes=(1,))
    return back(returned[0], axes=(1,)), {name: back(x, axes=(2,)) for name, x in returned[1].items()}


def count_multiple(order: TokenOrder, devices: int) -> int:
    """Return the number of which each length must be a multiple."""
    return 2 * devices if order == "balanced" else devices


def _list_parts(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _map_parts(function: Callable[[Any], Any], x: Any) -> Any:
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _lies_on_explicit_mesh(x: Any) -> bool:
    return isinstance(x, jax.Array) and bool(jax.typeof(x).sharding.mesh.explicit_axes)


def _move_tokens(x: Any, *, axes: tuple[int, ...], order: TokenOrder, devices: int, inverse: bool = False) -> Any:
    """Reorder tokens along `axes`, except along axes of size 1, from the order of the sequence or back to it."""
    for axis in axes:
        if order != "contiguous" and x.shape[axis] > 1:
            positions = order_tokens(order, x.shape[axis], devices)
            x = jnp.take(x, np.argsort(positions) if inverse else positions, axis=axis)
    return x


def _build_spec(name: str, tokens: tuple[str, ...], x: Any) -> Any:
    """Return the spec of an array: sharded along its first axis of tokens, if that is not of size 1."""
    axis = _TOKEN_AXES.get(name, (0,))[0]
    shared = name in _TOKEN_AXES and x.shape[axis] > 1
    return PartitionSpec(*(None,) * axis, tokens) if shared else PartitionSpec()


@functools.lru_cache(maxsize=8)
def _build_mesh(axes: tuple[str, ...], devices: int) -> Mesh:
    """Build a mesh of the first devices; the second of two axes has two."""
    shape = (devices,) if len(axes) == 1 else (devices // 2, 2)
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:devices])
