"""Compare the pairs of values that other test suites cover with those of level `quick`.

A value is a feature that a case has, or a class of one of its sizes, such as `soft cap`, `depth 64` or `1 query`. A
feature that a case lacks is no value. The parameters of the other suites are in
`docs/measurements/data/case_matrices.toml`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cases import feature_model, mask_spec, size_model
from cases.case import Case
from cases.covering_model import Model
from cases.front_end_cases import select_front_end_cases
from cases.grid import build_grid
from cases.masks import Causal, Full, Lengths, Mask, OwnWindow, Window, list_conjuncts
from cases.operand_model import build_operand_model
from cases.operand_registry import WITH_OWN_CASES
from cases.storage_forms.form_cases import load_form_cases
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.paged_cases import BOTH_SCALE_MODELS, WRITE_MODELS

Pair = tuple[str, str]
_BLOCK = 128
_PAGED = ("paged", "latent pages")
_ROTARY = {"half", "interleaved", "partial", "decoupled", "sections"}
# The kinds of values, each with a pattern, in the order of tables.
_KINDS = (
    ("dtype", r"f32|f16|bf16"),
    ("heads", r"mha|gqa|mqa"),
    ("depth", r"(depth|value depth) .*"),
    ("queries", r"\d+ quer(y|ies)|queries: .*"),
    ("keys", r"\d+ keys?|keys: .*"),
    ("order of lengths", r"(as many|more) .*"),
    ("mask", r"full|causal|window.*|other mask"),
    ("storage", r"dense|key lengths|packed|paged|latent.*|pages of .*|new keys|left padding"),
    ("feature", r".*"),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The values and pairs of a suite, and those of its pairs that `quick` covers."""

    values: frozenset[str]
    pairs: frozenset[Pair]
    covered: frozenset[Pair]


def compare_suite(suite: Mapping[str, Any]) -> Comparison:
    """Compare a suite of `case_matrices.toml` with level `quick`."""
    rows = [values for test in suite["test"] for values in _iter_test_values(test)]
    pairs = _collect_pairs(rows)
    return Comparison(frozenset(itertools.chain.from_iterable(rows)), pairs, pairs & collect_quick_pairs())


def find_kind(value: str) -> str:
    """Return the kind of a value, such as `depth`."""
    return next(kind for kind, pattern in _KINDS if re.fullmatch(pattern, value))


def sort_values(values: Iterable[str]) -> list[str]:
    """Sort values by kind, and those of a kind by their first number and text."""
    kinds = [kind for kind, _ in _KINDS]

    def order(value: str) -> tuple[int, int, str]:
        number = re.search(r"\d[\d,]*", value)
        return kinds.index(find_kind(value)), int(number[0].replace(",", "")) if number else 0, value

    return sorted(values, key=order)


def find_reason(pair: Pair, reasons: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the first reason why `quick` lacks the pair, or None if none is given."""
    for n, reason in enumerate(reasons):
        for one, other in (pair, pair[::-1]):
            if one in reason["values"] and other in reason.get("beside", [other]):
                return n
    return None


@functools.cache
def list_quick_cases() -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """List the cases at level `quick` of all forms and front ends; separately, those in which a kernel writes pages."""
    models: list[Model] = [feature_model.MODEL, size_model.MODEL, *map(build_operand_model, WITH_OWN_CASES)]
    models += [model for form in FORMS if form != "paged" for model in load_form_cases(form).models]
    reading, writing = map(_list_cases, ((*models, *BOTH_SCALE_MODELS), WRITE_MODELS))
    return (*reading, *select_front_end_cases("quick", 0)), writing


def _list_cases(models: Iterable[Model]) -> tuple[Case, ...]:
    """List the cases of the grids of these models."""
    return tuple(dict.fromkeys(case for model in models for case in build_grid("quick", 0, model=model).cases))


@functools.cache
def collect_quick_pairs() -> frozenset[Pair]:
    """Collect the pairs of values of all cases at level `quick`."""
    reading, writing = list_quick_cases()
    rows = [values for case in reading for values in iter_case_values(case)]
    rows += [{*values, "new keys"} for case in writing for values in iter_case_values(case)]
    return _collect_pairs(rows)


def iter_case_values(case: Case) -> Iterator[set[str]]:
    """Yield the values of a case, once for each sequence."""
    spec = case.stored
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    has_lengths = any(isinstance(part, Lengths) for part in list_conjuncts(mask))
    storage = spec.form.replace("_", " ") if spec else "key lengths" if has_lengths else "dense"
    is_latent = storage.startswith("latent")
    heads = "mqa" if case.num_kv_heads == 1 < case.num_q_heads else "gqa"
    flags = {
        case.dtype: True,
        "mha" if case.num_q_heads == case.num_kv_heads else heads: True,
        name_depth(case.head_dim): not is_latent,
        classify_mask(mask): True,
        storage: True,
        name_page(spec.size if spec and spec.size else 1): storage in _PAGED,
        "alibi": case.alibi,
        "soft cap": case.soft_cap is not None,
        "sinks": case.sinks is not False,
        "scale": case.scale is not None,
        "score function": case.score is not None,
        "backward": case.phase == "train",
        "value depth differs": case.head_dim != case.v_head_dim and not is_latent,
        "a sequence without keys": 0 in case.kv_lengths,
        "rotary": not _ROTARY.isdisjoint(case.steps),
        "fp8 cache": "fp8" in (case.kv_cache or ""),
    }
    held = {name for name, has in flags.items() if has}
    lengths = set(zip(case.q_lengths, case.kv_lengths, strict=True)) if spec else {(case.q_length, case.kv_length)}
    for q, kv in sorted(lengths):
        yield held | set(name_lengths(q, kv))


def name_depth(depth: int) -> str:
    """Return the class of a depth: a depth that many kernels have, or what lies between two of these."""
    usual = (32, 64, 128, 256)
    if depth in usual:
        return f"depth {depth}"
    below, above = max((0, *(n for n in usual if n < depth))), min((n for n in usual if n > depth), default=None)
    if not below:
        return "depth 1 to 31"
    return f"depth {below + 1} to {above - 1}" if above else "depth 257 and more"


def name_page(size: int) -> str:
    """Return the class of a number of tokens in a page."""
    for least, name in ((128, "pages of 128 and more"), (64, "pages of 64 to 127"), (16, "pages of 16 to 63")):
        if size >= least:
            return name
    return "pages of 2 to 15" if size > 1 else "pages of 1"


def name_lengths(q: int, kv: int) -> tuple[str, ...]:
    """Return the classes of the numbers of queries and of keys, and which of them is larger."""
    order = "as many queries as keys" if q == kv else "more queries than keys" if q > kv else "more keys than queries"
    return _name_length(q, "query", "queries"), _name_length(kv, "key", "keys"), order


def _name_length(n: int, one: str, many: str) -> str:
    """Return the class of a length: its order of size, and whether blocks of 128 divide it."""
    if n < 2:
        return f"{n} {one if n else many}"
    if n < _BLOCK:
        return f"{many}: 2 to 127"
    size = "up to 1,023" if n < 1024 else "1,024 to 16,383" if n < 16_384 else "16,384 and more"
    return f"{many}: {size}, {'with a tail' if n % _BLOCK else 'whole blocks'}"


def classify_mask(mask: Mask) -> str:
    """Return the class of a mask; key lengths do not count."""
    found = "full"
    for part in list_conjuncts(mask):
        if isinstance(part, Full | Lengths):
            continue
        if isinstance(part, Causal) or (isinstance(part, OwnWindow) and part.left is None):
            found = "causal" if found == "full" else "window"
        elif isinstance(part, OwnWindow) or (isinstance(part, Window) and (part.right == 0 or found == "causal")):
            found = "window"
        elif isinstance(part, Window):
            found = "full" if part.left is part.right is None else "window with later keys"
        else:
            return "other mask"
    return found


def _iter_test_values(test: Mapping[str, Any]) -> Iterator[set[str]]:
    """Yield the values of each kind of case that a test of another suite has."""
    pairs = [(n, n) if isinstance(n, int) else tuple(n) for n in test.get("lengths", ())]
    pairs += [(kv, q) for q, kv in pairs] if test.get("swapped") else itertools.product(*_get(test, "queries", "keys"))
    held = test["storage"]
    pages = [[one, page] for one in _PAGED if one in held for page in map(name_page, test["page"])]
    stores = [*pages, *([one] for one in held if one not in _PAGED)]
    sizes: list[Sequence[Sequence[str]]] = [
        sorted({name_lengths(q, kv) for q, kv in pairs}),
        [[name] for name in dict.fromkeys(map(name_depth, test.get("depth", ())))] or [[]],
        stores,
        *([[name] for name in test[key]] for key in ("dtype", "heads", "mask")),
        *([[], [name]] for name in test.get("features", ())),
    ]
    for chosen in itertools.product(*sizes):
        values = {*itertools.chain.from_iterable(chosen), *test.get("always", ())}
        if not any(values.issuperset(pair) for pair in test.get("never", ())):
            yield values


def _get(test: Mapping[str, Any], *keys: str) -> list[Sequence[int]]:
    return [test.get(key, ()) for key in keys]


def _collect_pairs(rows: Iterable[set[str]]) -> frozenset[Pair]:
    """Collect all pairs of values that some row has, each in alphabetical order."""
    distinct = {frozenset(row) for row in rows}
    return frozenset(pair for row in distinct for pair in itertools.combinations(sorted(row), 2))
