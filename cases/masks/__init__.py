"""Attention masks as small value objects: cases are built with them, and kernels get them as an argument.

A mask answers three questions (docs/contract.md, section 3). `allowed` says whether query `i` may attend to key `j`.
`dense` returns the same as an array of booleans. `blocks` says which blocks are empty, partial or full. Masks combine
with `&` and `|`.

The class of a mask also says which feature an implementation needs for the mask, and which operands the mask fits. It
can cut the mask down to some of the queries or keys, and says which fields JAX traces (`cases.masks.mask_base.Mask`).
`cases.mask_spec` defines how a case id writes each mask.

`i` is an index along the query axis `T` and `j` one along the key axis `S`. An `offset` moves queries to their absolute
position: `offset = S - T` aligns the last query with the last key.
"""

from cases.masks.list_parts import *  # noqa: F403  each module lists what it offers, in `__all__`
from cases.masks.mask_base import *  # noqa: F403  likewise
from cases.masks.mask_formulas import *  # noqa: F403  likewise
from cases.masks.mask_functions import *  # noqa: F403  likewise
from cases.masks.mask_numbers import *  # noqa: F403  likewise
from cases.masks.row_masks import *  # noqa: F403  likewise
