"""Find the levels of a case from its id: the properties that a kernel's fault may depend on.

A level is a property of a case, such as having sinks, T unequal to S, or dtype bf16. Each level names the fields of the
case that decide the level, so that other cases with or without the level can be built. `root_causes` looks for the
levels that distinguish failing cases from passing ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cases.mask_spec import split_ends
from cases.operand_registry import OPTIONAL
from cases.storage_forms.form_registry import FORMS, read_storage
from reports.matrix_rows import FEATURE_KINDS

_SHAPE = re.compile(r"B(\d+)\.T(\d+)\.S(\d+)\.N(\d+)\.K(\d+)\.H(\d+)\.V(\d+)")
_SIZES = ("batch", "q_length", "kv_length", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim")
_TERM = re.compile(r"_and_|_or_")
_WINDOW = re.compile(r"(?:window-l(\d+|inf)-r(\d+|inf)|own-l(\d+|inf))")
_OFFSET = re.compile(r"-o(-?\d+)$")
# Mask terms that let no query attend to a later key: causal masks, and windows without a right side.
_CAUSAL_TERM = re.compile(r"causal|chunked|balanced|moba|tree|lightning-\d+-causal")
_ONE_SIDED_TERM = re.compile(r"own-|window-l(?:\d+|inf)-r0\b|varying")
_KEY_LENGTHS = re.compile(r"(?:lengths|own-l(?:\d+|inf)(?:-f\d+)?)((?:-\d+)+)$")

LENGTHS, HEADS, DEPTHS = ("q_length", "kv_length"), ("num_q_heads", "num_kv_heads"), ("head_dim", "v_head_dim")
FIELD_GROUPS: tuple[tuple[str, ...], ...] = (
    *((operand.field,) for operand in OPTIONAL),
    *(("distribution",), ("dtype",), ("mask",), ("batch",), HEADS, DEPTHS, LENGTHS),
)
"""The fields of a case that can be changed by themselves: one alone, or two that are changed together."""
# What scales of a quantised cache belong to, where it is no single thing.
_WHOLE_SCALES = {
    "tensor": "one scale for all keys and one for all values",
    "given": "one scale for all keys and one for all values, to write by,",
    "unit": "scales of 1",
    "computed": "computed scales",
}
_BLOCKS = (8, 16, 32, 64, 128)
_DEPTH_BLOCKS = (8, 16, 32, 64)
_LONG = (128, 256, 512, 1024)

# Prior penalties of levels, in nats: how much less likely a fault depends on the level than on a plain one. A fault is
# more likely to depend on the presence of a feature than on its absence, and on a kind of mask than on one number or on
# one distribution of values.
_PLAIN, _RARER, _RARE, _RAREST = 0.0, 1.0, 2.0, 3.0

_MASKS = {
    "causal": "under a causal mask",
    "window": "under a sliding window",
    "chunked": "under a chunked mask",
    "spans": "under bidirectional spans",
    "balanced": "in load-balanced order",
    "lengths": "with key lengths",
    "dense": "under a dense mask",
    "densehead": "under a dense mask for each head",
    "densebatch": "under a dense mask for each batch row",
    "indexer": "under an indexer's mask",
    "lightning": "of an indexer",
    "listed": "with lists of keys",
    "moba": "under a MoBA mask",
    "own": "under a window at each batch row's own position",
}
_ROW_MASKS = frozenset({"lengths", "own", "densebatch", "indexer", "listed"})
_FEATURES = frozenset(itertools.chain.from_iterable(FEATURE_KINDS.values()))
# For levels whose name is not the name of a feature: the features that an implementation declares unsupported to
# exclude the level.
_DECLARED_FEATURES: Mapping[str, tuple[str, ...]] = {
    "16 bits": ("bf16", "f16"),
    "cache": ("prefill", "decode"),
    "groups": ("gqa", "mqa"),
    "spans": ("bidirectional",),
    "densehead": ("dense_head",),
    "densebatch": ("dense_batch",),
    "listed": ("indices",),
    "own": ("own_window",),
    "mask offset": ("offset",),
    "T != S": ("unequal_lengths",),
    "V != H": ("v_head_dim",),
}


@dataclasses.dataclass(frozen=True, order=True)
class Level:
    """A property of a case that a fault may depend on."""

    odds: float  # the prior penalty, in nats: how much less likely a fault depends on this level than on a plain one
    name: str  # the name of the level, such as `sinks` or `T != S`
    words: str  # the phrase for the end of a sentence, such as "with sinks" or "when T is not S"
    fields: tuple[str, ...]  # the fields of `Case` that decide whether a case has the level
    # Pairs of a field and a value that give a plain case the level, with few similar levels.
    example: tuple[tuple[str, Any], ...] = ()
    # Pairs of a field and a value that remove the level from a plain case that has it.
    counter: tuple[tuple[str, Any], ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The features to declare unsupported so that no judged case has the level; empty if none do that."""
        return _DECLARED_FEATURES.get(self.name, (self.name,) if self.name in _FEATURES else ())


@functools.lru_cache(maxsize=1 << 15)
def parse_fields(case: str) -> Mapping[str, str] | None:
    """Parse a case id into the fields of `Case` that it names, each as the id writes it; None if it is no case id."""
    parts = case.split("/")
    if len(parts) < 6 or not (sizes := _SHAPE.fullmatch(parts[2])):
        return None
    phase, dtype, _, mask, *options, distribution, seed = parts
    found = {"phase": phase, "dtype": dtype, "mask": mask, "distribution": distribution, "seed": seed}
    found |= dict(zip(_SIZES, sizes.groups(), strict=True))
    for option in options:
        other = "front_end" if read_storage(option) is None else "storage"
        name = next((operand.field for operand in OPTIONAL if operand.read(option) is not None), other)
        found[name] = option
    return found


@functools.lru_cache(maxsize=1 << 15)
def find_levels(case: str) -> frozenset[Level]:
    """Find the levels of the case with this id; empty if `case` is no case id."""
    fields = parse_fields(case)
    if fields is None:
        return frozenset()
    sizes = {name: int(fields[name]) for name in _SIZES}
    return frozenset(
        [
            *_iter_kind_levels(fields),
            *_iter_mask_levels(fields["mask"]),
            *_iter_operand_levels(fields),
            *_iter_head_levels(sizes),
            *_iter_length_levels(sizes),
            *_iter_empty_levels(fields, sizes),
            *_iter_depth_levels(sizes),
        ]
    )


def _create_level(
    name: str,
    words: str,
    *fields: str,
    odds: float = _PLAIN,
    example: Mapping[str, Any] | None = None,
    counter: Mapping[str, Any] | None = None,
) -> Level:
    return Level(odds, name, words, fields, tuple((example or {}).items()), tuple((counter or {}).items()))


def _iter_kind_levels(fields: Mapping[str, str]) -> Iterator[Level]:
    dtype, phase, values = fields["dtype"], fields["phase"], fields["distribution"]
    yield _create_level(dtype, f"in {dtype}", "dtype", counter={"dtype": "bf16"} if dtype == "f32" else None)
    if dtype != "f32":
        yield _create_level("16 bits", "in bf16 and in f16", "dtype", odds=_RARER / 2)
    yield _create_level(phase, "in training" if phase == "train" else f"in {phase}", "phase", *LENGTHS)
    if phase != "train":
        yield _create_level("cache", "in prefill and in decode", "phase", *LENGTHS, odds=_RARER)
    if values != "normal":
        yield _create_level(f"{values} values", f"with the values of `{values}`", "distribution", odds=_RARE)
    if (storage := read_storage(fields.get("storage", ""))) is not None:
        form = FORMS[storage.form]
        yield _create_level(form.level, f"where {form.condition}", "storage", odds=_RARER)
        if storage.size is not None:
            sized = f"{form.unit} of {storage.size}"
            yield _create_level(sized, f"with {sized}", "storage", odds=_RARE)
        if storage.shared:
            yield _create_level("shared pages", "where sequences share pages", "storage")
        if storage.q_lengths:
            yield _create_level(
                "ragged queries", "where sequences have unequal numbers of queries", "storage", odds=_RARER
            )
    if (front_end := fields.get("front_end")) is not None:
        yield _create_level("front end", "after a front end", "front_end")
        for step in front_end.removeprefix("front-").split("-"):
            yield _create_level(f"front end {step}", f"after {step} in a front end", "front_end", odds=_RARER)


def _iter_mask_levels(spec: str) -> Iterator[Level]:
    if spec == "full":
        yield _create_level("full", "without a mask", "mask", odds=_RARER, counter={"mask": "causal"})
        yield from _iter_order_levels(spec)
        return
    yield _create_level("masked", "under any mask", "mask", odds=_RARER)
    spec, ends = split_ends(spec)
    terms = _TERM.split(spec)
    kinds = {term.partition("-")[0] for term in terms}
    for kind in kinds:
        yield _create_level(
            kind, _MASKS.get(kind, f"under a mask of kind {kind}"), "mask", example=_find_offset_mask(kind)
        )
    yield from _iter_order_levels(spec)
    if "causal" not in kinds:
        counter = {"mask": "causal"}
        yield _create_level("not causal", "under any mask but causal", "mask", odds=_RARE, counter=counter)
    if ends or _ROW_MASKS & kinds:
        yield _create_level("row mask", "under a mask that differs by batch row", "mask", odds=_RARER / 2)
    if len(terms) > 1:
        yield _create_level("joined masks", "under a combination of masks", "mask", odds=_RARER)
    if "-o" in spec:
        yield _create_level("mask offset", "under a mask with an offset", "mask", odds=_RARER)
    for term in terms:
        # A causal mask or window without an offset may reach the kernel as `causal` or `window`. With an offset, it may
        # reach the kernel only as an array.
        if is_named := "-o" not in term and term.startswith(("causal", "window")):
            kind = term.partition("-")[0]
            yield _create_level(f"{kind}, no offset", f"{_MASKS[kind]} without an offset", "mask", odds=_RARER)
        if (sides := _WINDOW.match(term)) and "inf" not in (sides[1] or sides[3]):
            words, example = "under a window with a left side", _find_offset_mask("window")
            yield _create_level("left side", words, "mask", odds=_RARER / 2, example=example)
            if is_named:
                yield _create_level("left side, no offset", f"{words}, without an offset", "mask", odds=_RARER)
        if sides and sides[2] not in (None, "0", "inf"):
            yield _create_level("right side", "under a window that reaches to the right", "mask", odds=_RARER / 2)


def _iter_order_levels(spec: str) -> Iterator[Level]:
    """Yield the levels that say whether the mask lets a query attend to keys that come after it.

    A window without a right side is causal too. It has neither level, since a fault of windows depends on their sides.
    """
    terms = [] if "_or_" in spec else _TERM.split(spec)
    if any(_CAUSAL_TERM.match(term) for term in terms):
        words = "under a mask that is causal, whole or in chunks"
        yield _create_level("causal of any kind", words, "mask", odds=_RARER, example={"mask": "causal"})
    elif not any(_ONE_SIDED_TERM.match(term) for term in terms):
        words = "where queries may attend to later keys"
        yield _create_level("later keys", words, "mask", odds=_RARE, counter={"mask": "causal"})


def _find_offset_mask(kind: str) -> dict[str, str] | None:
    """Return a mask spec of this kind with an offset, or None if the kind takes no offset.

    Such an example has the level of the kind, but not the level of the kind without an offset.
    """
    masks = {"causal": "causal-o5", "window": "window-l31-r0-o5"}
    return {"mask": masks[kind]} if kind in masks else None


def _iter_operand_levels(fields: Mapping[str, str]) -> Iterator[Level]:
    for operand in OPTIONAL:
        words = operand.words
        part = fields.get(operand.field)
        if part is None:
            counter = {operand.field: operand.levels[0]}
            yield _create_level(f"no {operand.name}", f"without {words}", operand.field, odds=_RAREST, counter=counter)
            continue
        yield _create_level(operand.name, f"with {words}", operand.field)
        if not operand.is_flag:
            yield _create_level(part, f"with {words} of the kind {part}", operand.field, odds=_RARER)
        for trait in operand.traits.get(part, ()):
            yield _create_level(trait, f"with {trait}", operand.field, odds=_RARER / 2)
    if (cache := fields.get("kv_cache")) is not None:
        kind, _, by = cache.removeprefix("kv").partition("-")
        yield _create_level(f"kv {kind}", f"with a cache in {kind}", "kv_cache")
        of_each = _WHOLE_SCALES.get(by, f"a scale for each {by}")
        yield _create_level(f"kv {by}", f"with {of_each} of the cache", "kv_cache")


def _iter_head_levels(sizes: Mapping[str, int]) -> Iterator[Level]:
    batch, heads, kv_heads = sizes["batch"], sizes["num_q_heads"], sizes["num_kv_heads"]
    if heads == kv_heads:
        counter = {"num_q_heads": 4, "num_kv_heads": 2}
        yield _create_level("mha", "where no heads share keys", *HEADS, odds=_RARER, counter=counter)
    else:
        yield _create_level("groups", "with groups of heads (N > K)", *HEADS)
        several = kv_heads > 1
        words = "with several groups of heads (N > K > 1)" if several else "with one key/value head for all (K = 1 < N)"
        yield _create_level("gqa" if several else "mqa", words, *HEADS, odds=_RARER / 2)
        yield _create_level(
            f"group of {heads // kv_heads}", f"with groups of {heads // kv_heads} heads", *HEADS, odds=_RARE
        )
    if heads & (heads - 1):
        yield _create_level("odd N", "when N is no power of two", *HEADS, odds=_RARER)
    if kv_heads > 1:
        yield _create_level("K > 1", "with several key/value heads", *HEADS, odds=_RARER)
    one = batch == 1
    words = "with one batch row" if one else "with several batch rows"
    yield _create_level(
        "B = 1" if one else "B > 1", words, "batch", odds=float(one), counter={"batch": 2} if one else None
    )


def _iter_length_levels(sizes: Mapping[str, int]) -> Iterator[Level]:
    q, kv = sizes["q_length"], sizes["kv_length"]
    if q == kv:
        yield _create_level("T = S", "when T is S", *LENGTHS, odds=_RARER, counter={"kv_length": 200})
    else:
        yield _create_level("T != S", "when T is not S", *LENGTHS)
        order = "<" if q < kv else ">"
        yield _create_level(f"T {order} S", f"when T {order} S", *LENGTHS, odds=_RARER / 2)
    yield _create_level(
        "T = 1" if q == 1 else "T > 1", "for one query" if q == 1 else "for several queries", *LENGTHS, odds=1
    )
    for name, what, size, field in (("S", "keys", kv, "kv_length"), ("T", "queries", q, "q_length")):
        for block in _BLOCKS:
            if size % block:
                words, example = f"when {name} is no multiple of {block}", {field: max(_BLOCKS) + block // 2}
                yield _create_level(f"{name} % {block}", words, *LENGTHS, odds=_RARER / 2, example=example)
            else:
                words, counter = f"when {name} is a multiple of {block}", {field: max(_BLOCKS) + block // 2}
                yield _create_level(f"{name} / {block}", words, *LENGTHS, odds=_RARE, counter=counter)
        for length in _LONG:
            if size > length:
                yield _create_level(f"{name} > {length}", f"with more than {length} {what}", *LENGTHS, odds=_RARER)
            else:
                yield _create_level(f"{name} <= {length}", f"with at most {length} {what}", *LENGTHS, odds=_RARE)


def _iter_empty_levels(fields: Mapping[str, str], sizes: Mapping[str, int]) -> Iterator[Level]:
    """Yield the levels of cases whose sequences differ in length or are empty, or where a query may attend to no key.

    Queries without keys are found where a window, a causal mask or a key length hides all keys. Segments and random
    masks are not evaluated.
    """
    q, kv, spec = sizes["q_length"], sizes["kv_length"], fields["mask"]
    spec, ends = split_ends(spec)
    terms = [*_TERM.split(spec), *([f"lengths{ends}"] if ends else [])]
    storage = read_storage(fields.get("storage", ""))
    kv_lengths = [found[1].split("-")[1:] for term in terms if (found := _KEY_LENGTHS.match(term)) is not None]
    q_lengths = () if storage is None else storage.q_lengths
    if any(len(set(lengths)) > 1 for lengths in (*kv_lengths, q_lengths)):
        words = "where batch rows differ in length"
        yield _create_level("unequal rows", words, "storage", "mask", "batch", *LENGTHS, odds=_RARER)
    if 0 in q_lengths:
        words = "where a sequence has no queries"
        yield _create_level("no queries", words, "storage", "batch", *LENGTHS, odds=_RARER / 2)
    pairs = (zip(q_lengths, map(int, lengths), strict=False) for lengths in kv_lengths)
    if any(0 < keys < queries for rows in pairs for queries, keys in rows):
        words = "where a sequence has fewer keys than queries"
        yield _create_level("fewer keys", words, "storage", "mask", "batch", *LENGTHS, odds=_RARER / 2)
    has_no_keys = any("0" in lengths for lengths in kv_lengths)
    if has_no_keys or (storage is not None and 0 in storage.q_lengths):
        yield _create_level(
            "empty sequence", "where a sequence has no queries or no keys", "storage", "mask", "batch", *LENGTHS
        )
    if "_or_" in spec or storage is not None:
        return
    for term in terms:
        offset = int(found[1]) if (found := _OFFSET.search(term)) else 0
        sides = _WINDOW.match(term) if term.startswith("window") else None
        left = int(sides[1]) if sides and sides[1] != "inf" else math.inf
        right = int(sides[2]) if sides and sides[2] != "inf" else 0 if term.startswith("causal") else math.inf
        if offset + right < 0 or q - 1 + offset - left >= kv:
            example = {"mask": "window-l31-r0", "q_length": 200, "kv_length": 128}
            words = "where a query may attend to no key"
            yield _create_level("empty rows", words, "mask", *LENGTHS, odds=_RARER / 2, example=example)
            return


def _iter_depth_levels(sizes: Mapping[str, int]) -> Iterator[Level]:
    depth, v_depth = sizes["head_dim"], sizes["v_head_dim"]
    if depth != v_depth:
        yield _create_level("V != H", "when V is not H", *DEPTHS)
    else:
        counter = {"v_head_dim": max(1, depth // 2)}
        yield _create_level("V = H", "when V is H", *DEPTHS, odds=_RARER / 2, counter=counter)
    for name, size, field in (("H", depth, "head_dim"), ("V", v_depth, "v_head_dim")):
        yield _create_level(f"{name} = {size}", f"at depth {name} = {size}", *DEPTHS, odds=_RARER)
        if size & (size - 1):
            yield _create_level(f"odd {name}", f"when {name} is no power of two", *DEPTHS, odds=_RARER / 2)
        for block in _DEPTH_BLOCKS:
            if size % block:
                words, example = f"when {name} is no multiple of {block}", {field: max(_DEPTH_BLOCKS) + block // 2}
                yield _create_level(f"{name} % {block}", words, *DEPTHS, odds=_RARER / 2, example=example)
        for block in (32, 64):
            more = size > block
            words = f"when {name} > {block}" if more else f"when {name} <= {block}"
            yield _create_level(words.removeprefix("when "), words, *DEPTHS, odds=_RARER if more else _RARE)


@functools.lru_cache(maxsize=1 << 15)
def find_oddities(case: str) -> frozenset[str]:
    """Find the fields in which a case differs from a plain one, such as another dtype, a mask or T unequal to S.

    If `case` is no case id, returns the names of all size fields, so that the case does not count as a plain one.
    """
    fields = parse_fields(case)
    if fields is None:
        return frozenset(_SIZES)
    plain = {"phase": "train", "dtype": "f32", "mask": "full", "distribution": "normal"}
    odd = {name for name, value in plain.items() if fields[name] != value}
    odd |= {first for first, second in (HEADS, LENGTHS, DEPTHS) if fields[first] != fields[second]}
    return frozenset(odd | (fields.keys() - plain.keys() - {*_SIZES, "seed"}))


@functools.lru_cache(maxsize=1 << 15)
def rank_plainness(case: str) -> tuple[int, int, str]:
    """Return a sort key that puts cases with the fewest unusual fields (`find_oddities`) first, then the smallest."""
    fields = parse_fields(case)
    if fields is None:
        return len(_SIZES), 0, case
    sizes = {name: int(fields[name]) for name in _SIZES}
    joined = len(_TERM.findall(fields["mask"])) + ("-o" in fields["mask"])
    lengths, depths = sizes["q_length"] + sizes["kv_length"], sizes["head_dim"] + sizes["v_head_dim"]
    return len(find_oddities(case)) + joined, sizes["batch"] * sizes["num_q_heads"] * lengths * depths, case
