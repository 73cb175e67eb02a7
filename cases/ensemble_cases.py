"""Build the cases of the check `ensemble`: plain and long, so that errors of one sign add up."""

from __future__ import annotations

import dataclasses

from cases.case import Case
from cases.grid import Supports

# (T, S, N, K, mask). The first supported line is used. Eight blocks of 64 keys, and a group of eight query heads, show
# whether a sum is rounded at every step. Without a mask the softmax is flat, and all terms of a sum have similar size.
# The later lines suit implementations that need more key/value heads, T = S, or a causal mask.
_SIZES = (
    (128, 512, 8, 1, "full"),
    (128, 512, 8, 2, "full"),
    (128, 512, 2, 2, "full"),
    (512, 512, 2, 2, "full"),
    (512, 512, 2, 1, "causal"),
    (512, 512, 2, 2, "causal"),
    (512, 512, 2, 2, "moba-64-8"),
)


# Cases in which a kernel may take another code path: a window with heads that share keys, one query over a cache, and
# gradients of keys that are summed over more than eight blocks of 64 or 128 queries. Of the masks the first supported
# one is used. The cache has one that counts from the last key, or else from the first key: most of it is seen, and
# kernels that split a cache may merge masked splits in a way of their own.
_OTHER_PATHS: tuple[tuple[str, int, int, int, int, tuple[str, ...]], ...] = (
    ("train", 512, 512, 4, 2, ("window-l80-r0",)),
    ("decode", 1, 1024, 32, 4, ("window-l959-r0-o1023", "window-linf-r959", "full")),
    ("train", 1152, 256, 2, 2, ("full",)),
)

# Cases whose values make one rounding stand out (`cases.distributions`). Caches are so long that kernels split them.
# In bf16 the cache is half as long, since interpreted TPU kernels take a second for some thousand keys.
# Where gradients are judged, heads share no keys: the sum of two rounded numbers of one sign is often a tie, and then
# errs more than docs/numerics.md, section 8, expects.
_TRAIN = Case(q_length=512, kv_length=512)
_DECODE = Case(phase="decode", q_length=1, kv_length=4096, num_q_heads=32, num_kv_heads=4)
_ROUNDINGS = (
    dataclasses.replace(_TRAIN, dtype="bf16", mask="causal", distribution="aligned"),
    dataclasses.replace(_TRAIN, dtype="bf16", mask="causal", distribution="opposed"),
    dataclasses.replace(_TRAIN, dtype="bf16", mask="causal", bias="biaskey", distribution="opposed"),
    dataclasses.replace(_TRAIN, dtype="f16", mask="causal", distribution="opposed"),
    dataclasses.replace(_TRAIN, dtype="f16", distribution="rising"),
    dataclasses.replace(_DECODE, dtype="bf16", kv_length=2048, distribution="opposed"),
    dataclasses.replace(_DECODE, dtype="bf16", kv_length=2048, distribution="rising"),
    dataclasses.replace(_DECODE, dtype="f16", distribution="aligned"),
)

# One case of each storage form, and three of pages. Sequences fill whole pages, and caches are so long that kernels
# split them.
_STORED_DECODE = dataclasses.replace(
    _DECODE, dtype="bf16", kv_length=2048, mask="causal-o2047", storage="paged16", distribution="opposed"
)
_STORED = (
    _STORED_DECODE,
    dataclasses.replace(_STORED_DECODE, distribution="rising"),
    dataclasses.replace(_STORED_DECODE, dtype="f16", distribution="aligned"),
    dataclasses.replace(_STORED_DECODE, storage="latent16", num_kv_heads=1, head_dim=80),
    dataclasses.replace(_STORED_DECODE, storage="ring1024", kv_length=1024, mask="causal-o1023"),
    dataclasses.replace(_TRAIN, dtype="bf16", mask="causal", storage="packed", distribution="opposed"),
    # Gradients of latents are not judged: docs/numerics.md, section 8, does not derive them.
    dataclasses.replace(_STORED_DECODE, storage="latent", num_kv_heads=1, head_dim=80),
)


def select_ensemble_cases(seed: int, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Select the supported cases of the check.

    These are the plain cases, three on other code paths in bf16, those whose values make one rounding stand out, and
    those with stored operands.
    """
    elsewhere = (
        next((case for case in variants if supports(case) is None), None)
        for variants in (
            [_build_case(phase, "bf16", seed, t, s, n, k, mask) for mask in masks]
            for phase, t, s, n, k, masks in _OTHER_PATHS
        )
    )
    revealing = (dataclasses.replace(case, seed=seed) for case in (*_ROUNDINGS, *_STORED))
    chosen = (case for case in revealing if supports(case) is None)
    return (*select_plain_cases(seed, supports), *(case for case in elsewhere if case is not None), *chosen)


def select_plain_cases(seed: int, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Select a case in bf16 and one in f16, with gradients if supported; depth 64 makes scaling q exact."""
    found = []
    for dtype in ("bf16", "f16"):
        cases = (_build_case(phase, dtype, seed, *sizes) for phase in ("train", "prefill") for sizes in _SIZES)
        found.append(next((case for case in cases if supports(case) is None), None))
    return tuple(case for case in found if case is not None)


def _build_case(phase: str, dtype: str, seed: int, t: int, s: int, n: int, k: int, mask: str) -> Case:
    """Build the case with these sizes."""
    return Case(phase=phase, dtype=dtype, q_length=t, kv_length=s, num_q_heads=n, num_kv_heads=k, mask=mask, seed=seed)
