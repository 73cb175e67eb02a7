"""Attention masks as small value objects.

A mask answers three questions (docs/contract.md, section 3): may query `i` attend to key `j` (`allowed`), what does
that look like as booleans (`dense`), and which blocks of it are empty, partial or full (`blocks`). They compose with
`&` and `|`.

What else depends on the kind of mask is said by its class: which feature it is, which operands it fits, what is left of
it for some of the queries or keys, what of it JAX traces (`cases.masks.mask_base.Mask`). How a case id writes it, is said in
`cases.mask_spec`.

Positions are operand positions: `i` indexes the query axis `T` and `j` the key axis `S`; an `offset` moves queries to
their absolute position (`offset = S - T` aligns the last query with the last key).
"""

from cases.masks.mask_base import *  # noqa: F403  each module lists what it offers, in `__all__`
from cases.masks.mask_formulas import *  # noqa: F403  likewise
from cases.masks.mask_functions import *  # noqa: F403  likewise
from cases.masks.mask_numbers import *  # noqa: F403  likewise
from cases.masks.row_masks import *  # noqa: F403  likewise
