"""Paged attention that writes pages, beyond the checks of every kernel: donated memory, and refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from impls import paged


def given(**changed: Any) -> dict[str, Any]:
    """Build a call with sequences of two queries and of one, over six pages of four; the last token is padding."""
    return {
        "q": jnp.ones((4, 4, 8)),
        "k": 2 * jnp.ones((4, 2, 8)),
        "v": 3 * jnp.ones((4, 2, 8)),
        "k_pages": jnp.zeros((6, 4, 2, 8)),
        "v_pages": jnp.zeros((6, 4, 2, 8)),
        "kv_lens": jnp.asarray([5, 4], jnp.int32),
        "page_indices": jnp.asarray([[5, 2], [0, 9]], jnp.int32),
        "cu_q_lens": jnp.asarray([0, 2, 3], jnp.int32),
        "num_seqs": jnp.asarray([2], jnp.int32),
    } | changed


def test_pages_that_are_donated_are_written_in_place() -> None:
    call = jax.jit(paged.attention_with_update, donate_argnames=("k_pages", "v_pages"))
    operands = given()
    places = [operands[name].unsafe_buffer_pointer() for name in ("k_pages", "v_pages")]
    _, k_pages, v_pages = call(**operands)
    assert [x.unsafe_buffer_pointer() for x in (k_pages, v_pages)] == places
    for pool, x in ((k_pages, 2), (v_pages, 3)):
        assert [at.tolist() for at in jnp.nonzero(pool[..., 0, 0])] == [[0, 2, 5], [3, 0, 3]]
        assert float(pool.sum()) == 3 * 2 * 8 * x


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": jnp.ones((3, 2, 8))}, r"k must be one token of k_pages for each query, float32\[4, 2, 8\]"),
        ({"v": jnp.ones((4, 2, 8), jnp.bfloat16)}, r"v must be one token of v_pages .* got bfloat16\[4, 2, 8\]"),
        ({"kv_lens": jnp.ones(3, jnp.int32)}, "page_indices must have shape"),
        ({"v_pages": jnp.ones((5, 4, 2, 8))}, "k_pages and v_pages must agree"),
    ],
)
def test_what_is_refused_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged.attention_with_update(**given(**changed))
