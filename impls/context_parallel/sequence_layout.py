"""Distribute a sequence over devices in equal chunks, in an order that balances the work under a causal mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class SequencePlaces:
    """Sequence positions of a device: one or two runs of `chunk` positions. Positions past `length` are padding."""

    starts: tuple[int, ...]
    chunk: int
    length: int

    @property
    def size(self) -> int:
        """Number of positions that the device has, padding included."""
        return len(self.starts) * self.chunk

    @property
    def padded(self) -> bool:
        """Whether some of the positions are padding."""
        return max(self.starts) + self.chunk > self.length

    def position(self, i: Any) -> Any:
        """Compute the sequence position of local index `i`, for any array type with operators."""
        if len(self.starts) == 1:
            return i + self.starts[0]
        first, second = self.starts
        return i + first + (i // self.chunk) * (second - first - self.chunk)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Distribution of a sequence of `length` over `devices`, padded to equal chunks.

    With `balanced`, there are `2 * devices` chunks, and device `r` has chunks `r` and `2 * devices - 1 - r`. Under a
    causal mask the queries of the first chunk see few keys and those of the second many. Together they see the same
    number of keys on every device. Without `balanced`, each device has one chunk.
    """

    length: int
    devices: int
    balanced: bool = True

    def __post_init__(self) -> None:
        for name in ("length", "devices"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def chunk(self) -> int:
        """Number of positions per chunk."""
        return -(-self.length // len(self.order))

    @property
    def local(self) -> int:
        """Number of positions per device, padding included."""
        return self.chunk * len(self.order) // self.devices

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the chunks, in the order of the devices that have them."""
        if not self.balanced:
            return tuple(range(self.devices))
        return tuple(chunk for rank in range(self.devices) for chunk in (rank, 2 * self.devices - 1 - rank))

    def places(self, rank: int) -> SequencePlaces:
        """Compute the sequence positions that device `rank` has."""
        each = len(self.order) // self.devices
        chunks = self.order[rank * each : (rank + 1) * each]
        return SequencePlaces(tuple(chunk * self.chunk for chunk in chunks), self.chunk, self.length)

    def deal(self, x: Any, axis: int) -> Any:
        """Pad `x` along `axis` with zeros, and reorder it so that the positions of each device are contiguous."""
        padding = self.chunk * len(self.order) - self.length
        x = jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)]) if padding else jnp.asarray(x)
        return self._taken(x, axis, np.asarray(self.order))

    def collect(self, x: Any, axis: int) -> Any:
        """Restore the sequence order that `deal` changed, and drop the padding."""
        whole = self._taken(x, axis, np.argsort(self.order))
        return whole[(slice(None),) * axis + (slice(self.length),)]

    def _taken(self, x: Any, axis: int, order: np.ndarray) -> Any:
        if (order == np.arange(len(order))).all():
            return x
        cut = x.reshape(*x.shape[:axis], len(order), self.chunk, *x.shape[axis + 1 :])
        return jnp.take(cut, order, axis=axis).reshape(x.shape)
