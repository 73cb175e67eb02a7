"""Draw `error_and_bound.svg`: error against bound, for a right and for a wrong kernel.

Run it from the root of the repository: `python docs/figures/draw_verdict_figure.py`. Each dot is one element of `out`.
The wrong kernel multiplies queries and keys in tf32, without declaring it. A fixed tolerance would let it pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from conformance import Arithmetic
from conformance.truth.rounding_bounds import compute_expectation

CASE = "train/f32/B1.T128.S128.N2.K2.H64.V64/causal/heavy/s0"
LIMIT = 4  # of the largest ratio (docs/numerics.md, section 6)
FIXED_TOLERANCE = 1e-2
TARGET = Path(__file__).with_name("error_and_bound.svg")


def attend(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array) -> jax.Array:
    """Compute attention of `q [B, T, N, H]` to `k [B, S, N, H]` and `v [B, S, N, V]` in f32."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")


def attend_in_tf32(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array) -> jax.Array:
    """Compute the same, with queries and keys rounded to tf32, whose significand is as long as that of f16."""
    q, k = (x.astype(jnp.float16).astype(jnp.float32) for x in (q, k))
    return attend(q, k, v, allowed)


def draw_figure() -> None:
    """Write the figure."""
    case = parse_case_id(CASE)
    problem = draw_problem(case)
    expected = compute_expectation(problem, Arithmetic()).forward["out"]
    allowed = jnp.asarray(problem.mask.dense(problem.q.shape[1], problem.k.shape[1]))
    bound = np.asarray(expected.bound)

    mpl.rcParams.update({"svg.hashsalt": "fixed", "font.size": 11, "svg.fonttype": "none"})
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    kernels: list[tuple[str, Callable[..., jax.Array]]] = [
        ("a right kernel", attend),
        ("wrong: products in tf32", attend_in_tf32),
    ]
    for axes, (title, kernel) in zip(panels, kernels, strict=True):
        got = np.asarray(kernel(problem.q, problem.k, problem.v, allowed), np.float64)
        error = np.abs(got - expected.value)
        ratio = error / bound
        visible = error > 1e-10
        passes = ratio <= LIMIT
        for chosen, color in ((visible & passes, "#1b7f4b"), (visible & ~passes, "#b3261e")):
            axes.scatter(bound[chosen], error[chosen], s=3, color=color, alpha=0.35, linewidths=0, rasterized=True)
        ends = np.array([bound.min() * 0.8, bound.max() * 1.25])
        axes.plot(ends, ends, color="#555555", linewidth=1, linestyle="--")
        axes.plot(ends, LIMIT * ends, color="#111111", linewidth=1.5)
        axes.axhline(FIXED_TOLERANCE, color="#1f5fa8", linewidth=1, linestyle=":")
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=(1e-10, 1e-1), xlabel="bound of the element")
        axes.set_title(f"{title}: largest ratio {ratio.max():.3g}", fontsize=12)
        axes.grid(visible=True, color="#e3e3e3", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.text(ends[1] * 0.97, FIXED_TOLERANCE * 1.3, "a fixed tolerance of 0.01", ha="right", color="#1f5fa8")
    panels[0].set_ylabel("error of the element")
    left = bound.min()
    panels[0].text(left, LIMIT * left * 40, "limit: error = 4 x bound", va="bottom")
    panels[0].text(left, left / 6, "error = bound", va="top", color="#555555")
    figure.savefig(TARGET, dpi=150, metadata={"Date": None, "Title": "Error against bound, element by element"})


if __name__ == "__main__":
    draw_figure()
