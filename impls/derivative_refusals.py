"""Refuse second derivatives of kernels whose `custom_vjp` rule supports only first derivatives.

First derivatives in reverse mode do not differentiate the forward and backward functions of a `custom_vjp`; second
derivatives do. Without this module, second derivatives would fail deep inside the kernel with an unclear message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import linear_call


def refuse_derivatives(kernel: str, function: Callable[..., Any], *operands: Any) -> Any:
    """Compute `function(*operands)`, and raise `NotImplementedError` if it is differentiated.

    `function` is the forward or the backward function of its `custom_vjp`, with all static arguments bound.
    """

    @jax.custom_jvp
    def run(*operands: Any) -> Any:
        return function(*operands)

    @run.defjvp
    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise _build_error(kernel, "has first derivatives in reverse mode only", "a grad of grad, a hessian")

    return run(*operands)


def refuse_reverse_mode(kernel: str, function: Callable[..., Any], *operands: Any) -> Any:
    """Compute `function(*operands)`, and raise `NotImplementedError` if it is differentiated in reverse mode.

    Forward mode is allowed. This suits loops whose number of steps is only known at run time: JAX differentiates them
    in forward mode only.
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
