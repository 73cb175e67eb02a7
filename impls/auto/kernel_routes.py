"""Choose the kernel for a call from a list of candidates, and state the reason for the choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from cases.case import FEATURES, OPT_IN
from cases.masks import Mask
from impls import block_flash, dot_product, flash_gpu, moba, quantized_kv, ragged, splash_tpu
from impls.contract.implementation import Implementation
from impls.requested_features import PHASES, Phase, infer_phase, list_requested_features

MAX_DENSE_LOGITS = 2**17
"""Up to this many logits, keeping all of them in memory is about as fast as a loop over blocks. Measured for forward
and backward in f32 on CPU under a causal mask: the loop over blocks took 0.84 of the time of keeping all logits at
2**16 logits, 0.64 at 2**18, 0.80 at 2**20 and 0.23 at 2**22."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel, and the calls for which it is chosen automatically. It can be requested by name for any call."""

    kernel: Implementation
    platform: str | None = None  # platform of the process for which the kernel is chosen; None for any
    phases: tuple[Phase, ...] = PHASES
    # Whether the kernel is chosen only for calls that use one of the opt-in features that it offers.
    special: bool = False
    up_to_logits: int | None = None  # largest `B * N * T * S` for which the kernel is chosen; None for any

    def unfit(self, platform: str, phase: Phase, logits: int, features: tuple[str, ...], *, said: bool) -> str | None:
        """Return why the kernel is not chosen, or None if it is. `said` is true if the caller named the phase."""
        if self.platform not in (None, platform):
            return f"is for {self.platform}, the process runs on {platform}"
        if self.special and not self.kernel.offers & set(features):
            return f"is for {', '.join(sorted(self.kernel.offers))} only"
        if phase not in self.phases:
            return f"is not for {phase}"
        if not (said or self.special or self.kernel.gradients):
            return f"has no gradients, and the caller did not declare the phase {phase}"
        if self.up_to_logits is not None and logits > self.up_to_logits:
            return f"keeps all {logits} logits in memory, which is only worth it up to {self.up_to_logits}"
        return self.lacks(features)

    def lacks(self, features: tuple[str, ...]) -> str | None:
        """Return the first of `features` that the kernel does not support, with its reason, or None."""
        for feature in features:
            if feature in self.kernel.unsupported:
                what = FEATURES.get(feature, "an operand of this dtype")
                return f"does not support {feature} ({what}): it {self.kernel.unsupported[feature]}"
            if feature in OPT_IN and feature not in self.kernel.offers:
                return f"does not support {feature} ({FEATURES[feature]})"
        return None


_MOBA_KERNELS = {kernel.name: kernel for kernel in moba.IMPLEMENTATIONS}
_RAGGED_KERNELS = {kernel.name: kernel for kernel in ragged.IMPLEMENTATIONS}
# In order of preference: specialised kernels first.
CANDIDATES: tuple[Candidate, ...] = (
    Candidate(kernel=_MOBA_KERNELS["moba_tpu"], platform="tpu", special=True),
    Candidate(kernel=_MOBA_KERNELS["moba"], special=True),
    Candidate(kernel=quantized_kv.IMPLEMENTATIONS[0], special=True),
    Candidate(kernel=_RAGGED_KERNELS["ragged_tpu"], platform="tpu", phases=("decode",)),
    Candidate(kernel=_RAGGED_KERNELS["ragged_gpu"], platform="gpu", phases=("decode",)),
    Candidate(kernel=_RAGGED_KERNELS["ragged"], phases=("decode",)),
    Candidate(kernel=splash_tpu.IMPLEMENTATIONS[0], platform="tpu", phases=("train", "prefill")),
    Candidate(kernel=flash_gpu.IMPLEMENTATIONS[0], platform="gpu", phases=("train", "prefill")),
    Candidate(kernel=dot_product.IMPLEMENTATIONS[0], up_to_logits=MAX_DENSE_LOGITS),
    Candidate(kernel=block_flash.IMPLEMENTATIONS[0]),
)


@dataclasses.dataclass(frozen=True)
class Route:
    """The kernel that is chosen for a call, the reason, and the candidates that were passed over, with reasons."""

    kernel: str
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        passed = "; ".join(f"{name} {why}" for name, why in self.passed_over)
        return f"{self.kernel}: {self.reason}" + (f" ({passed})" if passed else "")


def find_route(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Mask,
    phase: Phase | None = None,
    kernel: str | None = None,
    platform: str | None = None,
    fall_back: bool = True,
    candidates: tuple[Candidate, ...] = CANDIDATES,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Route, Candidate]:
    """Choose the kernel of a call without reading values, so operands may be abstract.

    Args:
      phase: phase of the call; by default inferred from the lengths. Kernels without gradients are only chosen if it is
        given.
      kernel: name of a kernel to use instead of choosing one.
      platform: platform to choose for; by default the platform of the process.
      fall_back: whether to try the next kernel if the suitable one lacks a feature; if False, the call is refused.
      candidates: kernels to choose from, in order of preference.
      options: the optional operands of the canonical call, by name.

    Returns:
      The route, and the candidate that it names.

    Raises:
      ValueError: there is no kernel of that name, or no such phase.
      NotImplementedError: the kernel lacks a feature of the call; the message names both.
    """
    if phase not in (None, *PHASES):
        raise ValueError(f"phase must be one of {PHASES}, got {phase!r}")
    features = list_requested_features(q, k, v, mask, options)
    if kernel is not None:
        return _force_route(kernel, features, candidates)
    said = phase is not None
    phase = infer_phase(q.shape[1], k.shape[1]) if phase is None else phase
    platform = jax.default_backend() if platform is None else platform
    logits = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    passed: list[tuple[str, str]] = []
    for candidate in candidates:
        why_not = candidate.unfit(platform, phase, logits, features, said=said)
        name = candidate.kernel.name
        if why_not is None:
            return Route(name, f"first that suits {phase} on {platform} with {logits} logits", tuple(passed)), candidate
        if why_not == candidate.lacks(features) and not fall_back:
            raise NotImplementedError(f"{name} {why_not}")
        passed.append((name, why_not))
    tried = "; ".join(f"{name} {why}" for name, why in passed)
    raise NotImplementedError(f"no kernel supports this call: {tried}")


def _force_route(kernel: str, features: tuple[str, ...], candidates: tuple[Candidate, ...]) -> tuple[Route, Candidate]:
    by_name = {candidate.kernel.name: candidate for candidate in candidates}
    if kernel not in by_name:
        raise ValueError(f"kernel must be one of {', '.join(by_name)}, got {kernel!r}")
    if (reason := by_name[kernel].lacks(features)) is not None:
        raise NotImplementedError(f"{kernel} {reason}")
    return Route(kernel, "requested by name"), by_name[kernel]
