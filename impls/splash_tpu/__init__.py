"""Splash attention: block-sparse flash attention in Pallas for TPU, forward and backward.

The kernels are tested without a TPU: in interpret mode on every case, in JAX's TPU interpreter (two cores, several
orders, NaN in fresh memory, race detection), and compiled but not run for v4, v5e, v5p, v6e and 7x. On a machine with a
TPU the same cases run on the chip: `pytest -k tpu`. Properties that only a chip can show are handled as follows:

- f32 products are declared exact and judged as exact. `precision="exact"` requests `Precision.HIGHEST` from the MXU:
  six bf16 passes. Fewer passes are not exact. f32 is the sum of three bf16 parts. The six largest of their nine
  products come within 2^-24 of an f32 product, which is the error that the bounds allow. Leaving out any one of the six
  costs about 2^-17 or more; three passes are off by 2^-15. `precision="bf16"` declares, and is bounded by, one pass.
  Mosaic offers nothing in between. Three passes would suffice for a declaration of tf32, but are not written by hand.
- `exp`, `tanh` and `log` of the vector unit are assumed to be as accurate as the error bounds allow for f32.
- Blocks of 512 by 512 compile on every generation at every depth up to 256. The default sizes come from a table that
  was filled from the compiler's schedules (`impls.splash_tpu.splash_tuning`). Which sizes are fastest on a chip is not
  known. The tests run blocks of 128, so that their short cases have several blocks, and other sizes as variants.
- The two cores of v4 and v5p share the heads of all batch rows (`"parallel"`). With one head and one row, one core
  idles.
- Scalar memory, 1 MiB per core, holds the lists of steps at three to five bytes per step. Lengths beyond 32768
  therefore need blocks larger than 128. Packed sequences take twelve bytes per step, and their lists have room for
  every pair of blocks unless a window bounds both sides. Without such a window, more than 32768 tokens need blocks
  larger than 128.
"""

from impls.splash_tpu.attention import attention
from impls.splash_tpu.implementation import IMPLEMENTATIONS, build_implementation, build_packed_implementation
from impls.splash_tpu.splash_kernel import Splash, make_splash, make_splash_dynamic
from impls.splash_tpu.splash_packed import packed_attention
from impls.splash_tpu.splash_plan import Blocks, BlockSizes, Layouts

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
