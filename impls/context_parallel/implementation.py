"""Declare as implementations to judge: kernels whose sequence is sharded over several devices."""

from __future__ import annotations

import functools
from typing import Any

from cases.case import Case
from impls import block_flash
from impls.context_parallel.attention import DEFAULT_DEVICES, UNSUPPORTED, Method, attention
from impls.contract.implementation import Accelerator, Implementation

_DESCRIPTIONS: dict[Method, str] = {
    "all_gather": "all-gather of keys and values, load-balanced order",
    "ring": "keys and values in a ring, load-balanced order",
    "ulysses": "tokens exchanged for heads",
    "usp": "tokens exchanged for heads in groups, and a ring of groups in load-balanced order",
}


def build_implementation(
    name: str, kernel: Implementation, method: Method, *, devices: int = DEFAULT_DEVICES, **options: Any
) -> Implementation:
    """Declare `kernel` on several devices under `name`, with further options of `attention`.

    Raises:
      ValueError: the kernel does not return `max_logits` and a differentiable `logsumexp`.
    """
    if not {"logsumexp", "max_logits"} <= kernel.residuals or "logsumexp" not in kernel.differentiable_residuals:
        raise ValueError(f"{name}: {kernel.name} must return max_logits and a differentiable logsumexp")
    call = functools.partial(attention, kernel=kernel.call, method=method, devices=devices, **options)
    sharing = {"ulysses": devices, "usp": options.get("group", 2)}.get(method, 1)
    no_own_masks = {"dense_head": "a ring of groups takes one mask for all heads"} if method == "usp" else {}
    return Implementation(
        name=name,
        call=call,
        description=f"{kernel.name} with its sequence on {devices} devices, {_DESCRIPTIONS[method]}",
        unsupported={**kernel.unsupported, **UNSUPPORTED, **no_own_masks},
        supports_case=kernel.supports_case if sharing == 1 else functools.partial(_find_refusal, kernel, sharing),
        arithmetic=kernel.arithmetic,
        residuals=kernel.residuals,
        differentiable_residuals=kernel.differentiable_residuals,
        gradients=kernel.gradients,
        empty_rows=kernel.empty_rows,
        behind_mask=kernel.behind_mask,
        validates=True,
        accelerator=Accelerator(platform=kernel.accelerator.platform, interpreted=kernel.accelerator.interpreted),
        variants={order: functools.partial(call, order=order) for order in ("contiguous", "striped")},
        memory=kernel.memory,
        devices=devices,
        on_devices=lambda count, check_vma: functools.partial(call, devices=count, check_vma=check_vma),
        check_vma="both" if kernel.accelerator.platform is None else False,
    )


def _find_refusal(kernel: Implementation, devices: int, case: Case) -> str | None:
    if case.num_q_heads % devices:
        return f"the {devices} devices that share the heads do not divide {case.num_q_heads} query heads"
    return kernel.supports_case(case) if kernel.supports_case else None


_KERNEL = block_flash.IMPLEMENTATIONS[0]
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    build_implementation("block_flash_allgather", _KERNEL, "all_gather"),
    build_implementation("block_flash_ring", _KERNEL, "ring"),
    # Two devices, since many cases of the grid have two query heads. The check `sharding` takes 2, 4 and 8.
    build_implementation("block_flash_ulysses", _KERNEL, "ulysses", devices=2),
    build_implementation("block_flash_usp", _KERNEL, "usp"),
)
