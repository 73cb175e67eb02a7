"""Help to adapt modules with projections, and functions whose arrays have named axes, to plain functions.

A module multiplies its inputs by weights before it attends. With identity weights it computes attention alone. A
library of named axes wants a name for each axis of an array.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cases.name_suggestions import suggest_or_list
from cases.operand_registry import OPERANDS
from impls.contract.argument_validation import validate_arguments


@validate_arguments
def identity_projection(num_heads: int, depth: int) -> np.ndarray:
    """Return the weights of a projection that leaves its input as it is, f32 `[num_heads * depth, num_heads, depth]`.

    The input has `num_heads * depth` features: the heads one behind the other, as `x.reshape(B, T, -1)` makes them of
    `x [B, T, num_heads, depth]`. The same weights, reshaped to `[num_heads, depth, num_heads * depth]`, project the
    heads back to these features. A product by them is exact, unless it rounds the input itself, as in tf32.
    """
    if min(num_heads, depth) < 1:
        raise ValueError(f"num_heads and depth must be at least 1, got {num_heads} and {depth}")
    features = num_heads * depth
    return np.eye(features, dtype=np.float32).reshape(features, num_heads, depth)


@validate_arguments
def name_axes(operand: str, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of an operand's axes, in their order.

    Args:
      operand: an operand that is one array, such as `"q"` or `"bias"`, or `"out"`.
      names: a name for each letter. B are batch rows, T queries, S keys, N query heads, K key/value heads. H is the
        depth of queries and keys, V that of values.

    Raises:
      ValueError: for an operand that does not exist or is no single array, and for a letter without a name.
    """
    letters = {"out": ("B", "T", "N", "V")} | {o.name: o.arrays[0] for o in OPERANDS if len(o.arrays) == 1}
    if operand not in letters:
        raise ValueError(f"operand {operand!r} is no array of named axes{suggest_or_list(operand, letters)}")
    if missing := [letter for letter in letters[operand] if letter not in names]:
        raise ValueError(f"names has no name for the axis {missing[0]} of {operand} [{', '.join(letters[operand])}]")
    return tuple(names[letter] for letter in letters[operand])
