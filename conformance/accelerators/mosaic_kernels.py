"""Find the Mosaic GPU kernels in a lowered StableHLO module.

The compiler (`compilation`) gives them unique hashes, and the GPU measurements read their shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

KERNEL_HASH = "kernel_hash"
"""Name of the MLIR attribute by which the compiler of Mosaic GPU kernels identifies a kernel in its cache."""


def iter_mosaic_kernels(module: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each call of a Mosaic GPU kernel in a lowered module, as (operation, its backend configuration)."""
    found = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        config: Any = operation.attributes.get("mhlo.backend_config", None)
        if isinstance(config, ir.DictAttr) and KERNEL_HASH in config:
            found.append((operation, {config[at].name: config[at].attr for at in range(len(config))}))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    yield from found
