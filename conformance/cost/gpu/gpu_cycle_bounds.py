"""How fast a GPU kernel can be at most, by the instructions of its loops: a bound, with no wait in it.

What a turn of a loop runs (`conformance.cost.gpu.sass_loops`) takes each unit of a multiprocessor some cycles. The unit
that takes longest bounds the loop. Waits, the latency of memory and whatever the units do not overlap are not in it.

Where throughputs come from: CUDA C++ programming guide, "Throughput of native arithmetic instructions", of compute
capability 8.0, 9.0 and 10.0. Of f32 it has as many lanes as `conformance.accelerators.gpus` says, of integers,
comparisons, selections, shifts and conversions 64, of special functions 16. Four schedulers issue an instruction of a
warp each cycle; shared memory has 32 banks of 4 bytes (same guide, "Compute capabilities"). Tensor cores: `gpus`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from conformance.accelerators.gpus import Gpu
from conformance.cost.gpu.sass_loops import Instruction, Loop

_WARP_SIZE = 32
_SCHEDULERS = 4
_SHARED_BYTES_PER_CYCLE = 128  # bytes a cycle
_LANES = {"mufu": 16, "alu": 64, "convert": 64}
_F32 = ("FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "FADD32I", "FMUL32I", "FFMA32I")
_INTEGER_PRODUCTS = ("IMAD", "IMUL", "IDP")  # by half of the lanes of f32
_ALU = (
    *("FMNMX", "FMNMX3", "FSEL", "FSET", "FSETP", "FCHK", "ISETP", "SEL", "IADD", "IADD3", "VIADD", "IMNMX", "VIMNMX"),
    *("LOP", "LOP3", "PLOP3", "PRMT", "SHF", "SHL", "SHR", "LEA", "IABS", "SGXT", "BMSK", "P2R", "R2P", "VIADDMNMX"),
)
_CONVERT = ("F2F", "F2FP", "F2I", "I2F", "I2FP", "F2IP", "FRND")
_SHARED = ("LDS", "STS", "LDSM", "STSM")
_GLOBAL = ("LDG", "STG", "LDGSTS", "RED", "REDG", "ATOMG", "UTMALDG", "UTMASTG", "UBLKCP")
_SPILL = ("LDL", "STL")
_BARRIERS = ("BAR", "SYNCS", "WARPSYNC", "DEPBAR", "LDGDEPBAR", "WARPGROUP", "MEMBAR", "FENCE", "UTCBAR")
_INSTRUCTION_GROUPS = {
    "mufu": ("MUFU",),
    "f32": _F32,
    "integer_products": _INTEGER_PRODUCTS,
    "alu": _ALU,
    "convert": _CONVERT,
    "shared": _SHARED,
    "global": _GLOBAL,
    "spill": _SPILL,
    "barrier": _BARRIERS,
}
UNITS = ("issue", "tensor", "mufu", "f32", "alu", "convert", "shared")
"""What may bound a loop."""
_EXPONENTIALS = "exponentials"
_ROUNDED_NUMBERS = "rounded"  # numbers of f32, to 16 bits
BOUND_FIGURE = "pair_cycles"
"""The figure that says what a kernel's full blocks take at least."""
TENSOR_PREFIX = "tensor_"
"""Begins the figures that count instructions of the tensor cores, each by its shape."""
PAIRS_PER_FIGURE = 1000
"""Cycles are told for so many pairs of a query and a key of one head."""


@dataclasses.dataclass(frozen=True)
class LoopKind:
    """Which products a loop over blocks has.

    Attributes:
      name: of what they are for.
      of_pairs: how many give each pair a number, as how many sum over the depth of keys and over that of values.
      of_sums: likewise, how many add to sums that the loop carries.
      operands: numbers of a pair that these take, each rounded to the dtype of the tensor cores.
      more: exponentials beside that of each pair, as a part of these, at most.
    """

    name: str
    of_pairs: tuple[int, int]
    of_sums: tuple[int, int]
    operands: int
    more: float


LOOP_KINDS = (
    LoopKind("forward", (1, 0), (0, 1), 1, 0.5),  # q k; p v. Rows are scaled anew, which takes an exponential each
    LoopKind("dq", (1, 1), (1, 0), 1, 0.02),  # q k, do v; dx k
    LoopKind("dkv", (1, 1), (1, 1), 2, 0.02),  # q k, do v; dx q, p do
    LoopKind("all", (1, 1), (2, 1), 2, 0.02),  # all three gradients
)
_REPETITIONS = (1, 2, 4)
"""How often a pair may be computed: warps that share the sums may each compute what they need for it."""


@dataclasses.dataclass(frozen=True)
class LoopBound:
    """Of one turn of a warp through a loop.

    Attributes:
      kind: which products it has.
      pairs: of a query and a key; those that several warps compute are shared among them.
      cycles: of each unit, for `PAIRS` of them.
      counts: instructions by what they do.
    """

    kind: str
    pairs: float
    cycles: Mapping[str, float]
    counts: Mapping[str, float]

    @property
    def unit(self) -> str:
        """The one that bounds it."""
        return max(self.cycles, key=self.cycles.__getitem__)

    @property
    def least(self) -> float:
        """Cycles that `PAIRS` pairs take at least."""
        return self.cycles[self.unit]


def bound_loop(loop: Loop, gpu: Gpu, warps: int, depths: tuple[int, int]) -> tuple[LoopBound, LoopBound] | None:
    """Of the cheapest and of the dearest way through a loop; none if it is not known how many pairs it computes.

    Args:
      loop: of a kernel.
      gpu: whose throughputs.
      warps: of a block, by which a product that is the whole block's is divided.
      depths: of keys and of values.
    """
    found = [_bound_path(way, loop.idle, gpu, warps, depths) for way in (loop.shortest, loop.longest)]
    return (found[0], found[1]) if found[0] and found[1] else None


def _bound_path(
    way: Sequence[Instruction], idle: Sequence[Instruction], gpu: Gpu, warps: int, depths: tuple[int, int]
) -> LoopBound | None:
    products = sum(one.product.multiplications / (one.product.warps or warps) for one in way if one.product)
    counts = count_instructions(way)
    known = count_pairs(products, counts[_EXPONENTIALS], counts[_ROUNDED_NUMBERS], depths)
    if known is None:
        return None
    kind, pairs = known
    if any(one.product and not one.product.warps for one in way):
        # One warp asks for the products of a block; the others pass that part by.
        others = count_instructions(idle)
        counts = {name: (count + (warps - 1) * others.get(name, 0.0)) / warps for name, count in counts.items()}
    tensor = sum(
        one.product.multiplications * one.product.bits / 16 / (one.product.warps or warps) for one in way if one.product
    )
    cycles = {
        "issue": counts["instructions"] / _SCHEDULERS,
        "tensor": tensor / gpu.products_per_core,
        "mufu": counts["mufu_instructions"] * _WARP_SIZE / _LANES["mufu"],
        "f32": max(
            (counts["f32_instructions"] + counts["integer_products_instructions"]) * _WARP_SIZE / gpu.fpus_per_core,
            counts["integer_products_instructions"] * _WARP_SIZE / 64,
        ),
        "alu": counts["alu_instructions"] * _WARP_SIZE / _LANES["alu"],
        "convert": counts["convert_instructions"] * _WARP_SIZE / _LANES["convert"],
        "shared": (sum(map(_count_shared_bytes, way)) + _count_product_bytes(way, warps)) / _SHARED_BYTES_PER_CYCLE,
    }
    return LoopBound(kind, pairs, {unit: cycles[unit] * PAIRS_PER_FIGURE / pairs for unit in UNITS}, counts)


def count_instructions(way: Iterable[Instruction]) -> dict[str, float]:
    """Instructions by what they do: all that take a turn of a scheduler, and those of each unit."""
    way = list(way)
    names = Counter(one.name for one in way)
    return {
        "instructions": float(len(way)),
        **Counter(one.product.name for one in way if one.product),
        _ROUNDED_NUMBERS: 2.0 * sum(one.opcode.startswith("F2FP") and "PACK" in one.opcode for one in way),
        _EXPONENTIALS: float(sum(one.opcode.startswith("MUFU.EX2") for one in way)),
        **{
            f"{group}_instructions": float(sum(names[name] for name in members))
            for group, members in _INSTRUCTION_GROUPS.items()
        },
    }


def count_pairs(
    products: float, exponentials: float, rounded: float, depths: tuple[int, int]
) -> tuple[str, float] | None:
    """How many pairs a turn of a warp computes, and which products it has.

    A pair takes as many multiplications as its products sum over. Which products these are, whether a depth is filled
    up to a multiple of 64 or to a power of two, and whether several warps compute the same pairs, is told by two more
    things that the code says: an exponential for each pair, in the forward pass some more for rows; and numbers that
    are rounded for a product, one of each pair or two. What says that no warp repeats another goes before the rest, and
    then the most pairs.

    Args:
      products: numbers that are multiplied, of one warp.
      exponentials: `MUFU.EX2`, each of a whole warp.
      rounded: numbers of each thread that are rounded to 16 bits; 0 where the operands have more.
      depths: of keys and of values.

    Returns:
      the kind of the loop and its pairs; none if no number fits.
    """
    there = exponentials * _WARP_SIZE
    of_keys, of_values = ({-(-depth // 64) * 64, 1 << (depth - 1).bit_length()} for depth in depths)
    fitting = []
    for kind, times in itertools.product(LOOP_KINDS, _REPETITIONS):
        for keys, values in itertools.product(of_keys, of_values):
            of_pairs, of_sums = (per[0] * keys + per[1] * values for per in (kind.of_pairs, kind.of_sums))
            pairs = products / (of_pairs + of_sums / times)
            operands = round(rounded * _WARP_SIZE / pairs)
            if pairs <= there <= (1 + kind.more) * pairs and (not rounded or operands == kind.operands):
                fitting.append((-times, pairs, kind.name))
    if not fitting:
        return None
    times, pairs, name = max(fitting)
    return name, pairs / -times


def _count_shared_bytes(one: Instruction) -> int:
    """What an instruction of a warp reads or writes of shared memory."""
    if one.name in ("LDSM", "STSM"):
        matrices = one.opcode.rpartition(".")[2]
        return 128 * (int(matrices) if matrices.isdigit() else 1)
    if one.name in ("LDS", "STS"):
        wide = next((bits for bits in (128, 64) if f".{bits}" in one.opcode), 32)
        return _WARP_SIZE * wide // 8
    return 0


def _count_product_bytes(way: Iterable[Instruction], warps: int) -> float:
    return sum(one.product.shared_bytes / (one.product.warps or warps) for one in way if one.product)


def compute_occupancy(gpu: Gpu, *, threads: int, registers: float, shared_bytes: float) -> float:
    """The part of a multiprocessor's 64 warps that fit at once, by registers, shared memory and blocks.

    Limits of compute capability 8.0, 9.0 and 10.0 (CUDA C++ programming guide, "Compute capabilities"): 65,536
    registers, given to a warp by 256 at a time; 32 blocks; a KiB of shared memory of each block is the system's.
    """
    warps = -(-threads // _WARP_SIZE)
    of_warp = -(-int(registers) * _WARP_SIZE // 256) * 256
    blocks = min(
        _MAX_BLOCKS,
        MAX_WARPS // warps,
        _MAX_REGISTERS // of_warp // warps if of_warp else _MAX_BLOCKS,
        gpu.shared_memory_per_core // (int(shared_bytes) + 1024),
    )
    return blocks * warps / MAX_WARPS


_MAX_BLOCKS, MAX_WARPS, _MAX_REGISTERS = 32, 64, 65536


def compute_kernel_figures(loops: Sequence[Loop], gpu: Gpu, warps: int, depths: tuple[int, int]) -> dict[str, float]:
    """The figures of a kernel out of its loops; those of instructions and cycles only where its pairs are known.

    Loops of one kind, of blocks without a mask and of blocks with one, compute pairs of which each is in one of them.
    The cheapest way is told as that of full blocks, the dearest as that of masked ones. Those of different kinds each
    compute all pairs, so they add up.
    """
    of_kind: dict[str, list[LoopBound]] = {}
    for loop in loops:
        found = bound_loop(loop, gpu, warps, depths)
        if found is None:
            return {}
        of_kind.setdefault(found[0].kind, []).extend(found)
    full = [min(of_one, key=_get_sort_key) for of_one in of_kind.values()]
    masked = [max(of_one, key=_get_sort_key) for of_one in of_kind.values()]
    figures = {
        BOUND_FIGURE: sum(one.least for one in full),
        "masked_pair_cycles": sum(one.least for one in masked),
        **{f"{unit}_cycles": sum(one.cycles[unit] for one in full) for unit in UNITS},
        "masked_issue_cycles": sum(one.cycles["issue"] for one in masked),
        "pairs": sum(one.pairs for one in full),
        "spill_slots": max(one.counts["spill_instructions"] for one in (*full, *masked)),
    }
    for name in ("instructions", *(f"{group}_instructions" for group in _INSTRUCTION_GROUPS)):
        figures[name] = sum(one.counts[name] for one in full)
    shapes = dict.fromkeys(name for one in full for name in one.counts if name.startswith(TENSOR_PREFIX))
    figures |= {name: sum(one.counts.get(name, 0.0) for one in full) for name in shapes}
    return {name: round(value, 3) for name, value in figures.items()}


def _get_sort_key(one: LoopBound) -> tuple[float, float]:
    return one.least, one.cycles["issue"]
