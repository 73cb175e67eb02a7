"""Masks as trees that JAX can trace: what a kind of mask says is traced (`Mask.traced`) is a child, all else is static.

Registered when this module is imported.
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
    """A mask of whatever a transformation puts in place of its arrays, which need not be any."""
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
