"""How a sequence is shared: equal chunks, dealt to devices in an order that balances causal work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class SequencePlaces:
    """Sequence positions of what a device holds: one or two runs of `chunk` positions, those past `length` padding."""

    starts: tuple[int, ...]
    chunk: int
    length: int

    @property
    def size(self) -> int:
        """How many places there are."""
        return len(self.starts) * self.chunk

    @property
    def padded(self) -> bool:
        """Whether some of them are padding."""
        return max(self.starts) + self.chunk > self.length

    def position(self, i: Any) -> Any:
        """Sequence position of place `i`, on any array type with operators."""
        if len(self.starts) == 1:
            return i + self.starts[0]
        first, second = self.starts
        return i + first + (i // self.chunk) * (second - first - self.chunk)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A sequence of `length` on `devices`, padded to equal chunks.

    With `balanced`, it is cut in `2 * devices` chunks and device `r` holds chunks `r` and `2 * devices - 1 - r`: under
    a causal mask the first sees little and the second much, together the same on every device. Else one chunk each.
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
        """Positions a chunk."""
        return -(-self.length // len(self.order))

    @property
    def local(self) -> int:
        """Places a device."""
        return self.chunk * len(self.order) // self.devices

    @property
    def order(self) -> tuple[int, ...]:
        """The chunks, device by device."""
        if not self.balanced:
            return tuple(range(self.devices))
        return tuple(chunk for rank in range(self.devices) for chunk in (rank, 2 * self.devices - 1 - rank))

    def places(self, rank: int) -> SequencePlaces:
        """What device `rank` holds."""
        each = len(self.order) // self.devices
        chunks = self.order[rank * each : (rank + 1) * each]
        return SequencePlaces(tuple(chunk * self.chunk for chunk in chunks), self.chunk, self.length)

    def deal(self, x: Any, axis: int) -> Any:
        """`x` with its axis of `length` padded with zeros and put in the devices' order."""
        padding = self.chunk * len(self.order) - self.length
        x = jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)]) if padding else jnp.asarray(x)
        return self._taken(x, axis, np.asarray(self.order))

    def collect(self, x: Any, axis: int) -> Any:
        """Inverse of `deal`."""
        whole = self._taken(x, axis, np.argsort(self.order))
        return whole[(slice(None),) * axis + (slice(self.length),)]

    def _taken(self, x: Any, axis: int, order: np.ndarray) -> Any:
        if (order == np.arange(len(order))).all():
            return x
        cut = x.reshape(*x.shape[:axis], len(order), self.chunk, *x.shape[axis + 1 :])
        return jnp.take(cut, order, axis=axis).reshape(x.shape)
