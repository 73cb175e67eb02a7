"""Validate the operands of mixture of block attention (MoBA), for its block-sparse and its dense form."""

from __future__ import annotations

from typing import Any

import jax

from cases.masks import Full, Mask
from cases.moba_mask import Moba
from impls.contract.implementation import validate_mask, validate_operands


def find_moba(mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> Moba:
    """Return the mask if it is a `Moba` mask that fits the lengths.

    Raises:
      NotImplementedError: the mask is not a `Moba` mask, or is combined with another mask.
      ValueError: the mask does not fit the lengths.
    """
    if isinstance(mask, Moba):
        mask.check_lengths(q_length, kv_length)
        return mask
    try:
        validate_mask(mask, batch, num_q_heads, q_length, kv_length)
    except NotImplementedError as error:
        raise NotImplementedError("moba: not combined with another mask") from error
    name = "full" if isinstance(mask, Full) else type(mask).__name__
    raise NotImplementedError(f"{name}: only Moba masks; other masks have kernels of their own")


def validate_moba(
    q: Any, k: Any, v: Any, *, mask: Mask, segment_ids: tuple[jax.Array, jax.Array] | None, **options: Any
) -> Moba:
    """Validate the operands of a MoBA call and return its mask.

    Raises:
      ValueError: an operand or an option is wrong; the message names it.
      NotImplementedError: there are segment ids, or the mask is not a `Moba` mask.
    """
    validate_operands(q, k, v, segment_ids=segment_ids, **options)
    if segment_ids is not None:
        raise NotImplementedError("segment_ids: whether the mean of a chunk takes in other segments is not defined")
    return find_moba(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
