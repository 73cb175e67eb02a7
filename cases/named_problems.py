"""Define named problems: attention tasks of a public benchmark, as cases that can tell right kernels from wrong ones.

They are the seven attention tasks among the priority kernels of JAXBench (AI-Hypercomputer/accelerator-agents, commit
c4f3b17). Operands, layouts and sizes are those of its `create_inputs`; values are ours. A kernel is given as that
benchmark takes it, a function `workload` of its operands (`conformance.execution.workload_adapters`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from cases.case import Case
from cases.case_id import parse_case_id
from cases.operand_registry import OPTIONAL

_DENSE = (
    "f32/B2.T384.S384.{sizes}/causal{more}/normal/s0",
    "f32/B2.T384.S384.{sizes}/causal{more}/cancel/s0",
    "bf16/B2.T384.S384.{sizes}/causal{more}/normal/s0",
    "bf16/B2.T384.S384.{sizes}/causal{more}/dominant/s0",
    "bf16/B2.T384.S384.{sizes}/causal{more}/heavy/s0",
    "bf16/B2.T384.S384.{sizes}/causal{more}/large/s0",
    # Three blocks of 512 each way.
    "bf16/B1.T1536.S1536.{sizes}/causal{more}/normal/s0",
    "bf16/B1.T1536.S1536.{sizes}/causal{more}/dominant/s0",
)
_LATENT = (
    "f32/B2.T384.S384.{sizes}/causal{more}/normal/s0",
    "bf16/B2.T384.S384.{sizes}/causal{more}/normal/s0",
    "bf16/B2.T384.S384.{sizes}/causal{more}/large/s0",
)
# Key lengths are: whole pages, one page, one page and one key, a partial last page, and less than a page. Page tables
# have 32 or 256 pages a sequence.
_DECODED = tuple(
    f"decode/{dtype}/B5.T1.S{keys}.N8.K2.H128.V128/own-linf-{keys}-16-17-{keys // 2 + 7}-5/paged16/{values}/s0"
    for dtype, keys, values in (
        ("f32", 512, "normal"),
        ("f32", 512, "cancel"),
        ("bf16", 512, "normal"),
        ("bf16", 512, "dominant"),
        ("bf16", 512, "large"),
        ("bf16", 4096, "normal"),
        ("bf16", 4096, "dominant"),
    )
)
# Single tokens of four sequences, then chunks of three others: one whole prompt and two continued ones.
_MIXED = tuple(
    f"prefill/{dtype}/B7.T128.S640.N8.K2.H128.V128/own-linf-257-16-17-640-128-633-300/paged16-q1-1-1-1-128-128-45/"
    f"{values}/s0"
    for dtype, values in (
        ("f32", "normal"),
        ("f32", "cancel"),
        ("bf16", "normal"),
        ("bf16", "dominant"),
        ("bf16", "large"),
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedProblem:
    """One attention task of the benchmark, with the cases that judge a kernel for it."""

    name: str
    task: str
    about: str
    takes: str  # the operands of the kernel's function `workload`, and its result, with their shapes
    small: tuple[str, ...]  # ids of the cases of moderate size, for any machine
    # Ids of the cases at the benchmark's own sizes; empty if the operands cannot be made exact at these sizes.
    full: tuple[str, ...]

    def cases(self, *, full_size: bool) -> tuple[Case, ...]:
        """Return the cases of the problem: at the benchmark's sizes if `full_size`, otherwise the small ones."""
        return tuple(parse_case_id(text) for text in (self.full if full_size else self.small))

    def declines(self, case: Case) -> str | None:
        """Return why a case lacks a property that all cases of the problem share (`_FIXED`, `_RELATED`), or None."""
        own = [*self.cases(full_size=False), *self.cases(full_size=True)]
        for name, field in _FIXED.items():
            if (found := field(case)) not in (values := {field(one) for one in own}):
                return f"{name}: the problem {self.name} has {' or '.join(sorted(map(str, values)))}, not {found}"
        for words, holds in _RELATED.items():
            if all(map(holds, own)) and not holds(case):
                return f"sizes: the problem {self.name} has {words}"
        return None


def _describe_storage(case: Case) -> tuple[str, int | None] | None:
    """Return the storage form and the page size; None for dense operands."""
    return None if case.stored is None else (case.stored.form, case.stored.size)


_FIXED: Mapping[str, Callable[[Case], Any]] = {
    "phase": lambda case: case.phase,
    "mask": lambda case: case.mask.partition("-")[0],
    **{operand.name: operator.attrgetter(operand.field) for operand in OPTIONAL},
    "storage": _describe_storage,
    "front_end": lambda case: case.front_end,
}
"""Properties in which a case must equal some case of the problem: the kind of mask, the size of pages, each operand."""
_RELATED: Mapping[str, Callable[[Case], bool]] = {
    "as many queries as keys": lambda case: case.q_length == case.kv_length,
    "one query a sequence": lambda case: set(case.q_lengths) == {1},
    "as many key heads as query heads": lambda case: case.num_q_heads == case.num_kv_heads,
    "values as deep as keys": lambda case: case.head_dim == case.v_head_dim,
}
"""Relations between sizes. A case must satisfy a relation if all cases of the problem satisfy it."""


def _build_ids(patterns: tuple[str, ...], sizes: str, more: str = "") -> tuple[str, ...]:
    """Build the ids of small cases from patterns with placeholders for sizes and further parts."""
    return tuple(f"train/{pattern.format(sizes=sizes, more=more)}" for pattern in patterns)


def _build_full_ids(sizes: str, more: str = "") -> tuple[str, ...]:
    """Build the ids of cases at the benchmark's sizes."""
    return tuple(f"train/bf16/{sizes}/causal{more}/{values}/s0" for values in ("normal", "dominant"))


_DECODED_KEYS = "-".join(str(257 + i * 73 % 240 * 16) for i in range(48))

PROBLEMS = (
    NamedProblem(
        name="flash_attention",
        task="1p_Flash_Attention",
        about="causal attention with as many key heads as query heads",
        takes="query, key, value [B, N, T, H] -> [B, N, T, H]",
        small=_build_ids(_DENSE, "N2.K2.H128.V128"),
        full=_build_full_ids("B4.T4096.S4096.N64.K64.H128.V128"),
    ),
    NamedProblem(
        name="gqa_attention",
        task="2p_GQA_Attention",
        about="causal attention with groups of query heads, of Llama 3.1 405B",
        takes="query [B, T, N, H], key, value [B, T, K, H] -> [B, T, N, H]",
        small=_build_ids(_DENSE, "N8.K2.H128.V128"),
        full=_build_full_ids("B4.T4096.S4096.N128.K8.H128.V128"),
    ),
    NamedProblem(
        name="mla_attention",
        task="3p_MLA_Attention",
        about="multi-head latent attention with its projections, of DeepSeek V3",
        takes="x [B, T, E], q_down, q_up, kv_down, k_up, v_up, o_proj -> [B, T, E]",
        small=_build_ids(_LATENT, "N4.K4.H96.V64", "/front-decoupled"),
        full=(),
    ),
    NamedProblem(
        name="sparse_attention",
        task="4p_Sparse_Attention",
        about="causal attention with groups of query heads and queries that are scaled already, of Llama 3.1 70B",
        takes="q [B, N, T, H], k, v [B, K, T, H] -> [B, N, T, H]",
        small=_build_ids(_DENSE, "N8.K2.H128.V128", "/scale1"),
        full=_build_full_ids("B4.T4096.S4096.N64.K8.H128.V128", "/scale1"),
    ),
    NamedProblem(
        name="flex_attention",
        task="5p_Flex_Attention",
        about="causal attention with a bias of every head, query and key",
        takes="q, k, v [B, N, T, H], rel_pos_bias [N, T, T] -> [B, N, T, H]",
        small=_build_ids(_DENSE, "N2.K2.H128.V128", "/biashead"),
        full=_build_full_ids("B4.T4096.S4096.N64.K64.H128.V128", "/biashead"),
    ),
    NamedProblem(
        name="paged_attention",
        task="6p_Paged_Attention",
        about="decoding over pages of keys and values",
        takes="queries [seqs, N, H], k_pages, v_pages [pages, 16, K, H], kv_lens [seqs], page_indices [seqs, pages a "
        "sequence], cu_q_lens [seqs + 1] -> [seqs, N, H]",
        small=_DECODED,
        full=tuple(
            f"decode/bf16/B64.T1.S4096.N64.K8.H128.V128/causal-o4095/paged16/{values}/s0"
            for values in ("normal", "dominant")
        ),
    ),
    NamedProblem(
        name="ragged_paged_attention",
        task="7p_Ragged_Paged_Attention",
        about="decoding and chunks of prompts in one call over pages",
        takes="queries [tokens, N, H], kv_pages [pages, 16, 2 K, H] (keys and values in turns), kv_lens [seqs], "
        "page_indices [seqs, pages a sequence], cu_q_lens [seqs + 1], num_seqs [1] -> [tokens, N, H]",
        small=_MIXED,
        full=(
            f"prefill/bf16/B56.T512.S4095.N64.K8.H128.V128/"
            f"own-linf-{_DECODED_KEYS}-1023-1535-2047-2559-3071-3583-4095-4095/"
            f"paged16-q{'1-' * 48}512-512-512-512-512-512-512-464/normal/s0",
        ),
    ),
)


@functools.cache
def index_problems() -> dict[str, NamedProblem]:
    """Return the named problems by name."""
    return {problem.name: problem for problem in PROBLEMS}
