"""Plain functions that take their operands packed or in pages, recognised by the names of their parameters.

    def attention(q, k_pages, v_pages, *, kv_lens, page_indices, cu_q_lens, num_seqs, window=None): ...
    def attention(q, k, v, *, cu_q_lens, cu_kv_lens, num_seqs, causal=False, window=None): ...
    def attention(q, latent_pages, *, value_dim, scale, kv_lens, page_indices, cu_q_lens, num_seqs, window=None): ...
    def attention(q, latent, *, value_dim, scale, causal=False, window=None, mask=None, segment_ids=None): ...

    def attention(q, k, v, k_pages, v_pages, *, kv_lens, page_indices, cu_q_lens, num_seqs, window=None): ...

One with a latent in place of keys and values is recognised by that name, another one with `page_indices` is paged, and
another one with `cu_q_lens` is packed (docs/contract.md, section 8). `num_seqs` may be left out: then entries past the
last sequence are those of sequences without queries and keys. A paged one with all of `k`, `v`, `k_pages` and `v_pages`
writes pages, and gets these by their names, in whatever order they stand. One with `k_scales` and `v_scales`, or with
`k_scale` and `v_scale`, takes pages with such scales, and no others unless both may be left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from cases import mask_spec
from cases.case import SCALED_FEATURES, WHOLE_FEATURES, Case
from cases.masks import Mask
from cases.operand_registry import REMOVABLE
from cases.quantization import WHOLE_CACHES
from cases.storage_forms.page_writes import PAGE_ARRAYS
from cases.storage_forms.storage_layout import SCALES, TABLES, WHOLE_SCALES
from cases.storage_forms.storage_spec import IN_PAGES, LATENT, Kind, Sides, find_sides
from cases.storage_forms.stored_case_rules import lower_sides

_OPERANDS = tuple(operand.name for operand in REMOVABLE if operand.stored)
_OF_LATENT = ("value_dim", *(operand.name for operand in REMOVABLE if not operand.opt_in))
OPTIONS: Mapping[Kind, tuple[str, ...]] = {
    "packed": (*TABLES["packed"], "causal", "window", *_OPERANDS, "save_residuals"),
    "paged": (*TABLES["paged"], *SCALES, *WHOLE_SCALES, "causal", "window", *_OPERANDS, "save_residuals"),
    "latent_pages": (*TABLES["latent_pages"], "value_dim", "causal", "window", *_OPERANDS, "save_residuals"),
    "latent": ("causal", "window", "mask", *_OF_LATENT, "save_residuals"),
}
"""What a function may have beside its operands, by kind."""
OPERANDS: Mapping[Kind | None, tuple[str, ...]] = {"latent": ("q", "latent"), "latent_pages": ("q", "latent_pages")}
"""The first arguments of a function, by kind, where they are not `q, k, v`."""
_NEEDED: Mapping[Kind, tuple[str, ...]] = {
    "paged": ("page_indices", "kv_lens", "cu_q_lens"),
    "packed": ("cu_q_lens", "cu_kv_lens"),
    "latent_pages": ("page_indices", "kv_lens", "cu_q_lens", "value_dim", "scale"),
    "latent": ("value_dim", "scale"),
}
_ABOUT = {
    "page_indices": "the table of pages, [max_seqs, pages_per_seq]",
    "kv_lens": "how many keys each sequence has, [max_seqs]",
    "cu_q_lens": "where the queries of each sequence begin, [max_seqs + 1]",
    "cu_kv_lens": "where the keys of each sequence begin, [max_seqs + 1]",
    "k_scales": "the scales of k_pages, [pages, page_size, K]",
    "v_scales": "the scales of v_pages, [pages, page_size, K]",
    "k_scale": "the scale of all k_pages, a number",
    "v_scale": "the scale of all v_pages, a number",
    "value_dim": "how many of a latent's coordinates, the first ones, are the values",
    "scale": "the factor of logits, which goes by the depth of the expanded heads",
}
_CALLED: Mapping[Kind, str] = {
    "paged": "pages",
    "packed": "packed sequences",
    "latent_pages": "latents in pages",
    "latent": "latents",
}


_WRITTEN = ("k", "v", *PAGE_ARRAYS)
_PAIRS: tuple[tuple[tuple[str, str], frozenset[str]], ...] = (
    (SCALES, SCALED_FEATURES),
    (WHOLE_SCALES, WHOLE_FEATURES),
)
"""The parameters for scales of pages, and the features of such pages."""


def is_page_writer(signature: inspect.Signature) -> bool:
    """Whether a paged function with this signature writes pages: beside these it has the tokens to be written."""
    names = list(signature.parameters)
    return set(_WRITTEN) <= set(names) and set(names[1:3]) < set(_WRITTEN)


def list_writer_options(signature: inspect.Signature) -> tuple[str, ...]:
    """What a function that writes pages may have beside its first three arguments; none is asked for scales."""
    read = (name for name in OPTIONS["paged"] if name not in (*SCALES, *WHOLE_SCALES))
    return (*read, *(name for name in _WRITTEN if name not in list(signature.parameters)[:3]))


def call_page_writer(
    function: Callable[..., Any], signature: inspect.Signature, operands: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """What a function that writes pages returns for q, k, v, k_pages and v_pages, in this order, and for options."""
    by_name = dict(zip(_WRITTEN, operands[1:], strict=True))
    first = [by_name.pop(name) for name in list(signature.parameters)[1:3]]
    return function(operands[0], *first, **by_name, **options)


def find_form(parameters: Sequence[str]) -> Kind | None:
    """How a function with these parameters, in their order, takes its operands; none if dense."""
    for kind in LATENT:
        if parameters[1:2] == [OPERANDS[kind][1]]:
            return kind
    parameters = parameters[3:]
    if "page_indices" in parameters:
        return "paged"
    tables = {name for names in TABLES.values() for name in names}
    return "packed" if tables.intersection(parameters) else None


def describe_missing_parameters(parameters: Collection[str], kind: Kind) -> str:
    """What a function with these parameters lacks to be one of its kind, in words; empty if it lacks nothing."""
    begun = (pair for pair, _ in _PAIRS if kind == "paged" and set(pair) & set(parameters))
    scales = [name for pair in begun for name in pair]
    missing = [f"{name!r} ({_ABOUT[name]})" for name in (*_NEEDED[kind], *scales) if name not in parameters]
    if not missing:
        return ""
    told = OPERANDS[kind][1:] if kind in LATENT else (*TABLES["paged"], "cu_kv_lens", *SCALES, *WHOLE_SCALES)
    has = [name for name in told if name in parameters]
    called = _CALLED[kind]
    return (
        f"takes {' and '.join(map(repr, has))} as for {called}, and lacks {' and '.join(missing)}: "
        f"wrap it, with {called} as docs/contract.md, section 8, has them"
    )


def find_scale_features(parameters: Collection[str], kind: Kind | None) -> frozenset[str]:
    """What a function with these parameters offers of pages with scales."""
    taken = (features for pair, features in _PAIRS if kind == "paged" and set(pair) <= set(parameters))
    return frozenset[str]().union(*taken)


def find_required_scales(signature: inspect.Signature, kind: Kind | None) -> tuple[str, ...]:
    """The scales without which a function with this signature takes no pages."""
    own = [signature.parameters[name] for pair, _ in _PAIRS for name in pair if name in signature.parameters]
    return tuple(p.name for p in own if kind == "paged" and p.default is p.empty)


def find_unsupported(
    case: Case, parameters: Collection[str], kind: Kind, *, needed: tuple[str, ...] = ()
) -> str | None:
    """Why a function with these parameters cannot be asked for `case`, or None if it can.

    It must have a way to be told the mask. It takes no pages without the `needed` scales.
    """
    given = () if case.kv_cache is None else WHOLE_SCALES if case.kv_cache in WHOLE_CACHES else SCALES
    if missing := [name for name in needed if name not in given]:
        return f"{missing[0]}: the function needs {' and '.join(missing)}, and these pages have none"
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    seen = find_sides(mask, case.q_length, case.kv_length)
    if seen is None or seen == Sides() or "window" in parameters:
        return None
    if seen == Sides(None, 0):
        return None if kind in IN_PAGES or "causal" in parameters else "causal: the function has no parameter 'causal'"
    return "window: the function has no parameter 'window'"


def build_lowering(
    parameters: Collection[str], kind: Kind
) -> Callable[[Mask, int, int, int, int], tuple[Mapping[str, Hashable], Mapping[str, Any]]]:
    """How a mask reaches a function with these parameters: `causal=True` if it has that, else a window."""

    def lower(
        mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
    ) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
        static, arrays = lower_sides(mask, batch, num_q_heads, q_length, kv_length, kind=kind)
        if kind in IN_PAGES and "causal" in parameters:
            return {**static, "causal": True}, arrays
        if "causal" in static and "causal" not in parameters:
            return {"window": (None, 0)}, arrays
        return static, arrays

    return lower
