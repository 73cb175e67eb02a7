"""Judge a function from Python, and read what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

import conformance

CASE = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0"


@conformance.declare(behind_mask="finite")
def unscaled_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute attention without its scale, which is wrong."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)


def judge(folder: Path) -> list[str]:
    """Judge the function on one case, save the page, and list what is wrong."""
    report: conformance.Report = conformance.check(unscaled_attention, case=CASE, checks="forward", progress=False)
    page: Path = report.save(folder / "report.html")
    assert page.exists()
    lines: list[str] = []
    for finding in report.findings:
        ratio: float | None = finding.ratio
        bugs = finding.diagnosis.bugs if finding.diagnosis is not None else ()
        lines.append(f"{finding.cause} ({finding.case}): {ratio}, like {[bug.name for bug in bugs]}")
    if report.findings and (worst := report.findings[0].worst) is not None:
        index: tuple[int, ...] = worst.index
        lines.append(f"at {index}: {worst.got:.3g} in place of {worst.expected:.3g}")
    return lines


def raise_unless_conforming() -> None:
    """Raise `AssertionError` with the findings."""
    conformance.assert_conforms(unscaled_attention, level="smoke", case=CASE, checks=["forward"], progress=False)
