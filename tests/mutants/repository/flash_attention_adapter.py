"""An adapter of `flash:flash_attention`, found out by `python -m conformance adapt`."""

from flash import flash_attention

from conformance import declare


@declare(
    causal="end",
    empty_rows="zero",
    behind_mask="finite",
    open_questions=(
        "causal is aligned at the end, as in flash-attention since 2.1, MLX and ejkernel's decoding; at the start in jax.nn, torch and cuDNN. Is the end meant?",
        "NaN in keys and values that no query may attend to reaches results. Must callers keep them finite?",
    ),
)
def attention(
    q, k, v, *, causal=False, window=None, mask=None, soft_cap=None, sinks=None, scale=None, save_residuals=False
):
    result = flash_attention(
        q,
        k,
        v,
        is_causal=causal,
        softmax_scale=scale,
        softcap=0.0 if soft_cap is None else soft_cap,
        window_size=(-1, -1) if window is None else tuple(-1 if side is None else side for side in window),
        attn_mask=mask,
        sinks=sinks,
        return_lse=save_residuals,
    )
    if not save_residuals:
        return result
    return result[0], {"logsumexp": result[1]}
