"""Refuse calls that an adapter declares unsupported, since no argument may be ignored (docs/contract.md, section 7)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from cases.case import FEATURES, OPT_IN
from cases.masks import Mask
from impls.requested_features import list_requested_features


def refuse_unsupported(
    name: str,
    unsupported: Mapping[str, str],
    arrays: tuple[Any, Any, Any],
    mask: Mask,
    *,
    offers: Collection[str] = (),
    **options: Any,
) -> None:
    """Refuse a call that needs a feature in `unsupported`, or an opt-in feature that is not in `offers`.

    `options` are the contract's other operands by name, None where not given. Raises `NotImplementedError`, whose
    message names the feature and the reason.
    """
    for feature in list_requested_features(*arrays, mask, options):
        if feature in unsupported or (feature in OPT_IN and feature not in offers):
            because = f": it {unsupported[feature]}" if feature in unsupported else ""
            raise NotImplementedError(f"{name} does not support {feature} ({FEATURES[feature]}){because}")


def refuse_because(name: str, reason: str | None) -> None:
    """Raise `NotImplementedError` with `reason`, unless the reason is None."""
    if reason:
        raise NotImplementedError(f"{name} does not support this call: it {reason}")


def forbid_gradients(name: str, reason: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that differentiating it raises `NotImplementedError` with `reason`."""
    run = jax.custom_vjp(function)

    def refuse_gradients(*operands: Any) -> Any:
        del operands
        refuse_because(name, reason)

    run.defvjp(refuse_gradients, refuse_gradients)
    return run
