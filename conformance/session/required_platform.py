"""Select the implementations that run natively on the platform of `--require-platform`.

A kernel of another platform would be interpreted there, which takes minutes and says nothing of the required platform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from conformance.sandbox.sandboxed_executor import create_executor
from impls.contract.implementation import Implementation


@dataclasses.dataclass(frozen=True)
class PlatformSelection:
    """The implementations that run natively on a platform, and the names of those that do not, by reason."""

    platform: str
    kept: tuple[Implementation, ...]
    left_out: tuple[tuple[str, tuple[str, ...]], ...]

    def describe(self) -> str:
        """Say in one line how many implementations are left out, and why; empty if none is."""
        if not self.left_out:
            return ""
        count = sum(len(names) for _, names in self.left_out)
        reasons = "; ".join(f"{reason}: {', '.join(names)}" for reason, names in self.left_out)
        total = count + len(self.kept)
        noun = "implementation" if total == 1 else "implementations"
        option = f"--require-platform={self.platform}"
        return f"{option} left out {count} of {total} {noun}, which do not run natively there ({reasons})"


def select_native(
    implementations: Sequence[Implementation], platform: str, *, judged_elsewhere: bool = False
) -> PlatformSelection:
    """Select the implementations that run natively on a platform.

    Portable code runs natively wherever JAX computes. An implementation that this process cannot run, such as one whose
    library is missing, is kept if it is written for the platform: its records then say what is missing.

    Args:
      judged_elsewhere: whether other machines judge, whose platforms this process does not know.
    """
    kept = []
    left_out: dict[str, list[str]] = {}
    for implementation in implementations:
        reason = _find_reason(implementation, platform, judged_elsewhere=judged_elsewhere)
        if reason:
            left_out.setdefault(reason, []).append(implementation.name)
        else:
            kept.append(implementation)
    return PlatformSelection(platform, tuple(kept), tuple((reason, tuple(names)) for reason, names in left_out.items()))


def _find_reason(implementation: Implementation, platform: str, *, judged_elsewhere: bool) -> str:
    """Return why an implementation does not run natively on a platform; empty if it does."""
    accelerator = implementation.accelerator
    if accelerator.platform not in (None, platform):
        return f"written for {accelerator.platform}"
    if judged_elsewhere:
        return ""
    backend = create_executor(implementation).backend
    if backend != platform:
        return f"JAX computes on {backend} here"
    return "interpreted here" if accelerator.interpreted and accelerator.absent is None else ""
