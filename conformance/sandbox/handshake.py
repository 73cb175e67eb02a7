"""What a kernel says of itself when it is loaded: what it declares, where it runs, and on how many devices.

It says so once. Whichever process it is loaded in later, of a worker or after it was lost, must hear the same: a kernel
that could tell its processes apart would be judged by one declaration and reported by another.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax

from conformance.records import printable

MAX_TEXT = 10_000
"""Characters of a message or reason of a kernel's; what is longer is cut, since each of its records has it."""


@dataclasses.dataclass(frozen=True)
class Handshake:
    """What a kernel declares, where it runs, on how many devices, and how its process is confined.

    `files` are those that it read as it was first loaded, with their digests (`loaded_files`), which are the judge's.
    """

    declared: Mapping[str, Any]
    backend: str
    count: int
    confined: str
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """All of it as text: whoever says the same says the same text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def parse_first_files(first_handshake: str) -> Mapping[str, str] | None:
    """Return the files that a kernel read as it was first loaded, as its first handshake has them; none if none is."""
    files: Mapping[str, str] | None = json.loads(first_handshake)["files"] if first_handshake else None
    return files


def parse_handshake(
    answer: Any, confined: str, first_handshake: str, files: Mapping[str, str] | None = None
) -> Handshake:
    """What a kernel's process said to having loaded it.

    Args:
      found: its answer.
      confined: what it said before of how it is confined.
      first: the text of what was said when the kernel was first loaded; empty if it never was.
      files: that it read when it was first loaded, with their digests.

    Raises:
      ValueError: for what is no such answer, or another than the first, or says that devices are hidden.
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
            raise ValueError(f"it says otherwise than when it was first loaded of: {names}")
        return handshake
    if backend != (here := jax.default_backend()):
        raise ValueError(
            f"its process computes on {backend}, and the judge on {here}: set JAX_PLATFORMS to one of them"
        )
    if count < (there := len(jax.devices())):
        raise ValueError(f"its process has {count} of {there} devices: it must leave XLA_FLAGS alone")
    return handshake


def _find_differences(*texts: str) -> list[str]:
    """The names of what two texts do not have in common."""
    one, other = ({**handshake.pop("declared"), **handshake} for handshake in map(json.loads, texts))
    return [printable(name) for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
