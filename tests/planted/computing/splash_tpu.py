"""Bugs in the splash kernels for TPU, each one passage of their source changed."""

from __future__ import annotations

from cases.case import Case
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting.source_change import Change, changed

_PACKAGE = "impls.splash_tpu"
_BLOCK = 128


def _bug(
    name: str,
    change: Change,
    *,
    kind: str,
    reference: str,
    shows: tuple[str, ...],
    trigger: str = "",
    fused: bool = False,
    in_parts: bool = False,
) -> PlantedBug:
    def build() -> Implementation:
        package = changed(_PACKAGE, f"planted_{name.replace('-', '_')}", change)
        sizes = package.BlockSizes.uniform(_BLOCK, _BLOCK, fused_backward=fused)
        if in_parts:  # blocks of four parts
            sizes = package.BlockSizes.uniform(2 * _BLOCK, 2 * _BLOCK, _BLOCK, _BLOCK)
        found: Implementation = package.build_implementation(name, block_sizes=sizes)
        return found

    return PlantedBug(
        name=name,
        family="splash tpu",
        kind=kind,
        reference=reference,
        shows=shows,
        build=build,
        trigger=_TRIGGERS[trigger],
    )


def _blocks(case: Case) -> tuple[int, int]:
    return -(-case.q_length // _BLOCK), -(-case.kv_length // _BLOCK)


_TRIGGERS = {
    "": lambda case: True,
    "several key blocks": lambda case: _blocks(case)[1] > 1,
    "masked": lambda case: case.mask != "full",
    "groups": lambda case: 1 < case.num_kv_heads < case.num_q_heads,
    "tail": lambda case: case.kv_length % _BLOCK != 0,
    "gradients": lambda case: case.phase == "train" and _blocks(case)[0] > 1,
    "unseen keys": lambda case: (
        case.phase == "train"
        and case.kv_length > case.q_length + _BLOCK
        and case.mask.startswith(("window", "chunked"))
    ),
    "dead keys": lambda case: case.mask.startswith("lengths") and case.kv_length > _BLOCK,
    "parts": lambda case: case.mask.startswith(("causal", "window")) and min(_blocks(case)) > 1,
    "shrunk": lambda case: case.mask.startswith(("causal-o", "window", "chunked", "lengths")) and _blocks(case)[1] > 1,
}

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "splash-partial-block-skipped",
        Change(
            "splash_tiles",
            "when(step.computes, step.masked)(",
            'when(step.computes, step.masked, call.phase != "forward" or step.kv != 1)(',
        ),
        kind="blocks.skip-partial",
        reference="tokamax 620ac16 (skip list)",
        shows=("out", "logsumexp"),
        trigger="shrunk",
    ),
    _bug(
        "splash-no-rescale",
        Change("forward", "acc * repeat_lanes(decay, call.head_dim_v) + added", "acc + added"),
        kind="online.no-rescale",
        reference="inferred from Milakov & Gimelshein 2018",
        shows=("out",),
        trigger="several key blocks",
    ),
    _bug(
        "splash-key-position-from-the-grid",
        Change("splash_launch", "return Step(q=q, kv=kv,", "return Step(q=q, kv=g.step,"),
        kind="blocks.shrunk-offset",
        reference="jax splash_attention_kernel.py (shrunk grid, `data_next`); tokamax 9ddc1b0",
        shows=("out", "logsumexp", "dq", "dk", "dv"),
        trigger="shrunk",
    ),
    _bug(
        "splash-accumulator-never-cleared",
        Change("forward", "    scratch.acc[...] = jnp.zeros(scratch.acc.shape, jnp.float32)\n", ""),
        kind="init.accumulator",
        reference="jax 08c2a36e28 (ragged paged attention)",
        shows=("out",),
    ),
    _bug(
        "splash-interleaved-heads",
        Change(
            "splash_launch",
            "lax.div(grid.row, jnp.int32(self.group))",
            "lax.rem(grid.row, jnp.int32(self.call.plan.num_kv_heads * self.call.batch))",
        ),
        kind="heads.interleaved",
        reference="inferred from issues on grouped heads (contract, section 1)",
        shows=("out", "dq"),
        trigger="groups",
    ),
    _bug(
        "splash-dkv-of-the-last-head-only",
        Change("splash_launch", "opens, closes = g.in_group == 0, ", "opens, closes = g.in_group >= 0, "),
        kind="heads.group-sum",
        reference="tokamax 701317b, 339f271",
        shows=("dk", "dv"),
        trigger="groups",
    ),
    _bug(
        "splash-dkv-tile-never-visited",
        Change("splash_schedule", "    visited[~visited.any(axis=(1, 2)), 0, 0] = True\n", ""),
        kind="blocks.empty-kv-tile",
        reference="tokamax 21fcf2b",
        shows=("dk", "dv", "out"),
        trigger="unseen keys",
    ),
    _bug(
        "splash-dkv-skips-its-last-step",
        Change(
            "splash_tiles",
            "when(step.computes, step.masked)(",
            'when(step.computes, step.masked, call.phase != "dkv" or (step.last is not True and ~step.last))(',
        ),
        kind="blocks.skip-last",
        reference="tokamax 602c79a (dq steps of short sequences)",
        shows=("dk", "dv"),
        trigger="masked",
    ),
    _bug(
        "splash-reads-the-tail",
        Change("splash_tiles", "if plan.kv_length % blocks.kv:", "if plan.kv_length < 0:"),
        kind="tails.padding-attended",
        reference="tokamax f896356 (padded keys attended)",
        shows=("out", "logsumexp", "dq"),
        trigger="tail",
    ),
    _bug(
        "splash-block-past-the-end",
        Change("splash_launch", "else self._kv(g, s)\n            inner", "else self._kv(g, s) + 1\n            inner"),
        kind="pipeline.oob-block",
        reference="jax#23181",
        shows=("out", "forward"),
        trigger="several key blocks",
    ),
    _bug(
        "splash-dq-without-row-sums",
        Change("dq_kernel", " - repeat_lanes(scratch.row_sums[rows, :], keys.size))", ")"),
        kind="backward.no-row-sums",
        reference="inferred from Dao 2023, section 3.1.2",
        shows=("dq",),
        trigger="gradients",
    ),
    _bug(
        "splash-steps-declared-parallel",
        Change("splash_launch", '("parallel", "arbitrary", "arbitrary")', '("parallel",) * 3'),
        kind="pipeline.semantics",
        reference="inferred from jax splash_attention_kernel.py (dimension_semantics)",
        shows=("out", "forward", "races"),
    ),
    _bug(
        "splash-fused-dq-read-before-it-is-there",
        Change(
            "dkv_kernel",
            "    _copy_dq_in(call, step, outputs, scratch, number).wait()\n"
            "    block = scratch.dq.at[number % 2]\n"
            "    for rows, dq in added:\n"
            "        block[rows, :] += dq\n",
            "\n"
            "    block = scratch.dq.at[number % 2]\n"
            "    for rows, dq in added:\n"
            "        block[rows, :] += dq\n"
            "    _copy_dq_in(call, step, outputs, scratch, number).wait()\n",
        ),
        kind="race.dma-before-wait",
        reference="inferred from jax paged attention (asynchronous copies of k and v)",
        shows=("races",),
        fused=True,
    ),
    _bug(
        "splash-parts-of-a-block-in-another-order",
        Change(
            "splash_tiles",
            "enumerate(iter_parts(blocks))",
            "enumerate(sorted(iter_parts(blocks), key=lambda part: part.keys[0].start))",
        ),
        kind="blocks.skip-partial",
        reference="inferred from tokamax 620ac16 (skip list)",
        shows=("out", "logsumexp", "dq", "dk", "dv"),
        trigger="parts",
        in_parts=True,
    ),
    _bug(
        "splash-dead-keys-forgotten",
        Change("splash_schedule", "dead=not seen.all(),", "dead=False,"),
        kind="padding",
        reference="inferred from the contract, section 3 (what may lie behind the mask)",
        shows=("out", "dq"),
        trigger="dead keys",
    ),
)
