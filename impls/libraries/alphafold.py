"""Adapter of the attention module of AlphaFold 2, as the package alphafold-colabfold has it.

The module projects its inputs. Here the weights of its projections are identities, so that the attention itself is
judged: https://github.com/sokrypton/alphafold/blob/main/alphafold/model/modules.py
"""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax.numpy as jnp
import ml_collections
from alphafold.model import utils
from alphafold.model.modules import Attention

from impls.contract.declarations import declare

_PORTABLE = ml_collections.ConfigDict({"zero_init": False, "deterministic": True, "use_pallas": False})
_NO_GROUPS = "projects queries, keys and values to the same number of heads"


@declare(
    logits="input",
    softmax="input",
    scaled_q=True,
    behind_mask="finite",
    unsupported={"gqa": _NO_GROUPS, "mqa": _NO_GROUPS},
)
def attention(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
    """`alphafold.model.modules.Attention`, whose mask is part of its bias (`alphafold.model.utils.mask_to_bias`)."""
    batch, q_length, heads, depth = q.shape
    width, v_width = heads * depth, heads * v.shape[3]
    config = ml_collections.ConfigDict({"num_head": heads, "gating": False, "key_dim": width, "value_dim": v_width})
    pairs = jnp.zeros((1, 1, 1, 1), q.dtype) if bias is None else bias.astype(q.dtype)
    if mask is not None:
        pairs = pairs + utils.mask_to_bias(mask, q.dtype)
    module = hk.without_apply_rng(hk.transform(lambda *inputs: Attention(config, _PORTABLE, v_width)(*inputs)))
    queries = q.reshape(batch, q_length, width)
    memory = jnp.concatenate([k.reshape(*k.shape[:2], width), v.reshape(*v.shape[:2], v_width)], axis=-1)
    out = module.apply(_build_identity_weights(heads, depth, v.shape[3], q.dtype), queries, memory, pairs)
    return out.reshape(batch, q_length, heads, v.shape[3])


def _build_identity_weights(heads: int, depth: int, v_depth: int, dtype: Any) -> dict[str, dict[str, Any]]:
    """Build weights with which queries, keys and values are what the memory `[keys, values]` holds."""
    width, v_width = heads * depth, heads * v_depth
    key_rows, value_rows = (
        jnp.eye(width + v_width, width, dtype=dtype),
        jnp.eye(width + v_width, v_width, -width, dtype),
    )
    return {
        "attention": {
            "query_w": jnp.eye(width, dtype=dtype).reshape(width, heads, depth),
            "key_w": key_rows.reshape(width + v_width, heads, depth),
            "value_w": value_rows.reshape(width + v_width, heads, v_depth),
            "output_w": jnp.eye(v_width, dtype=dtype).reshape(heads, v_depth, v_width),
            "output_b": jnp.zeros(v_width, dtype),
        }
    }
