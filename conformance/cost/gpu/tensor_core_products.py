"""Read the shape of the matrix product from a tensor-core instruction (SASS), and the shared memory that it reads.

`sass_loops` calls `parse_product` for each instruction. Up to Hopper the opcode contains the shape. `HMMA.16816` is a
product of 16 by 8 by 16 by one warp; `HGMMA.64x128x16` is a product by a warpgroup of four warps. From Blackwell on,
the shape is in the instruction descriptor, a word of 32 bits (PTX ISA, "tcgen05 instruction descriptor"). The code
writes this word to a uniform register as a constant, so constants of uniform registers are tracked (`note_constant`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import MutableMapping

WARPS_PER_GROUP = 4
_WARP = re.compile(r"[HIQBD]MMA\.(16|8)(8)(4|8|16|32|64|128)\b")
_GROUP = re.compile(r"[HIQB]GMMA\.(\d+)x(\d+)x(\d+)")
_BLOCK = re.compile(r"UTC[HIQO]MMA\b")
_DESCRIPTOR = re.compile(r"idesc\[(UR\d+)\]")
_CONSTANT = re.compile(r"(UR\d+), (0x[0-9a-f]+)$")
_WRITTEN = re.compile(r"(UR\d+)\b")


@dataclasses.dataclass(frozen=True)
class MatrixProduct:
    """The matrix product of one tensor-core instruction, `[m, k]` times `[k, n]`."""

    m: int
    n: int
    k: int
    bits: int  # number of bits of an element of the operands
    warps: int  # number of warps that share the product; 0 if all warps of the block share it
    first_in_shared_memory: bool = False
    second_in_shared_memory: bool = False

    @property
    def name(self) -> str:
        """Name of the product in records, which contains its shape."""
        return f"tensor_{self.m}x{self.n}x{self.k}"

    @property
    def multiplications(self) -> int:
        """Number of scalar multiplications of the product."""
        return self.m * self.n * self.k

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that the product reads, if each operand in shared memory is read once."""
        rows = self.m * self.first_in_shared_memory + self.n * self.second_in_shared_memory
        return rows * self.k * self.bits // 8


def parse_product(opcode: str, operands: str, constants: MutableMapping[str, int]) -> MatrixProduct | None:
    """Return the matrix product of an instruction; None if the instruction has none, or its shape is not known.

    Args:
      opcode: the opcode with its modifiers.
      constants: by name of a uniform register, its value; only registers whose value is known.
    """
    if shape := _WARP.match(opcode):
        m, n, k = map(int, shape.groups())
        return MatrixProduct(m, n, k, _get_operand_bits(opcode), warps=1)
    if shape := _GROUP.match(opcode):
        m, n, k = map(int, shape.groups())
        sources = operands.split(",")[1:3]
        return MatrixProduct(
            m,
            n,
            k,
            _get_operand_bits(opcode),
            warps=WARPS_PER_GROUP,
            first_in_shared_memory="gdesc" in sources[0],
            second_in_shared_memory=True,
        )
    if not _BLOCK.match(opcode) or (register := _DESCRIPTOR.search(operands)) is None:
        return None
    word = constants.get(register[1])
    if word is None:
        return None
    wide = opcode.startswith("UTCHMMA") and (word >> 7) & 7 == _TF32
    bits = 32 if wide else 16 if opcode.startswith("UTCHMMA") else 8
    m = ((word >> 24) & 0x1F) << 4
    return MatrixProduct(
        m // 2 if ".2CTA" in opcode else m,  # two blocks share the product of a .2CTA instruction
        ((word >> 17) & 0x3F) << 3,
        256 // bits,
        bits=bits,
        warps=0,
        first_in_shared_memory=operands.startswith("gdesc"),
        second_in_shared_memory=True,
    )


_TF32 = 2  # code for operands in tf32 in the instruction descriptor


def note_constant(constants: MutableMapping[str, int], opcode: str, operands: str) -> None:
    """Update the known values of uniform registers after one instruction; call this in the order of the code."""
    written = _WRITTEN.match(operands)
    if written is None:
        return
    known = _CONSTANT.match(operands) if opcode == "UMOV" else None
    if known is not None:
        constants[known[1]] = int(known[2], 16)
    else:
        constants.pop(written[1], None)


def _get_operand_bits(opcode: str) -> int:
    """Return the number of bits of an operand's element, from the opcode's name and modifiers."""
    if ".TF32" in opcode:
        return 32
    if opcode.startswith("DMMA"):
        return 64
    return 8 if opcode.startswith(("I", "Q")) else 16
