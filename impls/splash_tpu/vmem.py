"""VMEM: how much a kernel needs, and how much the target chip has."""

from __future__ import annotations

import dataclasses
import itertools

from impls.pallas_tpu.tpu_tiles import LANES, VmemLimit, round_up
from impls.splash_tpu.block_sizes import Blocks

_CANDIDATE_SIZES = (4096, 2048, 1024, 512, 256, 128)


@dataclasses.dataclass(frozen=True)
class Depths:
    """Head depths, and bytes per element of the operands."""

    head_dim: int
    head_dim_v: int
    itemsize: int


def estimate_vmem(
    phase: str, blocks: Blocks, depths: Depths, *, stored_mask: bool, fused: bool = False, ranged: bool = False
) -> int:
    """Estimate the VMEM of a kernel in bytes.

    Operand and result blocks count twice, since the next ones are fetched while these are used. Scratch counts once,
    and so do the values of a tile: three arrays `[q, kv_compute]` in f32.

    Args:
      phase: `"forward"`, `"dq"` or `"dkv"`.
      blocks: block sizes of the phase.
      depths: head depths of the operands.
      stored_mask: whether mask blocks are fetched.
      fused: whether the kernel of dk and dv also computes dq.
      ranged: whether each query has a range of keys, which takes one column more than segment ids.
    """
    h, v = round_up(depths.head_dim, LANES), round_up(depths.head_dim_v, LANES)
    q_row, kv_row, f32 = h * depths.itemsize, (h + v) * depths.itemsize, 4
    fetched = blocks.q * q_row + blocks.kv * kv_row + (blocks.q * blocks.kv if stored_mask else 0)
    columns = (4 if ranged else 3) * LANES
    if phase == "forward":
        fetched += blocks.q * v * depths.itemsize  # out
        scratch = blocks.q * (v + columns) * f32
    elif phase == "dq":
        fetched += blocks.q * (v + h) * depths.itemsize  # d_out, dq
        scratch = blocks.q * (h + columns) * f32
    else:
        fetched += blocks.q * v * depths.itemsize + blocks.kv * kv_row  # d_out; dk, dv
        scratch = blocks.kv * (h + v + LANES) * f32 + (2 * blocks.q * h * f32 if fused else 0)
    return 2 * fetched + scratch + 3 * blocks.q * blocks.compute * f32


def check_vmem(phase: str, blocks: Blocks, depths: Depths, *, limit: VmemLimit, **kind: bool) -> int:
    """Return the estimated VMEM in bytes, or raise `ValueError` if the blocks do not fit.

    Args:
      phase: as for `estimate_vmem`.
      blocks: as for `estimate_vmem`.
      depths: as for `estimate_vmem`.
      limit: how much the kernel may use.
      kind: `stored_mask`, `fused` and `ranged`, as for `estimate_vmem`.

    Raises:
      ValueError: the estimate is over the limit; the message says which sizes would fit.
    """
    need = estimate_vmem(phase, blocks, depths, **kind)
    if need <= limit.bytes:
        return need
    sizes = [size for size in _CANDIDATE_SIZES if size <= max(blocks.q, blocks.kv)]
    fitting = [
        f"{q} x {kv}"
        for q, kv in itertools.product(sizes, sizes)
        if estimate_vmem(phase, Blocks(q, kv), depths, **kind) <= limit.bytes
    ]
    remedy = f"these would fit (q x kv): {', '.join(fitting[:4])}" if fitting else "no block size would fit"
    raise ValueError(
        f"block sizes of the {phase} kernel, q {blocks.q}, kv {blocks.kv}, kv_compute {blocks.compute}, take about "
        f"{need / 2**20:.1f} MiB of VMEM at head_dim {depths.head_dim} and {depths.head_dim_v}, over the limit of "
        f"{limit.bytes / 2**20:.1f} MiB ({limit.of}); {remedy}"
    )
