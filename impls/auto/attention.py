"""Attention that chooses a kernel for each call, and passes all operands of the call on to that kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from cases.masks import Full, Mask
from impls.auto.kernel_routes import CANDIDATES, Candidate, Route, find_route
from impls.contract.implementation import validate_operands
from impls.requested_features import OPTIONAL, Phase

_log = logging.getLogger(__name__)


def attention(
    q: Float[Array, "B T N H"],
    k: Shaped[Array, "B S K H"],
    v: Shaped[Array, "B S K V"],
    *,
    mask: Mask = Full(),
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    phase: Phase | None = None,
    kernel: str | None = None,
    fall_back: bool = True,
    candidates: tuple[Candidate, ...] = CANDIDATES,
    on_route: Callable[[Route], None] | None = None,
    **opt_in: Any,
) -> Any:
    """Compute softmax attention by the first kernel of `candidates` that suits platform, phase and lengths.

    If that kernel does not support the call, the next one is tried, and the route records the reason. The route is
    logged at level INFO. `impls.auto.find_route` returns it without a call.

    The operands and results are those of the contract (docs/contract.md, section 1).

    Args:
      phase: phase of the call; by default inferred from the lengths.
      kernel: name of a kernel to use instead of choosing one. A call with a feature that the kernel lacks is refused.
      fall_back: whether to try the next kernel if the suitable one lacks a feature; if False, the call is refused.
      candidates: kernels to choose from, in order of preference.
      on_route: a function that is called with the chosen route.
      **opt_in: operands that only some kernels take (docs/contract.md, section 1): `kv_scales`, `alibi_slopes`,
        `score_mod`, `logit_scale`.

    Raises:
      ValueError: an operand, the mask or an option is invalid; the message names it.
      NotImplementedError: no candidate supports the call; the message says what each lacks.
    """
    options: dict[str, Any] = {
        "segment_ids": segment_ids,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "bias": bias,
        "scale": scale,
    }
    assert tuple(options) == OPTIONAL
    # Kernels that do not offer an opt-in operand have no parameter for it.
    options |= {name: x for name, x in opt_in.items() if x is not None}
    validate_operands(q, k, v, **options)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a cases.masks.Mask, got {type(mask).__name__}; wrap booleans in Dense")
    found, candidate = find_route(
        q, k, v, mask=mask, phase=phase, kernel=kernel, fall_back=fall_back, candidates=candidates, options=options
    )
    _log.info("%s", found)
    if on_route is not None:
        on_route(found)
    static, arrays = candidate.kernel.lower_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return candidate.kernel.call(q, k, v, **static, **arrays, **options, save_residuals=save_residuals)
