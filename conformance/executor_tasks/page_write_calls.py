"""Tasks that run calls which write pages: they return the written pages, or find operands that a call modified.

Such a call gets the new tokens and a page cache, and returns `out`, residuals and a cache with the new tokens.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.operand_values import Problem
from cases.storage_forms.page_writes import WRITE_FORMS
from conformance.execution import returned_values
from conformance.execution.executor import Arrays, Executor, Values
from conformance.execution.stored_calls import StoredCall, pack_pairs
from conformance.executor_tasks.single_calls import is_changed

Program = Any
"""A function from `(arrays, tokens, pages)` to `(out, residuals or None, pages)`."""


def run_page_write(
    executor: Executor, problem: Problem, tokens: Values, before: Values, *, save_residuals: bool
) -> Values:
    """Return the arrays of pages by name as one call returns them, those of scales if it computes these, and results.

    `out` is packed, `[total_q, N, V]`, and so are residuals `[total_q, N]`.

    `tokens` has the new tokens by name, packed like the queries. `before` has the pages before the call.
    """
    return _run_once(executor, tokens, before, _bind_call(executor, problem, save_residuals=save_residuals))


def run_without_update(
    executor: Executor, problem: Problem, tokens: Values, before: Values, *, save_residuals: bool
) -> Values | None:
    """Return what `run_page_write` returns with `update_kv_cache=False`; None if the call does not take that."""
    call = executor.implementation.call
    assert isinstance(call, StoredCall)
    if not call.takes_update:
        return None
    bound = _bind_call(executor, problem, save_residuals=save_residuals, update_kv_cache=False)
    return _run_once(executor, tokens, before, bound)


def _run_once(executor: Executor, tokens: Values, before: Values, bound: tuple[Program, Arrays]) -> Values:
    program, arrays = bound
    out, residuals, after = executor.jit(program)(arrays, dict(tokens), dict(before))
    return {name: np.asarray(x) for name, x in {**(residuals or {}), **after, "out": out}.items()}


def run_steps(
    executor: Executor, problems: Sequence[Problem], tokens: Sequence[Values], before: Values
) -> list[Values]:
    """Run the steps of a decoding server, and return `out`, residuals and pages of each step.

    Each step gets the pages that the previous step returned, and may reuse their memory. `out` is packed,
    `[total_q, N, V]`, and residuals are `[total_q, N]`.
    """
    save_residuals = bool(executor.implementation.residuals)
    program, _ = _bind_call(executor, problems[0], save_residuals=save_residuals)
    compiled = executor.jit(program, donate_argnums=2)
    pages: Mapping[str, Any] = {name: jnp.array(x) for name, x in before.items()}
    results: list[Values] = []
    for problem, step_tokens in zip(problems, tokens, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns about buffers that it cannot reuse, which is harmless
            out, residuals, pages = compiled(
                _bind_call(executor, problem, save_residuals=save_residuals)[1], step_tokens, pages
            )
        values = {**(residuals or {}), "out": out, **pages}
        results.append({name: np.array(x, copy=True) for name, x in values.items()})
    return results


def find_written_operands(
    executor: Executor, problem: Problem, tokens: Values, before: Values, *, compiled: bool
) -> tuple[list[str], str]:
    """Find the given page arrays and token arrays that one call modifies in place or deletes.

    The call gets NumPy arrays. Outside `jit`, or if NumPy arrays are refused, a second call gets JAX arrays: only these
    can be donated, and so deleted.

    Returns:
      The names of the modified arrays. Then the reason why no call got NumPy arrays, or "".
    """
    program, arrays = _bind_call(executor, problem, save_residuals=False)
    call = executor.jit(program) if compiled else program

    def run(make_array: Callable[[Any], Any]) -> dict[str, Any]:
        of_tokens, of_pages = ({name: make_array(x) for name, x in kept.items()} for kept in (tokens, before))
        jax.block_until_ready(call(jax.tree.map(make_array, arrays), of_tokens, of_pages))
        return {**of_tokens, **of_pages}

    given, reason = [], ""
    try:
        given.append(run(np.copy))
    except Exception as refusal:  # libraries that check types raise errors of their own types
        reason = f"given JAX arrays, since NumPy arrays are refused ({type(refusal).__name__})"
    if reason or not compiled:
        given.append(run(jnp.array))
    kept = {**tokens, **before}
    return [name for name, x in kept.items() if any(is_changed(x, copies[name]) for copies in given)], reason


def _bind_call(executor: Executor, problem: Problem, *, save_residuals: bool, **options: Any) -> tuple[Program, Arrays]:
    """Return the call with its static keywords and `options` bound, and its arrays other than tokens and pages."""
    statics, arrays = executor.arguments(problem)
    statics |= options
    call = executor.implementation.call
    assert isinstance(call, StoredCall)
    others = {name: x for name, x in arrays.items() if name not in ("k", "v", "kv_scales")}
    return functools.partial(_call_checked, call, statics, save_residuals, problem.v.shape[-1]), others


def _call_checked(
    call: StoredCall,
    statics: Mapping[str, Any],
    save_residuals: bool,
    value_dim: int,
    arrays: Arrays,
    tokens: Arrays,
    pools: Arrays,
) -> tuple[Any, Any, Any]:
    """Make the call that writes pages, in its own convention, and check the shapes of `out` and residuals."""
    storage = arrays["storage"]
    others = pack_pairs({name: x for name, x in arrays.items() if name not in ("q", "storage")}, storage)
    q = call.pack_queries(arrays["q"], storage, q_scale=statics.get("q_scale"))
    operands = {**WRITE_FORMS[call.form.name].name_queries(q, value_dim), **tokens, **pools}
    out, residuals, after = call.write(
        **operands, **call.select_tables(storage), **others, **statics, save_residuals=save_residuals
    )
    returned_values.check_shape("out", out, (*q.shape[:2], value_dim))
    if residuals is not None:
        out, residuals = returned_values.check_residuals((out, residuals))
        for name, x in residuals.items():
            returned_values.check_shape(name, x, q.shape[:2])
    return out, residuals, after
