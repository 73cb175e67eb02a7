"""Splash attention: block-sparse flash attention in Pallas for TPU, forward and backward.

Judged without a TPU: in interpret mode by the whole gate, in JAX's TPU interpreter (two cores, several orders, NaN in
fresh memory, races detected), and compiled, not run, for v4, v5e, v5p, v6e and 7x. On a machine with a TPU the same
cases run on the chip: `pytest -k tpu`. What only a chip can say, and what is done about it here:

- f32 products: declared exact, which `precision="exact"` asks of the MXU as `Precision.HIGHEST` (six bf16 passes), and
  judged by that. Fewer are not exact. f32 is the sum of three bf16 parts, and the six largest of their nine products
  come within 2^-24 of an f32 product, which is what the bounds have for it. Without any one of them it is off by about
  2^-17 or more, and with three by 2^-15. With `precision="bf16"` the declaration, and the error bounds with it, are
  those of one pass. Mosaic offers none between: three, enough for a declaration of tf32, are not written by hand.
- `exp`, `tanh` and `log` of the vector unit are taken to be as accurate as error bounds allow for f32.
- Block sizes: 512 by 512 compile everywhere at every depth up to 256. A call that names none takes those of a table,
  which was filled by the compiler's schedules (`impls.splash_tpu.splash_tuning`); which are fastest on a chip is not known. The
  gate runs blocks of 128 so that its short cases have several, and others as variants.
- Two cores of v4 and v5p share the heads of all batch rows (`"parallel"`); with one head and one row, one idles.
- Scalar memory, 1 MiB a core, holds the lists of steps, three to five bytes a step: lengths beyond 32768 want blocks
  beyond 128. Over packed sequences a step takes twelve, and lists have room for every pair of blocks, unless a window
  bounds them on both sides: without one, packs beyond 32768 tokens want blocks beyond 128.
"""

from impls.splash_tpu.attention import attention
from impls.splash_tpu.block_sizes import Blocks, BlockSizes, Layouts
from impls.splash_tpu.implementation import IMPLEMENTATIONS, build_implementation, build_packed_implementation
from impls.splash_tpu.splash_kernel import Splash, make_splash, make_splash_dynamic
from impls.splash_tpu.splash_packed import packed_attention

__all__ = [
    "IMPLEMENTATIONS",
    "BlockSizes",
    "Blocks",
    "Layouts",
    "Splash",
    "attention",
    "build_implementation",
    "build_packed_implementation",
    "make_splash",
    "make_splash_dynamic",
    "packed_attention",
]
