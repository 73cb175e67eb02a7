"""Declare as implementations to judge: the automatic choice of a kernel, and each candidate requested by name."""

from __future__ import annotations

import dataclasses
import functools

import jax

from cases.case import Case
from impls.auto.attention import attention
from impls.auto.kernel_routes import CANDIDATES, Candidate
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation, structured_mask


def build_forced(candidate: Candidate) -> Implementation:
    """Declare the call with one candidate requested by name. Its other declarations are those of the kernel itself."""
    kernel = candidate.kernel
    return dataclasses.replace(
        kernel,
        name=f"auto_{kernel.name}",
        call=functools.partial(attention, kernel=kernel.name),
        description=f"{kernel.name}, asked for by name",
        lower_mask=structured_mask,
        tunable=None,
        variants={},
        accelerator=dataclasses.replace(kernel.accelerator, native=None, under_interpreter=None),
        parts=None,
        merge=None,
    )


def _find_unsupported(case: Case) -> str | None:
    """Return why no candidate of this platform supports `case`, or None if one does."""
    possible = [c for c in CANDIDATES if c.special or c.kernel.gradients]
    local = [c for c in possible if c.platform in (None, jax.default_backend())]
    reasons = [c.lacks(case.features) or (c.special and c.kernel.supports(case)) or None for c in local]
    return (
        None if None in reasons else "; ".join(f"{c.kernel.name} {why}" for c, why in zip(local, reasons, strict=True))
    )


AUTO = Implementation(
    name="auto",
    call=attention,
    description=f"one of {', '.join(c.kernel.name for c in CANDIDATES)}, by platform, phase and lengths",
    arithmetic=Arithmetic(),
    empty_rows="zero",
    validates=True,
    offers=frozenset[str]().union(*(candidate.kernel.offers for candidate in CANDIDATES)),
    supports_case=_find_unsupported,
)
IMPLEMENTATIONS: tuple[Implementation, ...] = (AUTO, *(build_forced(c) for c in CANDIDATES))
