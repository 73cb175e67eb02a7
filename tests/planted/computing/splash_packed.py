"""Bugs of packed sequences in the splash kernels for TPU, each one passage of their source changed."""

from __future__ import annotations

import functools

from cases.case import Case
from cases.case_id import parse_case_id
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.packed_bug import trained
from tests.planted.planting.source_change import Change, changed

_BLOCK = 128
CASE = parse_case_id(
    "train/f32/B4.T200.S402.N4.K2.H32.V16/own-l275-402-260-190-5/softcap5/sinks/packed-q130-0-200-3/normal/s0"
)
"""Several blocks of 128 each way: a full one, borders inside others, a window, keys that no query sees, and padding."""


def _several_blocks(case: Case) -> bool:
    """Sequences with gradients, one of which is longer than a block."""
    return trained(case) and case.q_length > _BLOCK


def _build(name: str, change: Change, in_parts: bool = False) -> Implementation:
    package = changed("impls.splash_tpu", f"planted_{name.replace('-', '_')}", change)
    sizes = package.BlockSizes.uniform(_BLOCK, _BLOCK)
    if in_parts:  # blocks of four parts
        sizes = package.BlockSizes.uniform(2 * _BLOCK, 2 * _BLOCK, _BLOCK, _BLOCK)
    found: Implementation = package.build_packed_implementation(name, block_sizes=sizes)
    return found


_bug = functools.partial(
    stored_bug.bug,
    family="splash packed",
    build=_build,
    shows="out logsumexp max_logits dq dk dv",
    trigger=_several_blocks,
)

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "splash-packed-keys-without-queries-not-written",
        Change(
            "splash_packed",
            "visited = holds.at[:, 0].set(holds[:, 0] | ~holds.any(axis=1))",
            "visited = holds",
        ),
        kind="blocks.empty-kv-tile",
        reference="Dao-AILab/flash-attention#2421; tokamax 21fcf2b",
        shows="dk dv",
    ),
    _bug(
        "splash-packed-blocks-with-a-border-taken-for-full",
        Change("splash_packed", "(high >= end)).all(axis=1)", "(high >= end)).any(axis=1)"),
        kind="blocks.full-by-one-query",
        reference="inferred from tile-ai/tilelang#2010, blocks counted without the length of the sequence",
    ),
    _bug(
        "splash-packed-block-of-a-first-key-skipped",
        Change("splash_packed", "((low < end) & (high > start))", "((low <= start) & (high > start))"),
        kind="blocks.skip-partial",
        reference="inferred from tokamax 620ac16 (skip list)",
    ),
    _bug(
        "splash-packed-sums-of-the-block-before-kept",
        Change("splash_packed", "FIRST * ((number == 0) | (row != before))", "FIRST * (number == 0)"),
        kind="init.accumulator",
        reference="jax 08c2a36e28 (ragged paged attention)",
    ),
    _bug(
        "splash-packed-last-step-not-run",
        Change("splash_packed", "stored=None, total=total)", "stored=None, total=total - 1)"),
        kind="blocks.skip-last",
        reference="tokamax 602c79a (dq steps of short sequences)",
        shows="out logsumexp max_logits dq dk dv padding",
    ),
    _bug(
        "splash-packed-queries-of-nobody-kept",
        Change("splash_packed", "    q = jnp.where((low < high)[:, None, None], q, jnp.zeros((), q.dtype))\n", ""),
        kind="padding",
        reference="pytorch/pytorch#176793, Dao-AILab/flash-attention#2324",
        shows="dk padding",
    ),
    _bug(
        "splash-packed-a-key-past-the-range",
        Change("splash_tiles", "(place >= low) & (place < high)", "(place >= low) & (place <= high)"),
        kind="window.off-by-one",
        reference="inferred: the end of a range is one past its last key",
    ),
    _bug(
        "splash-packed-key-position-from-the-grid",
        Change("splash_launch", "return Step(q=q, kv=kv,", "return Step(q=q, kv=g.step,"),
        kind="blocks.shrunk-offset",
        reference="jax splash_attention_kernel.py (shrunk grid, `data_next`); tokamax 9ddc1b0",
    ),
    _bug(
        "splash-packed-parts-of-a-block-in-another-order",
        Change("splash_packed", "-1, kv_parts).swapaxes(1, 2)", "-1, kv_parts).swapaxes(1, 2).swapaxes(2, 3)"),
        kind="blocks.skip-partial",
        reference="inferred from tokamax 620ac16 (skip list)",
        build=functools.partial(_build, in_parts=True),
    ),
)
