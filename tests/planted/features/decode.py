"""Bugs of decode attention: how far a sequence goes, where its queries are, and what its splits leave to be merged."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, has
from tests.bank import PlantedBug
from tests.kernels.split_decode import (
    BLOCK,
    SPLITS,
    DecodeSteps,
    Schedule,
    build_decode_implementation,
    build_decode_tpu_implementation,
)
from tests.planted.features import decode_steps as wrong

Array = Any

_DECODE = has("decode")
_RAGGED = has("decode", "lengths")
_OWN = has("own_window")


def _with_empty_row(case: Case) -> bool:
    return case.phase == "decode" and "lengths" in case.mask and "-0" in case.mask


def _batched(case: Case) -> bool:
    return case.phase == "decode" and "lengths" in case.mask and case.batch > 1


def _bug(
    name: str,
    *,
    kind: str,
    reference: str,
    shows: tuple[str, ...],
    trigger: Trigger = _DECODE,
    takes: frozenset[str] = frozenset(),
    **steps: Any,
) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="decode",
        kind=kind,
        reference=reference,
        shows=shows,
        build=functools.partial(build_decode_implementation, DecodeSteps(**steps), name, takes),
        trigger=trigger,
    )


# A bug of windows that move with each sequence.
_own_bug = functools.partial(_bug, trigger=_OWN, takes=frozenset({"own_window"}))


def _tpu_bug(
    name: str, schedule: Schedule, *, kind: str, reference: str, shows: tuple[str, ...], trigger: Trigger = _DECODE
) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="decode",
        kind=kind,
        reference=reference,
        shows=shows,
        build=functools.partial(build_decode_tpu_implementation, schedule, name),
        trigger=trigger,
    )


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "decode-last-block-dropped",
        kind="paged.floor-div",
        reference="maxtext 65e8bcff0",
        shows=("out", "logsumexp"),
        blocks=lambda lengths: lengths // BLOCK,
    ),
    _bug(
        "decode-short-row-has-no-block",
        kind="decode.prefetch-neg",
        reference="maxtext 211ec5efe",
        shows=("out", "logsumexp"),
        trigger=_RAGGED,
        blocks=lambda lengths: jnp.where(lengths < BLOCK, 0, -(-lengths // BLOCK)),
    ),
    _bug(
        "decode-key-behind-the-last-counts",
        kind="ragged.mask-le",
        reference="inferred from maxtext 4cb305191 (one key too many)",
        shows=("out", "logsumexp"),
        trigger=_RAGGED,
        exists=lambda j, lengths: j <= lengths,
        blocks=lambda lengths: lengths // BLOCK + 1,
    ),
    _bug(
        "decode-last-block-not-masked",
        kind="ragged.last-block",
        reference="inferred from jax eff612a3b6 (ragged paged attention)",
        shows=("out", "logsumexp"),
        trigger=_RAGGED,
        exists=lambda j, lengths: j < -(-lengths // BLOCK) * BLOCK,
    ),
    _bug(
        "decode-block-too-many-at-whole-blocks",
        kind="ragged.last-block",
        reference="inferred from maxtext 65e8bcff0 ((length + block) // block)",
        shows=("out", "logsumexp"),
        trigger=both(_RAGGED, lambda case: "128" in case.mask),
        exists=lambda j, lengths: jnp.where(lengths % BLOCK == 0, j < lengths + BLOCK, j < lengths),
        blocks=lambda lengths: (lengths + BLOCK) // BLOCK,
    ),
    _bug(
        "decode-whole-cache",
        kind="ragged.len-ignored",
        reference="inferred from xformers#1122",
        shows=("out", "logsumexp"),
        trigger=_RAGGED,
        exists=lambda j, lengths: j >= 0,
        blocks=lambda lengths: jnp.full_like(lengths, 1 << 20),
    ),
    _bug(
        "decode-first-length-for-all",
        kind="ragged.batch0",
        reference="ejkernel 3ed3b1f",
        shows=("out", "logsumexp"),
        trigger=_batched,
        lengths=wrong.first_row_for_all,
    ),
    _bug(
        "decode-length-of-the-next-row",
        kind="megacore.length",
        reference="jax 10dbfcf747 (paged attention, batch megacore)",
        shows=("out", "logsumexp"),
        trigger=_batched,
        lengths=wrong.of_next_row,
    ),
    _bug(
        "decode-no-keys-means-all",
        kind="decode.len0",
        reference="inferred from jax 4de346485d (paged attention)",
        shows=("out", "logsumexp"),
        trigger=_with_empty_row,
        lengths=wrong.garbage_of_a_short_row,
    ),
    _bug(
        "decode-split-without-keys-not-written",
        kind="decode.len0-garbage",
        reference="jax 4de346485d (paged attention)",
        shows=("out", "logsumexp"),
        trigger=_RAGGED,
        part=wrong.never_written,
    ),
    _bug(
        "decode-nothing-over-nothing",
        kind="decode.pad-sample-len0",
        reference="HabanaAI/vllm-fork#318",
        shows=("out",),
        trigger=_with_empty_row,
        normalise=wrong.zero_over_zero,
    ),
    _bug(
        "decode-at-the-end-of-the-cache",
        kind="chunk.cache-trim",
        reference="mlx-lm PR 1673 (by the padded buffer's length instead of the offset)",
        shows=("out", "logsumexp"),
        positions=wrong.at_the_end_of_the_cache,
    ),
    _bug(
        "decode-window-from-the-start",
        kind="decode.window-q-offset",
        reference="maxtext 8f82f2d02",
        shows=("out", "logsumexp"),
        trigger=has("decode", "offset"),
        positions=wrong.at_the_start,
    ),
    _bug(
        "decode-draft-tokens-see-what-the-first-does",
        kind="decode.multi-query-offset",
        reference="inferred from candle PR 3743",
        shows=("out", "logsumexp"),
        trigger=has("prefill", "causal"),
        allows=wrong.first_query_for_all,
    ),
    _bug(
        "decode-window-one-wider",
        kind="window.off-by-one",
        reference="maxtext 4cb305191",
        shows=("out", "logsumexp"),
        trigger=has("decode", "window"),
        allows=wrong.window_one_wider,
    ),
    _bug(
        "decode-block-of-the-windows-start-left-out",
        kind="mask.corner-only",
        reference="inferred from maxtext 8f82f2d02 (windows in decode)",
        shows=("out", "logsumexp"),
        trigger=has("decode", "window"),
        allows=wrong.whole_blocks_of_a_window,
    ),
    _bug(
        "decode-splits-leave-the-tail-out",
        kind="kend.split-k-rank",
        reference="tokamax f896356",
        shows=("out", "logsumexp"),
        share=lambda kv_length: max(BLOCK, kv_length // SPLITS // BLOCK * BLOCK),
    ),
    _bug(
        "decode-cap-dropped",
        kind="cap.dropped-by-backend",
        reference="sglang#33915",
        shows=("out", "logsumexp"),
        trigger=has("decode", "soft_cap"),
        logits=wrong.cap_dropped,
    ),
    _bug(
        "decode-cap-in-base-two",
        kind="cap.log2-fold",
        reference="sgl-project/sgl-kernel-xpu PR 491",
        shows=("out", "logsumexp"),
        trigger=has("decode", "soft_cap"),
        logits=wrong.scale_of_values,
    ),
    _bug(
        "decode-out-left-in-f32",
        kind="splitk.dtype",
        reference="tokamax 8a7432c",
        shows=("out",),
        trigger=has("decode", "bf16"),
        round_out=wrong.kept_in_f32,
    ),
    _bug(
        "decode-stale-values-not-hidden",
        kind="decode.stale-cache",
        reference="inferred from pytorch#176793 (memory that nothing wrote)",
        shows=("out",),
        trigger=_RAGGED,
        hide=lambda v, seen: v,
    ),
    _bug(
        "decode-masked-split-has-a-sum",
        kind="ring.empty-block",
        reference="tokamax 657b71a",
        shows=("out", "logsumexp", "max_logits"),
        trigger=_RAGGED,
        part=wrong.mask_value,
    ),
    _bug(
        "decode-maximum-of-the-splits-before",
        kind="online.max-not-rescaled",
        reference="inferred from flash-attn#404",
        shows=("out", "logsumexp"),
        store=wrong.highest_of_two_splits,
    ),
    _own_bug(
        "decode-own-window-of-the-first-row",
        kind="decode.window-batch0",
        reference="inferred from ejkernel 3ed3b1f (one row's length for all)",
        shows=("out", "logsumexp"),
        trigger=both(_OWN, lambda case: case.batch > 1),
        positions=wrong.of_the_first_row,
    ),
    _own_bug(
        "decode-own-window-at-the-end-of-the-cache",
        kind="decode.window-q-offset",
        reference="inferred from maxtext 8f82f2d02",
        shows=("out", "logsumexp"),
        positions=wrong.last_tokens_of_the_cache,
    ),
    _own_bug(
        "decode-own-window-of-the-next-token",
        kind="decode.window-length",
        reference="inferred from maxtext 4cb305191 (windows one off)",
        shows=("out", "logsumexp"),
        positions=wrong.behind_the_last_token,
    ),
    _own_bug(
        "decode-own-window-of-the-last-draft-token",
        kind="decode.multi-query-offset",
        reference="inferred from candle PR 3743",
        shows=("out", "logsumexp"),
        trigger=has("own_window", "prefill"),
        allows=wrong.of_the_last_query,
    ),
    _tpu_bug(
        "decode-tpu-row-without-keys-has-no-step",
        wrong.no_steps_for_nothing,
        kind="decode.len0-garbage",
        reference="jax 4de346485d (paged attention)",
        shows=("out",),
        trigger=_with_empty_row,
    ),
    _tpu_bug(
        "decode-tpu-last-block-dropped",
        wrong.whole_blocks_only,
        kind="paged.floor-div",
        reference="maxtext 65e8bcff0",
        shows=("out", "logsumexp"),
    ),
    _tpu_bug(
        "decode-tpu-looks-ahead-of-the-last-row",
        wrong.ahead_of_the_last_row,
        kind="decode.oob-next-len",
        reference="jax 0e690c1a88 (tpu paged_attention)",
        shows=("forward",),
        trigger=_RAGGED,
    ),
    _tpu_bug(
        "decode-tpu-block-before-the-first",
        wrong.block_before_the_first,
        kind="decode.prefetch-neg",
        reference="maxtext 211ec5efe",
        shows=("forward",),
        trigger=_with_empty_row,
    ),
    _tpu_bug(
        "decode-tpu-blocks-of-another-row",
        wrong.another_rows_blocks,
        kind="megacore.length",
        reference="jax 10dbfcf747 (paged attention, batch megacore)",
        shows=("out", "logsumexp"),
        trigger=_batched,
    ),
)
