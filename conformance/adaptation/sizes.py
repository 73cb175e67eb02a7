"""Define the sizes of the cases on which a function is asked what it computes."""

from __future__ import annotations

import dataclasses
from typing import Any

from cases.case import Case


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the cases that are asked about."""

    batch: int
    heads: int
    q_length: int
    kv_length: int
    depth: int

    def describe(self) -> str:
        """Describe the lengths and the depth."""
        return f"{self.q_length} queries, {self.kv_length} keys and a depth of {self.depth}"

    def build_case(self, **changes: Any) -> Case:
        """Build a case of these sizes with as many key heads as query heads, in f32."""
        sizes: dict[str, Any] = {
            "batch": self.batch,
            "num_q_heads": self.heads,
            "num_kv_heads": self.heads,
            "q_length": self.q_length,
            "kv_length": self.kv_length,
            "head_dim": self.depth,
            "v_head_dim": self.depth,
        }
        return Case(**{**sizes, **changes})


SIZES = (
    Size(2, 3, 12, 20, 16),
    Size(2, 3, 12, 12, 16),
    Size(2, 3, 64, 128, 64),
    Size(2, 3, 128, 128, 64),
    Size(2, 4, 128, 256, 128),
    Size(2, 4, 256, 256, 128),
)
"""Sizes to try. In the first all differ; kernels may demand equal lengths, or multiples of 8, 64 or 128."""
