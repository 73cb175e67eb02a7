"""Find the Mosaic GPU kernels in a lowered module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

KERNEL_HASH = "kernel_hash"
"""Name of the attribute by which the compiler of Mosaic GPU kernels identifies a kernel."""


def iter_mosaic_kernels(module: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the calls of Mosaic GPU kernels in a lowered module, each with its configuration."""
    found = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        config: Any = operation.attributes.get("mhlo.backend_config", None)
        if isinstance(config, ir.DictAttr) and KERNEL_HASH in config:
            found.append((operation, {config[at].name: config[at].attr for at in range(len(config))}))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    yield from found
