"""Eliminate common subexpressions of a jaxpr, so that the executor compiles and runs equal kernels once.

The executor compiles the calls with residuals and without as one program. Both often run the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.extend import core


def eliminate_common_subexpressions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, to be compiled, that computes equal equations of the given function's jaxpr once.

    Two equations are equal if they have the same primitive, equal parameters and the same inputs, and no effects. JAX
    lowers them to the same operations, so they have the same results. XLA merges small equal operations by itself. It
    does not merge loops, and an interpreted kernel is a loop.
    """

    def merged(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = core.jaxpr_as_fun(_merge_equations(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return merged


def _merge_equations(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    stand_in = _find_equal_constants(closed)
    kept: list[core.JaxprEqn] = []
    place_of: dict[Hashable, int] = {}
    for repeated in closed.jaxpr.eqns:
        equation = repeated.replace(invars=_substitute(stand_in, repeated.invars))
        key = _compute_key(equation)
        place = place_of.setdefault(key, len(kept)) if key is not None else len(kept)
        if place == len(kept):
            kept.append(equation)
            continue
        results = [
            new if isinstance(old, core.DropVar) else old
            for old, new in zip(kept[place].outvars, equation.outvars, strict=True)
        ]
        kept[place] = kept[place].replace(outvars=results)
        stand_in.update(zip(equation.outvars, results, strict=True))
    jaxpr = closed.jaxpr.replace(eqns=kept, outvars=_substitute(stand_in, closed.jaxpr.outvars))
    return core.ClosedJaxpr(jaxpr, closed.consts)


def _find_equal_constants(closed: core.ClosedJaxpr) -> dict[core.Var, core.Var]:
    """Map each constant that is a host array to the first such constant with the same type and bits."""
    first: dict[Hashable, core.Var] = {}
    stand_in: dict[core.Var, core.Var] = {}
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if not isinstance(value, jax.Array):
            like_it = first.setdefault((var.aval, np.asarray(value).tobytes()), var)
            stand_in[var] = like_it
    return stand_in


def _substitute(stand_in: dict[core.Var, core.Var], atoms: list[Any]) -> list[Any]:
    return [atom if isinstance(atom, core.Literal) else stand_in.get(atom, atom) for atom in atoms]


def _compute_key(equation: core.JaxprEqn) -> Hashable | None:
    """Return a key that equal equations share; None if the equation has effects or parameters that cannot be hashed."""
    if equation.effects:
        return None
    inputs = tuple(
        (atom.aval, np.asarray(atom.val).tobytes()) if isinstance(atom, core.Literal) else atom
        for atom in equation.invars
    )
    key = (equation.primitive, equation.ctx, inputs, tuple(sorted(equation.params.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key
