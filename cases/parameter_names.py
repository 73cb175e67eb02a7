"""Know the names that libraries give to parameters of attention functions, and which operand each probably is.

A plain function gets the operands of the contract by the contract's names. A parameter of another name gets nothing:
this table says which operand its author may have meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OTHER_NAMES: dict[str, str] = {
    "causal": "is_causal use_causal_mask causal_mask",
    "window": "window_size window_sizes sliding_window sliding_window_size local_window_size attention_window "
    "window_left window_right left_window right_window bidirectional_window",
    "mask": "key_mask kv_mask attn_mask attention_mask custom_mask block_mask dense_mask padding_mask "
    "key_padding_mask mask_info",
    "mask_mod": "mask_fn mask_function",
    "score_mod": "score_fn score_function",
    "kv_lengths": "kv_length kv_seqlen kv_seqlens kv_seq_len kv_seq_lens kv_seq_lengths key_value_seq_lengths lengths "
    "seqlens_k seqused_k cache_seqlens actual_seq_lengths_kv",
    "segment_ids": "q_segment_ids kv_segment_ids query_segment_ids key_segment_ids decoder_segment_ids q_segments "
    "kv_segments cu_seqlens_q cu_seqlens_k cu_seqlens_kv cu_seqlens",
    "soft_cap": "cap softcap softcapping logit_cap logits_cap logit_soft_cap logits_soft_cap attn_logits_soft_cap "
    "attn_logit_softcapping attn_softcap logit_softcap logits_softcap",
    "sinks": "sink softmax_aux attention_sink attention_sinks attn_sink attn_sinks s_aux",
    "bias": "attn_bias attention_bias ab position_bias",
    "scale": "softmax_scale sm_scale scale_factor scaling logits_scale query_scale qk_scale attn_scale",
    "alibi_slopes": "alibi alibi_slope slopes",
    "logit_scale": "head_scale logit_temperature",
    "indices": "topk_indices top_k_indices topk_idxs block_indices sparse_indices",
    "moba": "moba_chunk_size moba_topk",
    "save_residuals": "return_lse return_logsumexp return_softmax_lse return_residual return_residuals return_logits "
    "return_attn_probs return_attention_scores return_softmax return_max_logits",
    "page_indices": "block_table block_tables page_table page_tables",
    "kv_scales": "k_scale v_scale k_descale v_descale descale_k descale_v",
}
_OPERAND_OF = {name: operand for operand, names in _OTHER_NAMES.items() for name in (operand, *names.split())}
_TUNING = re.compile(
    r"_.*|bq|bk|bkv|.*block_sizes?|block_.*|.*_block|.*_blocks|tile_.*|.*_tile|chunk_size|(q|query|k|key|kv)_chunk_size"
    r"|num_(warps|stages|ctas|splits|kv_splits|.*_per_.*)|.*_shards|vmem_limit_bytes|grid|cost_estimate|schedule"
    r"|precision|preferred_element_type|interpret|debug|autotune|backend|implementation|platform|name|mask_value"
    r"|deterministic|compiler_params|config"
)
"""Names of parameters that choose how a function computes and not what. Python's private names are among them."""


def find_operand(parameter: str) -> str:
    """Return the operand that a parameter of this name probably is, such as `window`; empty if none is known."""
    return _OPERAND_OF.get(parameter, "")


def is_tuning(parameter: str) -> bool:
    """Return whether a parameter only tunes how a function computes, such as `block_q`, or is private."""
    return not find_operand(parameter) and _TUNING.fullmatch(parameter) is not None


def name_parameters(parameters: Iterable[str]) -> str:
    """Name parameters with the operand that each probably is: `window_size` (is it `window`?)."""
    return ", ".join(
        f"`{name}`" if find_operand(name) in ("", name) else f"`{name}` (is it `{find_operand(name)}`?)"
        for name in parameters
    )


def list_other_names() -> dict[str, tuple[str, ...]]:
    """List the names that libraries give to each operand."""
    return {operand: tuple(names.split()) for operand, names in _OTHER_NAMES.items()}
