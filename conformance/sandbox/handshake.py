"""Parse the handshake, the message that a kernel's process sends once it has loaded the kernel.

A handshake has the kernel's declarations, its JAX backend and its number of devices. The first handshake of a kernel
is binding: each later process of the kernel, in a worker or after a process died, must send the same one. Otherwise a
kernel could be judged by one declaration and reported with another.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax

from reports.printable_text import make_printable

MAX_TEXT = 10_000
"""The most characters of a text that a kernel sends. Longer texts are cut, since each record of the kernel has them."""


@dataclasses.dataclass(frozen=True)
class Handshake:
    """The message of a kernel's process once it has loaded the kernel, with the files that it has read so far."""

    declared: Mapping[str, Any]  # the kernel's declarations, as plain data (`declaration_codec`)
    backend: str  # the JAX backend of the kernel's process
    count: int  # the number of JAX devices of the kernel's process
    confined: str  # whether the process is confined, the sentence of `confinement.confine_process`
    # Files that the kernel read when it was first loaded, with digests that the judge computed (`loaded_files`).
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """Return the handshake as JSON text. Equal handshakes have equal texts."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def parse_first_files(first_handshake: str) -> Mapping[str, str] | None:
    """Return the files of a kernel's first handshake, with their digests; None if the text is empty."""
    files: Mapping[str, str] | None = json.loads(first_handshake)["files"] if first_handshake else None
    return files


def parse_handshake(
    answer: Any, confined: str, first_handshake: str, files: Mapping[str, str] | None = None
) -> Handshake:
    """Parse and check the answer of a kernel's process to a request to load the kernel.

    Args:
      confined: the sentence about the process's confinement, which the process sent before it loaded the kernel.
      first_handshake: the text of the kernel's first handshake; empty if this is the first.
      files: files that the kernel read when it was first loaded, with their digests.

    Raises:
      ValueError: if the answer is no handshake, differs from the first one, or reports another backend or fewer devices
        than the judge has.
    """
    fields = (answer.get("declared"), answer.get("backend"), answer.get("count")) if isinstance(answer, dict) else ()
    match fields:
        case (dict(declared), str(backend), int(count)) if count > 0:
            handshake = Handshake(declared, backend, count, confined, dict(files or {}))
        case _:
            raise ValueError("its process answered with what is no answer")
    if first_handshake:
        if first_handshake != handshake.text:
            names = ", ".join(_find_differences(first_handshake, handshake.text))
            raise ValueError(f"it declares other values than when it was first loaded: {names}")
        return handshake
    if backend != (here := jax.default_backend()):
        raise ValueError(
            f"its process computes on {backend}, and the judge on {here}: set JAX_PLATFORMS to one of them"
        )
    if count < (there := len(jax.devices())):
        raise ValueError(f"its process has {count} of {there} devices: it must leave XLA_FLAGS alone")
    return handshake


def _find_differences(*texts: str) -> list[str]:
    """Return the names of the fields in which two texts of handshakes differ."""
    one, other = ({**handshake.pop("declared"), **handshake} for handshake in map(json.loads, texts))
    return [make_printable(name) for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
