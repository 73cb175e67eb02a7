"""Aliasing: a call must leave its operands as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from conformance import records
from conformance.asking.judgement import Judgement
from conformance.asking.subject import Subject


def aliasing(subject: Subject) -> Iterator[Judgement]:
    """Operands given as NumPy arrays, outside `jit` and inside, hold the same bits after the call."""
    plain, arrays = subject.executor.bind(subject.problem)
    for how, call in (("eager", plain), ("jit", jax.jit(plain))):
        given = jax.tree.map(np.copy, arrays)
        jax.block_until_ready(call(given))  # type: ignore[no-untyped-call] # untyped upstream
        pairs = zip(_leaves(arrays), _leaves(given), strict=True)
        changed = [name for (name, before), (_, after) in pairs if before.tobytes() != after.tobytes()]
        yield Judgement(
            observable=f"operands.{how}",
            verdict=records.FAIL if changed else records.PASS,
            reason=f"the call writes into its operands: {', '.join(changed)}" if changed else "",
        )


def _leaves(arrays: Any) -> list[tuple[str, np.ndarray]]:
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(arrays)]
