"""Calls that write pages, made with pages that are kept: what they return, and what they leave of their operands."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.operand_values import Problem
from conformance.execution import kernel_errors
from conformance.execution.executor import Arrays, Executor, Values
from conformance.execution.stored_calls import StoredCall

Program = Any
"""`(arrays, tokens, pages)` to `out`, the residuals or none, and the pages."""


def run_page_write(
    executor: Executor, problem: Problem, tokens: Values, before: Values, *, save_residuals: bool
) -> Values:
    """`k_pages` and `v_pages` as one call returns them.

    Args:
      executor: of the implementation.
      problem: the operands, of which the queries and tables are taken.
      tokens: `k` and `v` `[total_q, K, .]`, packed as the queries are.
      before: `k_pages` and `v_pages` `[pages, page_size, K, .]`.
      save_residuals: whether it is the call with residuals.
    """
    program, arrays = _bind_call(executor, problem, save_residuals=save_residuals)
    _, _, after = executor.jit(program)(arrays, dict(tokens), dict(before))
    return {name: np.asarray(x) for name, x in after.items()}


def run_steps(
    executor: Executor, problems: Sequence[Problem], tokens: Sequence[Values], before: Values
) -> list[Values]:
    """`out`, residuals and pages of each step: it gets the pages that the step before returned, and may reuse them.

    `out` is packed, `[total_q, N, V]`, and residuals are `[total_q, N]`.
    """
    save_residuals = bool(executor.implementation.residuals)
    program, _ = _bind_call(executor, problems[0], save_residuals=save_residuals)
    compiled = executor.jit(program, donate_argnums=2)
    kept: Mapping[str, Any] = {name: jnp.array(x) for name, x in before.items()}
    found: list[Values] = []
    for problem, new in zip(problems, tokens, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a buffer could not be reused is no finding
            out, residuals, kept = compiled(_bind_call(executor, problem, save_residuals=save_residuals)[1], new, kept)
        values = {**(residuals or {}), "out": out, **kept}
        found.append({name: np.array(x, copy=True) for name, x in values.items()})
    return found


def find_written_operands(
    executor: Executor, problem: Problem, tokens: Values, before: Values, *, compiled: bool
) -> tuple[list[str], str]:
    """The pages and tokens of the caller's that one call writes into; and why they were not NumPy arrays, if so."""
    program, arrays = _bind_call(executor, problem, save_residuals=False)
    call = executor.jit(program) if compiled else program
    given, reason = _run_on_copies(call, arrays, {**tokens, **before}, tuple(tokens))
    changed = [name for name, x in {**tokens, **before}.items() if _is_changed(x, given[name])]
    return changed, reason


def _run_on_copies(call: Any, arrays: Arrays, kept: Values, tokens: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    def made(arrays: Arrays, given: dict[str, Any]) -> dict[str, Any]:
        of_tokens = {name: x for name, x in given.items() if name in tokens}
        of_pages = {name: x for name, x in given.items() if name not in tokens}
        jax.block_until_ready(call(arrays, of_tokens, of_pages))  # type: ignore[no-untyped-call] # untyped upstream
        return given

    try:
        return made(arrays, {name: np.array(x, copy=True) for name, x in kept.items()}), ""
    except Exception as refusal:  # type checkers raise errors of their own
        reason = f"given JAX arrays, since NumPy arrays are refused ({type(refusal).__name__})"
        return made(jax.tree.map(jnp.array, arrays), {name: jnp.array(x) for name, x in kept.items()}), reason


def _is_changed(before: np.ndarray, after: Any) -> bool:
    if isinstance(after, jax.Array) and after.is_deleted():
        return True
    return before.tobytes() != np.asarray(after).tobytes()


def _bind_call(executor: Executor, problem: Problem, *, save_residuals: bool) -> tuple[Program, Arrays]:
    """The call with its static keywords bound, and the arrays that it takes beside tokens and pages."""
    statics, arrays = executor.arguments(problem)
    call = executor.implementation.call
    assert isinstance(call, StoredCall)
    others = {name: x for name, x in arrays.items() if name not in ("k", "v")}
    return functools.partial(_call_checked, call, statics, save_residuals), others


def _call_checked(
    call: StoredCall, statics: Mapping[str, Any], save_residuals: bool, arrays: Arrays, tokens: Arrays, pools: Arrays
) -> tuple[Any, Any, Any]:
    storage = arrays["storage"]
    others = {name: x for name, x in arrays.items() if name not in ("q", "storage")}
    q = call.pack_queries(arrays["q"], storage)
    out, residuals, after = call.write(
        q=q, **tokens, **pools, **call.select_tables(storage), **others, **statics, save_residuals=save_residuals
    )
    kernel_errors.check_shape("out", out, (*q.shape[:2], tokens["v"].shape[-1]))
    if residuals is not None:
        out, residuals = kernel_errors.check_residuals((out, residuals))
        for name, x in residuals.items():
            kernel_errors.check_shape(name, x, q.shape[:2])
    return out, residuals, after
