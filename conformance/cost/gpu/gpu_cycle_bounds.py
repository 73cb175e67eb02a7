"""Compute lower bounds on the cycles of a GPU kernel, by counting the instructions of its loops.

The input is the loops of a kernel (`conformance.cost.gpu.sass_loops`); `gpu_figures` stores the bounds in records. The
instructions of one iteration keep each unit of a multiprocessor busy for some cycles. The cycles of the busiest unit
are a lower bound for the iteration. The real time is longer by waits, by the latency of memory, and where units do not
overlap.

Throughputs are from the CUDA C++ programming guide, "Throughput of native arithmetic instructions", for compute
capability 8.0, 9.0 and 10.0:

- The number of lanes of f32 arithmetic is in `conformance.accelerators.gpus`.
- Integers, comparisons, selections, shifts and conversions have 64 lanes; special functions have 16.
- Each of four schedulers issues one instruction of a warp in a cycle.
- Shared memory has 32 banks of 4 bytes (same guide, "Compute capabilities").
- The throughput of tensor cores is in `conformance.accelerators.gpus`.
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
_SHARED_BYTES_PER_CYCLE = 128  # bytes of shared memory that a multiprocessor reads or writes in a cycle
_LANES = {"mufu": 16, "alu": 64, "convert": 64}
_F32 = ("FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "FADD32I", "FMUL32I", "FFMA32I")
_INTEGER_PRODUCTS = ("IMAD", "IMUL", "IDP")  # these run on half of the lanes of f32 arithmetic
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
"""Units of a multiprocessor that may bound a loop; `issue` stands for the four schedulers."""
_EXPONENTIALS = "exponentials"
_ROUNDED_NUMBERS = "rounded"  # name of the count of f32 numbers that are rounded to 16 bits
BOUND_FIGURE = "pair_cycles"
"""Name of the lower bound for a kernel's full blocks, in which no pair is masked."""
TENSOR_PREFIX = "tensor_"
"""Prefix of the names that count tensor-core instructions by the shape of their product."""
PAIRS_PER_FIGURE = 1000
"""Number of pairs of a query and a key of one head that all cycles in this module are given for."""


@dataclasses.dataclass(frozen=True)
class LoopKind:
    """A kind of loop over blocks of attention, recognised by its matrix products."""

    name: str  # name of the result that the loop computes: `forward`, `dq`, `dkv`, or `all` for all gradients
    # Number of products with one result for each pair of a query and a key: (products that sum over the head dimension
    # of keys, such as q k; products that sum over that of values, such as do v).
    of_pairs: tuple[int, int]
    # Number of products that sum over pairs and add to an accumulator of the loop: (products whose result has the head
    # dimension of keys, such as dx k; products whose result has that of values, such as p v).
    of_sums: tuple[int, int]
    # How many values of each pair (such as p or dx) are rounded to be operands of the products in `of_sums`.
    operands: int
    more: float  # largest number of further exponentials, beside one for each pair, as a share of the number of pairs
    exponentials: bool = True  # whether the loop computes an exponential for each pair; otherwise it computes none


# The comments name the products: those with one result for each pair, then those that add to sums.
LOOP_KINDS = (
    LoopKind("forward", (1, 0), (0, 1), 1, 0.5),  # q k; p v. Rescaling a row takes further exponentials
    LoopKind("dq", (1, 1), (1, 0), 1, 0.02),  # q k, do v; dx k
    LoopKind("dkv", (1, 1), (1, 1), 2, 0.02),  # q k, do v; dx q, p do
    LoopKind("all", (1, 1), (2, 1), 2, 0.02),  # q k, do v; dx k, dx q, p do
    # Where two warpgroups share keys, the loop of dv has the products of `forward`, and passes on the exponentials.
    LoopKind("dk", (0, 1), (1, 0), 1, 0.0, exponentials=False),  # do v; dx q
)
_REPETITIONS = (1, 2, 4)
"""How often a pair of a query and a key may be computed in a block: several warps may each compute the same pair."""


@dataclasses.dataclass(frozen=True)
class LoopBound:
    """The lower bound for one iteration of a loop, as a warp runs it."""

    kind: str  # name of the loop's kind (`LoopKind.name`)
    # Number of pairs of a query and a key in an iteration. Pairs that several warps compute are divided among these
    # warps.
    pairs: float
    cycles: Mapping[str, float]  # by name of a unit, the cycles that it is busy for `PAIRS_PER_FIGURE` pairs
    counts: Mapping[str, float]  # numbers of instructions of the iteration, as `count_instructions` names them

    @property
    def unit(self) -> str:
        """Name of the busiest unit, whose cycles are the bound of the loop."""
        return max(self.cycles, key=self.cycles.__getitem__)

    @property
    def least(self) -> float:
        """Lower bound on the cycles for `PAIRS_PER_FIGURE` pairs: those of the busiest unit."""
        return self.cycles[self.unit]


def bound_loop(loop: Loop, gpu: Gpu, warps: int, depths: tuple[int, int]) -> tuple[LoopBound, LoopBound] | None:
    """Compute lower bounds for the shortest and the longest path through a loop.

    A block has `warps` warps, which share each product of the whole block. `depths` are the head dimensions of keys and
    of values (H, V). Return None if the number of pairs in an iteration is not known.
    """
    found = [_bound_path(way, loop.idle, gpu, warps, depths) for way in (loop.shortest, loop.longest)]
    return (found[0], found[1]) if found[0] and found[1] else None


def _bound_path(
    way: Sequence[Instruction], idle: Sequence[Instruction], gpu: Gpu, warps: int, depths: tuple[int, int]
) -> LoopBound | None:
    """Compute the lower bound for one path through a loop; None if the number of its pairs is not known.

    `idle` has the instructions of a warp while another warp issues the products of the whole block.
    """
    products = sum(one.product.multiplications / (one.product.warps or warps) for one in way if one.product)
    counts = count_instructions(way)
    known = count_pairs(products, counts[_EXPONENTIALS], counts[_ROUNDED_NUMBERS], depths)
    if known is None:
        return None
    kind, pairs = known
    if any(one.product and not one.product.warps for one in way):
        # One warp issues the products of the whole block, and the other warps skip that part. So average over warps.
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
    """Count the instructions of a path, by name.

    The counts are: all instructions, those of each unit, tensor-core instructions by shape, exponentials, and numbers
    that are rounded to 16 bits. The last two determine the number of pairs (`count_pairs`).
    """
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
    """Infer the kind of a loop, and how many pairs of a query and a key one iteration of a warp computes.

    Every product of the loop multiplies once for each pair and each element of the head dimension. So the number of
    multiplications gives the number of pairs, if three things are known: the kind of the loop, whether a head dimension
    is padded to a multiple of 64 or to a power of two, and whether several warps compute the same pairs. All
    combinations are tried. A combination fits if two more counts agree:

    - Each pair takes one exponential; in the forward pass, rescaling a row takes some more. A loop of dk alone takes
      none.
    - One or two numbers of each pair are rounded to be operands of a product.

    If several combinations fit, those without repeated pairs are preferred, then the one with the most pairs.

    Args:
      products: number of scalar multiplications of one warp on the tensor cores.
      exponentials: number of `MUFU.EX2` instructions, each of which computes one exponential in every thread.
      rounded: number of values that each thread rounds to 16 bits; 0 if the operands have more bits.
      depths: head dimensions of keys and of values (H, V).

    Returns:
      the name of the loop's kind and the number of pairs; None if no combination fits.
    """
    there = exponentials * _WARP_SIZE
    of_keys, of_values = ({-(-depth // 64) * 64, 1 << (depth - 1).bit_length()} for depth in depths)
    fitting = []
    for kind, times in itertools.product(LOOP_KINDS, _REPETITIONS):
        for keys, values in itertools.product(of_keys, of_values):
            of_pairs, of_sums = (per[0] * keys + per[1] * values for per in (kind.of_pairs, kind.of_sums))
            pairs = products / (of_pairs + of_sums / times)
            operands = round(rounded * _WARP_SIZE / pairs)
            exponentials_fit = pairs <= there <= (1 + kind.more) * pairs if kind.exponentials else there == 0
            if exponentials_fit and (not rounded or operands == kind.operands):
                fitting.append((-times, pairs, kind.name))
    if not fitting:
        return None
    times, pairs, name = max(fitting)
    return name, pairs / -times


def _count_shared_bytes(one: Instruction) -> int:
    """Count the bytes of shared memory that a load or store of a warp reads or writes; 0 for other instructions."""
    if one.name in ("LDSM", "STSM"):
        matrices = one.opcode.rpartition(".")[2]
        return 128 * (int(matrices) if matrices.isdigit() else 1)
    if one.name in ("LDS", "STS"):
        wide = next((bits for bits in (128, 64) if f".{bits}" in one.opcode), 32)
        return _WARP_SIZE * wide // 8
    return 0


def _count_product_bytes(way: Iterable[Instruction], warps: int) -> float:
    """Count the bytes of shared memory that the matrix products on a path read, per warp that shares a product."""
    return sum(one.product.shared_bytes / (one.product.warps or warps) for one in way if one.product)


def compute_occupancy(gpu: Gpu, *, threads: int, registers: float, shared_bytes: float) -> float:
    """Compute the occupancy of a kernel: the share of a multiprocessor's 64 warps that fit at once.

    The limits are those of compute capability 8.0, 9.0 and 10.0 (CUDA C++ programming guide, "Compute capabilities"):
    65,536 registers, allocated to a warp in units of 256; 32 blocks; 1 KiB of shared memory reserved for each block.

    Args:
      threads: number of threads of a block.
      registers: number of registers of a thread.
      shared_bytes: shared memory of a block, in bytes.
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
    """Compute the bounds and instruction counts of a kernel from its loops, by name.

    A kernel may have several loops of the same kind, for blocks with and without a mask. Each pair is computed in one
    of these loops. So the shortest path gives the bound for full blocks, and the longest path the bound for masked
    blocks. Loops of different kinds each compute all pairs, so their cycles are added.

    Returns:
      cycles for `PAIRS_PER_FIGURE` pairs, and counts for one iteration; empty if the number of pairs of a loop is not
      known. A loop without exponentials is known only beside one that computes the weights.
    """
    of_kind: dict[str, list[LoopBound]] = {}
    for loop in loops:
        found = bound_loop(loop, gpu, warps, depths)
        if found is None:
            return {}
        of_kind.setdefault(found[0].kind, []).extend(found)
    if any(not kind.exponentials and kind.name in of_kind for kind in LOOP_KINDS) and "forward" not in of_kind:
        return {}  # without the loop that computes the weights, the kind of such a loop is a guess
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
    """Return the sort key of a bound: its least cycles, then the cycles of issuing instructions."""
    return one.least, one.cycles["issue"]
