"""Pass functions of places together with the arrays that they capture (docs/contract.md, section 2).

A function with arrays is a `jax.tree_util.Partial`: a pytree that can be called. Its leaves are the arrays, which may
be traced, and its structure is the function. A kernel may call it, take it apart with `jax.tree.flatten`, or do both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from cases.score_functions import TableScore
from impls.contract.implementation import Implementation


def bind_tables(implementation: Implementation) -> Implementation:
    """Return the implementation with calls that get the operand `score_table` inside `score_mod`.

    It is unchanged if its functions capture no arrays, or if its calls were wrapped before.
    """
    if "captures" not in implementation.offers or isinstance(implementation.call, _TableCall):
        return implementation
    return dataclasses.replace(
        implementation,
        call=_TableCall(implementation.call),
        variants={name: _TableCall(call) for name, call in implementation.variants.items()},
    )


class _TableCall(functools.partial[Any]):
    """A call that gets `score_table` inside `score_mod`; a partial object, so that its signature is the call's own."""

    def __call__(self, *operands: Any, score_table: Any = None, **options: Any) -> Any:
        """Make the call with the table, if there is one, as the leaf of `score_mod`."""
        score = options.get("score_mod")
        if score_table is not None and isinstance(score, TableScore):
            options["score_mod"] = Partial(score, jnp.asarray(score.get_leaf(score_table)))
        return super().__call__(*operands, **options)


def capture_arrays(given: Mapping[str, Any], parameters: Collection[str], *, is_constant: bool) -> dict[str, Any]:
    """Return the options of a call with each function of places as a `Partial`, whose leaves are what it captures.

    Arrays of the mask for which the function has no parameter are captured by `mask_mod`.

    Args:
      given: the options of the call of a plain function.
      parameters: the parameters of the plain function.
      is_constant: whether the array of `score_mod` has no gradient.
    """
    arrays = {name: given[name] for name in ("mask", "segment_ids") if name in given and name not in parameters}
    changed = {name: value for name, value in given.items() if name not in arrays}
    if arrays:
        changed["mask_mod"] = Partial(CapturingMask(changed.get("mask_mod")), jax.tree.map(jnp.asarray, arrays))
    for name in ("mask_mod", "score_mod"):
        if name in changed and not isinstance(changed[name], Partial):
            changed[name] = Partial(changed[name])
    if is_constant and "score_mod" in changed:
        changed["score_mod"] = jax.tree.map(jax.lax.stop_gradient, changed["score_mod"])
    return changed


@dataclasses.dataclass(frozen=True)
class CapturingMask:
    """A function of places whose first argument is the arrays that it captures, by name.

    They are `mask`, booleans `[b, n, T, S]` of the pairs that may attend, and `segment_ids`, those of queries `[B, T]`
    and of keys `[B, S]`. A pair must also be allowed by `formula`, if there is one.
    """

    formula: Callable[..., Any] | None

    def __call__(self, captured: Mapping[str, Any], b: Any, n: Any, i: Any, j: Any) -> Any:
        """Return whether query `i` of head `n` in batch row `b` may attend to key `j`."""
        found = (i >= 0) & (j >= 0) if self.formula is None else self.formula(b, n, i, j)
        if (mask := captured.get("mask")) is not None:
            places = (place if size > 1 else 0 for place, size in zip((b, n, i, j), mask.shape, strict=True))
            found = found & mask[tuple(places)]
        if (ids := captured.get("segment_ids")) is not None:
            found = found & (ids[0][b, i] == ids[1][b, j])
        return found
