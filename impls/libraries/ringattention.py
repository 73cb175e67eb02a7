"""Adapter of ringattention on its path for JAX, on a ring of one device.

`ringattention` takes one array of segment ids, and its chunks must divide the lengths
(https://github.com/haoliuhl/ringattention). It imports a module that current versions of JAX have renamed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
from jax.extend.backend import get_backend

from impls.contract.declarations import declare

with mock.patch.object(jax.lib, "xla_bridge", SimpleNamespace(get_backend=get_backend), create=True):
    from ringattention import ringattention_jax

_UNSUPPORTED = {
    "gqa": "q, k and v have the same number of heads",
    "mqa": "q, k and v have the same number of heads",
    "v_head_dim": "values have the depth of keys",
}


def _find_chunk(length: int) -> int:
    """Return the largest divisor of the length that is at most 64."""
    return next(size for size in range(min(length, 64), 0, -1) if length % size == 0)


@declare(behind_mask="finite", unsupported=_UNSUPPORTED)
def ringattention(q: Any, k: Any, v: Any, *, causal: bool = False, segment_ids: Any = None) -> Any:
    """`ringattention` with `float32_logits`, in chunks of at most 64 queries and keys."""
    if segment_ids is not None and q.shape[1] != k.shape[1]:
        raise NotImplementedError("queries and keys share their segment ids")
    ids = None if segment_ids is None else segment_ids[0]
    options = {
        "causal_block_size": 1 if causal else None,
        "query_chunk_size": _find_chunk(q.shape[1]),
        "key_chunk_size": _find_chunk(k.shape[1]),
        "dtype": q.dtype,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }

    def attend(q: Any, k: Any, v: Any) -> Any:
        return ringattention_jax(q, k, v, None, ids, None, "sp", True, options)

    spec: Any = jax.sharding.PartitionSpec
    mesh, spec = jax.sharding.Mesh(jax.devices()[:1], ("sp",)), spec()
    shard = jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    return shard(q, k, v)
