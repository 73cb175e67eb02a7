"""Bugs of packed sequences in the flash kernels for GPUs, each one passage of their source changed."""

from __future__ import annotations

import functools

from cases.case import Case
from cases.case_id import parse_case_id
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.packed_bug import trained
from tests.planted.planting.source_change import Change, build_changed

_LONGEST_BLOCK = 32
CASE = parse_case_id(
    "train/f32/B5.T70.S120.N4.K2.H16.V24/own-l70-120-60-1-33-50/softcap5/sinks/packed-q70-0-1-33-9/normal/s0"
)
"""Several blocks of 16 and 32 each way: full ones, borders inside others, a window, keys no query sees, and padding."""
CAUSAL = parse_case_id("train/f32/B4.T60.S90.N2.K1.H16.V16/own-linf-90-1-40-20/packed-q60-1-40-26/normal/s0")
"""Chunks, a token, a prompt and a sequence of more queries than keys, under no window."""


def _several_blocks(case: Case) -> bool:
    """Sequences with gradients, one of which is longer than a block."""
    return trained(case) and case.q_length > _LONGEST_BLOCK


_build = functools.partial(build_changed, "impls.flash_gpu", "build_packed_implementation", on_gpu=False)
_bug = functools.partial(
    stored_bug.bug,
    family="flash gpu packed",
    build=_build,
    shows="out logsumexp max_logits dq dk dv",
    trigger=_several_blocks,
)

_RANGES = "    low, high = compute_key_ranges(tables, sides, q_length)\n"
_CALL = "compute_ranges(tables, resolve_window(causal, window), q_length)"


def _with(tables: str) -> Change:
    """The call with other tables."""
    return Change("flash_gpu_packed", _CALL, _CALL.replace("tables", f"tables._replace({tables})"))


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "flash-gpu-packed-first-block-left-out",
        Change(
            "packed_visits",
            "first = jnp.minimum(found.first, found.end)",
            "first = jnp.minimum(found.first + 1, found.end)",
        ),
        kind="blocks.skip-first",
        reference="inferred from tokamax 620ac16 (skip list)",
    ),
    _bug(
        "flash-gpu-packed-last-block-left-out",
        Change(
            "packed_visits", "_count_blocks(high.max(axis=1), tiles.block_kv)", "high.max(axis=1) // tiles.block_kv"
        ),
        kind="blocks.skip-last",
        reference="tokamax 602c79a (dq steps of short sequences)",
        shows="out logsumexp max_logits dq",
    ),
    _bug(
        "flash-gpu-packed-keys-of-a-straddled-block-without-its-last-queries",
        Change("packed_visits", "_count_blocks(seeing.end, tiles.block_q)", "seeing.end // tiles.block_q"),
        kind="blocks.skip-partial",
        reference="inferred: the queries of a block of keys counted in whole blocks",
        shows="dk dv",
    ),
    _bug(
        "flash-gpu-packed-full-by-the-first-query",
        Change(
            "packed_visits",
            "_count_blocks(low.max(axis=1), tiles.block_kv)",
            "_count_blocks(low.min(axis=1), tiles.block_kv)",
        ),
        kind="blocks.full-by-one-query",
        reference="inferred from tile-ai/tilelang#2010, blocks counted without the length of the sequence",
        shows="out logsumexp max_logits dq",
    ),
    _bug(
        "flash-gpu-packed-full-for-keys-by-their-first",
        Change(
            "packed_visits",
            '_search_sorted(reached, end, "left"), _search_sorted(ahead',
            '_search_sorted(reached, start, "right"), _search_sorted(ahead',
        ),
        kind="blocks.full-by-one-key",
        reference="inferred from tile-ai/tilelang#2010, blocks counted without the length of the sequence",
        shows="dk dv",
    ),
    _bug(
        "flash-gpu-packed-list-of-the-next-program",
        Change("packed_visits", "begin = kept[behind - beside]", "begin = kept[behind]"),
        kind="list.place",
        reference="jax splash_attention_kernel.py (shrunk grid, `data_next`); tokamax 9ddc1b0",
    ),
    _bug(
        "flash-gpu-packed-place-in-the-list-from-its-start",
        Change(
            "packed_visits",
            "block = found.first[program] + place - (behind - beside)[program]",
            "block = found.first[program] + place",
        ),
        kind="list.place",
        reference="jax splash_attention_kernel.py (shrunk grid, `data_next`); tokamax 9ddc1b0",
    ),
    _bug(
        "flash-gpu-packed-queries-begin-one-early",
        _with("cu_q_lens=jnp.maximum(tables.cu_q_lens - 1, 0)"),
        kind="border.off-by-one",
        reference="inferred from Dao-AILab/flash-attention varlen (`cu_seqlens_q`)",
    ),
    _bug(
        "flash-gpu-packed-keys-of-the-next-sequence",
        _with("cu_kv_lens=jnp.roll(tables.cu_kv_lens, -1)"),
        kind="border.neighbour",
        reference="jax 10dbfcf747 (paged attention, length of another row)",
    ),
    _bug(
        "flash-gpu-packed-number-of-sequences-ignored",
        _with("num_seqs=jnp.full((1,), len(tables.cu_q_lens) - 1, jnp.int32)"),
        kind="num_seqs",
        reference="inferred: tables with room for more sequences, read to their end",
    ),
    _bug(
        "flash-gpu-packed-padding-attended",
        Change(
            "packed_visits",
            _RANGES,
            _RANGES
            + "    high = jnp.where((low < high) & (high == tables.cu_kv_lens[tables.num_seqs]), high + 3, high)\n",
        ),
        kind="padding",
        reference="Dao-AILab/flash-attention#2324, NVIDIA/TransformerEngine thd (padding between and behind sequences)",
    ),
    _bug(
        "flash-gpu-packed-window-by-place-in-the-pack",
        Change(
            "packed_visits",
            _RANGES,
            _RANGES + "    left = 2**30 if sides[0] is None else sides[0]\n"
            "    whole = compute_key_ranges(tables, (None, sides[1]), q_length)[0]\n"
            "    low = jnp.where(low < high, jnp.maximum(whole, jnp.arange(q_length, dtype=jnp.int32) - left), low)\n",
        ),
        kind="window.place",
        reference="inferred: a window over tokens of the pack in place of those of the sequence",
    ),
    _bug(
        "flash-gpu-packed-causal-from-the-start",
        Change(
            "packed_visits",
            _RANGES,
            _RANGES + "    token = jnp.arange(q_length, dtype=jnp.int32)\n"
            "    begin = lax.cummax(jnp.where(jnp.isin(token, tables.cu_q_lens), token, 0))\n"
            "    start = compute_key_ranges(tables, (None, None), q_length)[0]\n"
            "    high = high if sides[1] is None else jnp.minimum(high, start + token - begin + 1)\n",
        ),
        kind="causal.start",
        reference="Dao-AILab/flash-attention (bottom-right causal masks from 2.1 on)",
    ),
    _bug(
        "flash-gpu-packed-sink-once-a-block",
        Change(
            "triton.forward",
            "return update_softmax(",
            'sink = inputs["sinks"][0] if "sinks" in inputs else -jnp.inf\n'
            "        return (lambda *given, **known: add_sink(update_softmax(*given, **known), sink))(",
        ),
        kind="sinks.split",
        reference="inferred: a sink joins the sum of every block, and not that of the whole",
        shows="out logsumexp max_logits",
    ),
    _bug(
        "flash-gpu-packed-delta-of-the-neighbour",
        Change(
            "attention",
            "weighted.transpose(0, 2, 1) - d_log",
            "jnp.roll(weighted.transpose(0, 2, 1), 1, axis=2) - d_log",
        ),
        kind="delta",
        reference="inferred from Dao-AILab/flash-attention varlen backward (`dsoftmax_sum`, padded by sequence)",
        shows="dq dk dsinks",
    ),
    _bug(
        "flash-gpu-packed-ranges-of-the-first-queries",
        Change("triton.triton_program", "plan.q_length, at=pair.q_at) for name", "plan.q_length, at=0) for name"),
        kind="border.block",
        reference="inferred: ranges of the program's block taken for those of the one it visits",
        shows="dk dv",
    ),
    _bug(
        "flash-gpu-packed-queries-of-nobody-read",
        Change("triton.backward", "there = low < high", "there = low <= high"),
        kind="padding",
        reference="pytorch/pytorch#176793, Dao-AILab/flash-attention#2324",
        shows="dk padding",
    ),
    _bug(
        "flash-gpu-packed-values-of-nobody-kept",
        Change("triton.forward", "zero_hidden_rows(v, ", "(lambda x, _: x)(v, "),
        kind="padding",
        reference="pytorch/pytorch#176793, Dao-AILab/flash-attention#2324",
        shows="out",
    ),
    _bug(
        "flash-gpu-packed-a-key-past-the-range",
        Change("triton.triton_program", "(j < pair.queries(high))", "(j <= pair.queries(high))"),
        kind="window.off-by-one",
        reference="inferred: the end of a range is one past its last key",
    ),
)
