"""Declare as implementations to judge: kernels whose sequence is sharded over several devices."""

from __future__ import annotations

import functools
from typing import Any

from impls import block_flash
from impls.context_parallel.attention import DEFAULT_DEVICES, UNSUPPORTED, Method, attention
from impls.contract.implementation import Accelerator, Implementation


def build_implementation(name: str, kernel: Implementation, method: Method, **options: Any) -> Implementation:
    """Declare `kernel` on several devices under `name`, with further options of `attention`.

    Raises:
      ValueError: the kernel does not return `max_logits` and a differentiable `logsumexp`.
    """
    if not {"logsumexp", "max_logits"} <= kernel.residuals or "logsumexp" not in kernel.differentiable_residuals:
        raise ValueError(f"{name}: {kernel.name} must return max_logits and a differentiable logsumexp")
    call = functools.partial(attention, kernel=kernel.call, method=method, **options)
    devices = options.get("devices", DEFAULT_DEVICES)
    how = {"all_gather": "all-gather of keys and values", "ring": "keys and values in a ring"}[method]
    return Implementation(
        name=name,
        call=call,
        description=f"{kernel.name} with its sequence on {devices} devices, {how}, load-balanced order",
        unsupported={**kernel.unsupported, **UNSUPPORTED},
        supports_case=kernel.supports_case,
        arithmetic=kernel.arithmetic,
        residuals=kernel.residuals,
        differentiable_residuals=kernel.differentiable_residuals,
        gradients=kernel.gradients,
        empty_rows=kernel.empty_rows,
        behind_mask=kernel.behind_mask,
        validates=True,
        accelerator=Accelerator(platform=kernel.accelerator.platform, interpreted=kernel.accelerator.interpreted),
        variants={"contiguous": functools.partial(call, balanced=False)},
        memory=kernel.memory,
        devices=devices,
    )


_KERNEL = block_flash.IMPLEMENTATIONS[0]
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    build_implementation("block_flash_allgather", _KERNEL, "all_gather"),
    build_implementation("block_flash_ring", _KERNEL, "ring"),
)
