"""Accelerators that kernels are compiled for without one: data, and whether this machine has the compiler.

A platform's compiler comes with a package of its own, and describes the chips that it compiles for as topologies
(`jax.experimental.topologies`). Another platform is another `Toolchain` and its `CompileTarget`s.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toolchain:
    """What compiles for a platform.

    Attributes:
      platform: as implementations name it (`Implementation.platform`).
      module: the importable module that brings the compiler.
      install: the command that installs it.
      environment: variables that the compiler needs on a machine without the accelerator.
    """

    platform: str
    module: str
    install: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def missing(self) -> str | None:
        """Why nothing can be compiled here, or None if the compiler is there."""
        if importlib.util.find_spec(self.module) is not None:
            return None
        return f"the {self.platform.upper()} compiler is not installed ({self.module}): {self.install}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """A generation of an accelerator.

    Attributes:
      name: how records name it.
      toolchain: what compiles for it.
      topology: arguments of `jax.experimental.topologies.get_topology_desc`, beside the platform.
    """

    name: str
    toolchain: Toolchain
    topology: Mapping[str, str] = dataclasses.field(hash=False)


TPU = Toolchain(
    platform="tpu",
    module="libtpu",
    install='pip install "attention-conformance[tpu]"',
    environment={
        # The metadata server, which says what chips a cloud machine has, is not asked: without a TPU it would be
        # waited for.
        "TPU_SKIP_MDS_QUERY": "1",
        # A chip belongs to one process, so a second one that loads the library aborts; without a chip any number may.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
)

# The smallest topology of each generation that the library describes.
_TPU_TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}

TARGETS: tuple[CompileTarget, ...] = tuple(
    CompileTarget(name=name, toolchain=TPU, topology={"topology_name": topology})
    for name, topology in _TPU_TOPOLOGIES.items()
)


def targets_of(platform: str | None) -> tuple[CompileTarget, ...]:
    """The targets of kernels that are written for `platform`; none for portable code."""
    return tuple(target for target in TARGETS if target.toolchain.platform == platform)
