"""Context parallelism: shard the sequence of any attention with a differentiable `logsumexp` over several devices."""

from impls.context_parallel.all_gather import all_gather
from impls.context_parallel.attention import attention
from impls.context_parallel.implementation import IMPLEMENTATIONS, build_implementation
from impls.context_parallel.ring import ring
from impls.context_parallel.sequence_layout import Layout
from impls.context_parallel.ulysses import ulysses, usp

__all__ = ["IMPLEMENTATIONS", "Layout", "all_gather", "attention", "build_implementation", "ring", "ulysses", "usp"]
