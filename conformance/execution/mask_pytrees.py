"""Register mask classes as JAX pytrees, so that masks can be arguments of traced functions.

For a class with `Mask.traced`, the fields named there are the children. Any other mask is static as a whole.

Importing this module registers them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from cases.mask_spec import KINDS
from cases.masks import And, Mask, Or


def _flatten(mask: Mask) -> tuple[tuple[Any, ...], None]:
    return tuple(getattr(mask, name) for name in mask.traced), None


def _unflatten(kind: type[Mask], _: None, children: tuple[Any, ...]) -> Mask:
    """Rebuild a mask from its children, without validation: JAX may pass any object in place of an array."""
    mask = object.__new__(kind)
    for name, child in zip(kind.traced, children, strict=True):
        object.__setattr__(mask, name, child)
    return mask


_KINDS: tuple[type[Mask], ...] = tuple(dict.fromkeys([*(kind.type for kind in KINDS), And, Or]))
for _kind in _KINDS:
    if _kind.traced:
        jax.tree_util.register_pytree_node(_kind, _flatten, functools.partial(_unflatten, _kind))
    else:
        jax.tree_util.register_pytree_node(_kind, lambda mask: ((), mask), lambda mask, _: mask)
