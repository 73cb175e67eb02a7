"""Derivative rules that hold once: to differentiate what they compute again is refused in a sentence.

First derivatives in reverse mode do not differentiate the two halves of a `custom_vjp`. What does is a second
derivative, which would otherwise fail somewhere inside, where nobody can tell why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import linear_call


def refuse_derivatives(kernel: str, function: Callable[..., Any], *operands: Any) -> Any:
    """`function(*operands)`, which raises `NotImplementedError` where it is differentiated.

    Args:
      kernel: how the message names the kernel.
      function: one half of its `custom_vjp`, with all that is static bound.
      operands: its arrays, in trees.
    """

    @jax.custom_jvp
    def run(*operands: Any) -> Any:
        return function(*operands)

    @run.defjvp
    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise _build_error(kernel, "has first derivatives in reverse mode only", "a grad of grad, a hessian")

    return run(*operands)


def refuse_reverse_mode(kernel: str, function: Callable[..., Any], *operands: Any) -> Any:
    """`function(*operands)`, which raises `NotImplementedError` where it is differentiated in reverse mode.

    Forward mode goes through it, for loops whose number of steps is known at run time only.

    Args:
      kernel: as for `once`.
      function: likewise.
      operands: likewise.
    """

    @jax.custom_jvp
    def run(*operands: Any) -> Any:
        return function(*operands)

    @run.defjvp
    def in_forward_mode(primals: Any, tangents: Any) -> Any:
        results, moved = jax.jvp(function, primals, tangents)
        return results, linear_call(lambda _, x: x, refuse, (), moved)

    def refuse(_: Any, cotangents: Any) -> NoReturn:
        raise _build_error(kernel, "has no second derivatives in reverse mode", "a grad of grad; jvp of grad works")

    return run(*operands)


def _build_error(kernel: str, has: str, such_as: str) -> NotImplementedError:
    return NotImplementedError(
        f"{kernel} {has}, and a second derivative of it was asked for ({such_as}): take a kernel that JAX "
        f"differentiates (impls.dot_product, impls.moba.dense_attention), or stop_gradient of the first derivative"
    )
