"""List the features that a call needs, by the names of `cases.case.FEATURES`; `impls.auto` chooses a kernel by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from cases.masks import Mask
from cases.operand_registry import REMOVABLE

Phase = Literal["train", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("train", "prefill", "decode")
OPTIONAL = tuple(operand.name for operand in REMOVABLE if not operand.opt_in)
_STORED_FEATURES = {"int8": "kv_int8", "int4": "kv_int4", "float8_e4m3fn": "kv_fp8"}
_DTYPE_FEATURES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def infer_phase(q_length: int, kv_length: int) -> Phase:
    """Infer `decode` for one query with more keys, `prefill` for several with more keys, else `train`."""
    if q_length == 1 < kv_length:
        return "decode"
    return "prefill" if q_length < kv_length else "train"


def list_requested_features(q: Any, k: Any, v: Any, mask: Mask, options: Mapping[str, Any]) -> tuple[str, ...]:
    """List the features that a call needs. `options` has the optional operands by name; None means not given."""
    num_q_heads, num_kv_heads = q.shape[2], k.shape[2]
    dtype = np.dtype(q.dtype).name
    found = [_DTYPE_FEATURES.get(dtype, dtype)]
    found.append("mha" if num_q_heads == num_kv_heads else "mqa" if num_kv_heads == 1 else "gqa")
    found += mask.features
    found += [operand.name for operand in REMOVABLE if options.get(operand.name) is not None]
    if (scales := options.get("kv_scales")) is not None:
        found.append(_STORED_FEATURES[np.dtype(k.dtype).name])
        found.append("kv_token_scales" if any(np.shape(x)[1] > 1 for x in scales) else "kv_head_scales")
    if q.shape[3] != v.shape[3]:
        found.append("v_head_dim")
    if q.shape[1] != k.shape[1]:
        found.append("unequal_lengths")
    return tuple(dict.fromkeys(found))
