"""Parse mask specs, the names of masks in case ids, and build the masks.

    full   causal   causal-o64   window-l31-r0   window-linf-r8-o2   chunked-32   spans-8-24-40-56   balanced-2
    lengths-0-100   dense-d40   densehead-d40   densebatch-d40   indexer-d40   moba-64-3   moba-64-3-o128
    own-l31-0-100   chunked-32_at-40-100   tree-4-2_at-40-100   listed-k16   lightning-16   lightning-16-causal

`-oN` is the offset. `-dP` is the percentage of allowed pairs in a random mask. `moba-C-K` has chunks of `C` keys, of
which a query sees `K`. `own-lL-A-B` has `A` keys in the first batch row and `B` in the second. The queries of a row
are its last tokens, and each sees a window of `L` keys before its own. In `own-lL-fF-A-B` it also sees the first `F`
keys. `listed-kN` has a list of `N` entries for each query; `listed-kN_or_window-lL-r0` also has a window beside it.
`lightning-K` has the `K` keys that an indexer chooses.
Specs combine with `_and_` and `_or_` (`_and_` binds tighter): `causal_or_spans-8-24`. `_at-A-B` at the end places all
of a mask in sequences of `A` and `B` keys, whose last tokens are the queries, as `own` does. `tree-A-B` has a tree of
`A` drafted tokens at the end of the first sequence. Each kind of mask has a class in `cases.masks` and an entry in
`KINDS`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from cases import counter_rng
from cases.lightning_mask import Lightning
from cases.masks import (
    FIRST_TOKENS,
    LOCAL_WINDOW,
    Bidirectional,
    Causal,
    Chunked,
    Dense,
    Full,
    Indexer,
    Lengths,
    Listed,
    LoadBalancedCausal,
    Mask,
    OwnWindow,
    Placed,
    Tree,
    VaryingWindow,
    Window,
    place,
)
from cases.moba_mask import Moba


class Sizes(NamedTuple):
    """The inputs of every mask: the spec (for error messages), the sizes of the case, seed and ends of sequences."""

    spec: str
    batch: int
    num_q_heads: int
    q_length: int
    kv_length: int
    seed: int
    ends: tuple[int, ...] | None = None  # the number of keys of each sequence; None without `_at-`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of mask, with its syntax in case ids. A term is one mask of a spec, such as `causal-o64`."""

    name: str  # the word that terms of this kind start with
    form: str  # the syntax of a term, as messages show it
    # Regular expression of a term, with a group for each argument. A missing argument is an empty string.
    pattern: re.Pattern[str]
    type: type[Mask]  # the class of the mask
    says: str  # the description of the feature that an implementation needs for this kind
    # `(sizes, *arguments) -> mask`. It raises `ValueError` if the arguments do not fit the sizes.
    build: Callable[..., Mask]
    # A term that fits one batch row if T = S >= 72 (`cases.case_space.alternatives`). It is also the kind's level in
    # the covering array if `cases.feature_model` has no other. It is empty for masks over stored sequences only.
    example: str
    feature: str = ""  # name of that feature, if it differs from the feature of the class
    also: tuple[str, ...] = ()  # names of other features that an implementation needs for this kind
    # `none` if a term has no offset. Otherwise its last argument is an offset (`-oN`): `any` number, or only one that
    # leaves every query at the position of a key (`within`).
    offset: Literal["none", "any", "within"] = "none"
    # For each numeric argument, by the text in front of it, a function of T and S that returns the least and the
    # largest number that fits. Only kinds have it whose arguments, apart from the offset, may be drawn independently
    # (`cases.case_space.case_strategies`).
    numbers: Mapping[str, Callable[[int, int], tuple[int, int]]] = dataclasses.field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that an implementation needs for this kind, its own feature last."""
        return (*self.also, self.feature or self.type.feature)


def _build_dense_head(sizes: Sizes, percent: str) -> Mask:
    """Build a random mask for each head."""
    array = _draw_random_mask(sizes.seed, (1, sizes.num_q_heads, sizes.q_length, sizes.kv_length), int(percent))
    return Dense(array if sizes.num_q_heads == 1 else _make_every_second_causal(array, axis=1))


def _build_dense_batch(sizes: Sizes, percent: str) -> Mask:
    """Build a random mask for each batch row."""
    array = _draw_random_mask(sizes.seed, (sizes.batch, 1, sizes.q_length, sizes.kv_length), int(percent))
    return Dense(array if sizes.batch == 1 else _make_every_second_causal(array, axis=0))


def _make_every_second_causal(array: np.ndarray, axis: int) -> np.ndarray:
    """Make every second head or batch row causal too, so that some blocks are empty in these and not in the others."""
    q_length, kv_length = array.shape[2:]
    every_second = np.moveaxis(array, axis, 0)[::2]
    every_second &= np.tri(q_length, kv_length, max(0, kv_length - q_length), dtype=bool)
    return array


def _build_own_window(sizes: Sizes, left: str, first: str, text: str) -> Mask:
    """Build a window whose last position is the end of each batch row's sequence."""
    lengths = _parse_one_per_row(sizes, text)
    positions = tuple(n - sizes.q_length for n in lengths)
    return OwnWindow(_parse_side(left), positions, _parse_integer(first)) & Lengths(lengths)


def _build_tree(sizes: Sizes, text: str) -> Mask:
    """Build a random tree of the last tokens of each sequence: a token follows one of the three tokens before it."""
    drafted = _parse_integers(text)
    if sizes.ends is None or len(drafted) != sizes.batch or max(drafted) > sizes.q_length:
        raise ValueError(
            f"{sizes.spec!r} needs a number of drafted tokens <= T={sizes.q_length} for each of {sizes.batch} batch "
            "rows, and the numbers of keys: tree-A-B_at-C-D"
        )
    steps = 1 + counter_rng.draw_integers(sizes.seed, "tree", (sizes.batch, sizes.q_length), 3)
    i, j = np.arange(sizes.q_length)[:, None], np.arange(sizes.kv_length)
    allowed = np.empty((sizes.batch, 1, sizes.q_length, sizes.kv_length), bool)
    for b, (count, end) in enumerate(zip(drafted, sizes.ends, strict=True)):
        position = end - sizes.q_length + i
        allowed[b, 0] = (j <= position) & ((j < end - count) | (position < end - count))
        for t in range(count):  # the last `count` rows and the last `count` keys are the tree
            row, key = sizes.q_length - count + t, end - count + t
            parent = t - steps[b, t]
            if key < 0:
                continue
            if parent >= 0:
                allowed[b, 0, row] = allowed[b, 0, row - steps[b, t]]
            allowed[b, 0, row, key] = True
    return Tree(allowed)


def _build_varying(sizes: Sizes, left: str) -> Mask:
    """Build a window whose left side differs by sequence and head."""
    if sizes.ends is None:
        raise ValueError(f"{sizes.spec!r} needs the numbers of keys: varying-lL_at-A-B")
    return VaryingWindow(int(left), tuple(n - sizes.q_length for n in sizes.ends), sizes.num_q_heads)


def _parse_one_per_row(sizes: Sizes, text: str) -> tuple[int, ...]:
    """Parse one length for each batch row. Raises `ValueError` for too few, too many or too large ones."""
    lengths = _parse_integers(text)
    if len(lengths) != sizes.batch or max(lengths) > sizes.kv_length:
        raise ValueError(f"{sizes.spec!r} needs one length <= S={sizes.kv_length} for each of {sizes.batch} batch rows")
    return lengths


def _build_listed(sizes: Sizes, text: str) -> Listed:
    """Build lists of `int(text)` entries for each query."""
    count = int(text)
    if count < 1:
        raise ValueError(f"a list must have at least 1 entry, got {count}")
    return Listed(_draw_lists(sizes, count))


def _build_moba(sizes: Sizes, *arguments: str) -> Moba:
    """Build a MoBA mask, in which queries choose chunks of keys."""
    mask = Moba(*map(_parse_integer, arguments))
    mask.check_lengths(sizes.q_length, sizes.kv_length)
    return mask


def _build_spans(_: Sizes, text: str) -> Mask:
    """Build bidirectional spans from their edges."""
    edges = _parse_integers(text)
    return Bidirectional(tuple(zip(edges[::2], edges[1::2], strict=True)))


_OFFSET = r"(?:-o(-?\d+))?"
_PERCENT = {"d": lambda q, kv: (10, 90)}
KINDS: tuple[Kind, ...] = (
    Kind(
        name="full",
        form="full",
        pattern=re.compile(r"full"),
        type=Full,
        says="no mask",
        build=lambda sizes: Full(),
        example="full",
    ),
    Kind(
        name="causal",
        form="causal[-oN]",
        pattern=re.compile(rf"causal{_OFFSET}"),
        type=Causal,
        says="causal mask",
        build=lambda sizes, offset: Causal(_parse_integer(offset)),
        example="causal",
        offset="any",
    ),
    Kind(
        name="window",
        form="window-lL-rR[-oN]",
        pattern=re.compile(rf"window-l(\d+|inf)-r(\d+|inf){_OFFSET}"),
        type=Window,
        says="sliding window",
        build=lambda sizes, left, right, offset: Window(_parse_side(left), _parse_side(right), _parse_integer(offset)),
        example="window-l31-r7",
        offset="any",
    ),
    Kind(
        name="chunked",
        form="chunked-C[-oN]",
        pattern=re.compile(rf"chunked-(\d+){_OFFSET}"),
        type=Chunked,
        says="chunked causal mask",
        build=lambda sizes, size, offset: Chunked(int(size), _parse_integer(offset)),
        example="chunked-32",
        offset="any",
        numbers={"": lambda q, kv: (1, kv + 8)},
    ),
    Kind(
        name="spans",
        form="spans-A-B...",
        pattern=re.compile(r"spans((?:-\d+-\d+)+)"),
        type=Bidirectional,
        says="bidirectional spans",
        build=_build_spans,
        example="spans-8-24-40-56",
    ),
    Kind(
        name="balanced",
        form="balanced-CP",
        pattern=re.compile(r"balanced-(\d+)"),
        type=LoadBalancedCausal,
        says="load-balanced causal order",
        build=lambda sizes, cp_size: LoadBalancedCausal(int(cp_size), sizes.q_length),
        example="balanced-2",
    ),
    Kind(
        name="lengths",
        form="lengths-L...",
        pattern=re.compile(r"lengths((?:-\d+)+)"),
        type=Lengths,
        says="a key length for each batch row",
        build=lambda sizes, text: Lengths(_parse_one_per_row(sizes, text)),
        example="lengths-50",
    ),
    Kind(
        name="dense",
        form="dense-dP",
        pattern=re.compile(r"dense-d(\d+)"),
        type=Dense,
        says="any boolean mask, the same for every head and batch row",
        build=lambda sizes, text: Dense(
            _draw_random_mask(sizes.seed, (1, 1, sizes.q_length, sizes.kv_length), int(text))
        ),
        example="dense-d40",
        numbers=_PERCENT,
    ),
    Kind(
        name="densehead",
        form="densehead-dP",
        pattern=re.compile(r"densehead-d(\d+)"),
        type=Dense,
        feature="dense_head",
        says="a boolean mask for each head",
        build=_build_dense_head,
        example="densehead-d40",
        numbers=_PERCENT,
    ),
    Kind(
        name="densebatch",
        form="densebatch-dP",
        pattern=re.compile(r"densebatch-d(\d+)"),
        type=Dense,
        feature="dense_batch",
        says="a boolean mask for each batch row",
        build=_build_dense_batch,
        example="densebatch-d40",
        numbers=_PERCENT,
    ),
    Kind(
        name="indexer",
        form="indexer-dP",
        pattern=re.compile(r"indexer-d(\d+)"),
        type=Indexer,
        says="a selection of keys for each query, known at run time only",
        build=lambda sizes, text: Indexer(_build_dense_batch(sizes, text).dense(sizes.q_length, sizes.kv_length)),
        example="indexer-d40",
        numbers=_PERCENT,
    ),
    Kind(
        name="moba",
        form="moba-C-K[-oN]",
        pattern=re.compile(r"moba-(\d+)-(\d+)(?:-o(\d+))?"),
        type=Moba,
        says="mixture of block attention: chunks of keys chosen by q and k",
        build=_build_moba,
        example="moba-24-3",
        offset="within",
    ),
    Kind(
        name="listed",
        form="listed-kN",
        pattern=re.compile(r"listed-k(\d+)"),
        type=Listed,
        says="lists of keys for each query, known at run time only",
        build=_build_listed,
        example="listed-k16",
        numbers={"k": lambda q, kv: (1, kv + 8)},
    ),
    Kind(
        name="lightning",
        form="lightning-K[-causal]",
        pattern=re.compile(r"lightning-(\d+)(-causal)?"),
        type=Lightning,
        says="keys that a lightning indexer chooses",
        build=lambda sizes, topk, causal: Lightning(int(topk), bool(causal)),
        example="lightning-16",
        numbers={"": lambda q, kv: (1, kv + 8)},
    ),
    Kind(
        name="own",
        form="own-lL[-fF]-A...",
        pattern=re.compile(r"own-l(\d+|inf)(?:-f([1-9]\d*))?((?:-\d+)+)"),
        type=OwnWindow,
        also=("lengths",),
        says="a sliding window that ends with each sequence of a cache",
        build=_build_own_window,
        example="own-l31-50",
    ),
    Kind(
        name="tree",
        form="tree-N..._at-L...",
        pattern=re.compile(r"tree((?:-\d+)+)"),
        type=Tree,
        says="a tree of drafted tokens at the end of each sequence",
        build=_build_tree,
        example="",
    ),
    Kind(
        name="varying",
        form="varying-lL_at-L...",
        pattern=re.compile(r"varying-l(\d+)"),
        type=VaryingWindow,
        says="any mask over stored sequences, beside causal masks and windows",
        build=_build_varying,
        example="",
    ),
)
_BY_NAME = {kind.name: kind for kind in KINDS}

FEATURES = {kind.features[-1]: kind.says for kind in KINDS} | {
    FIRST_TOKENS: "a sliding window that ends with each sequence, and the sequence's first tokens",
    LOCAL_WINDOW: "keys that a query sees beside those of its list, such as a window",
    "offset": "mask offset (absolute query positions)",
}
"""Features of masks, by name, with their descriptions."""
OPT_IN = frozenset(
    (FIRST_TOKENS, LOCAL_WINDOW, *(kind.features[-1] for kind in KINDS if kind.type.refusal), Placed.feature)
)
"""Features of masks that an implementation supports only if it declares them."""


def parse_mask_spec(spec: str) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]:
    """Parse a spec into terms `((kind, arguments), ...)`, joined by `and` inside and by `or` outside.

    Raises:
      ValueError: if a term is not a mask; the message names the term.
    """
    terms, _ = split_ends(spec)
    return tuple(tuple(_parse_term(term, spec) for term in group.split("_and_")) for group in terms.split("_or_"))


def split_ends(spec: str) -> tuple[str, str]:
    """Split `_at-A-B` off a spec, and return both; "" if the spec has no such end."""
    found = re.fullmatch(r"(.*?)(?:_at((?:-\d+)+))?", spec)
    assert found is not None
    return found[1], found[2] or ""


def _parse_term(term: str, spec: str) -> tuple[str, tuple[str, ...]]:
    """Parse a term into the name of its kind and its arguments."""
    for kind in KINDS:
        if found := kind.pattern.fullmatch(term):
            return kind.name, tuple(group or "" for group in found.groups())
    known = ", ".join(kind.form for kind in KINDS)
    raise ValueError(f"{term!r} in mask {spec!r} is not a mask; known forms: {known}")


def list_mask_features(spec: str) -> list[str]:
    """List the feature names of the spec, in the order of first use."""
    found: list[str] = []
    for name, arguments in (term for group in parse_mask_spec(spec) for term in group):
        kind = _BY_NAME[name]
        found += kind.features
        if kind.type is OwnWindow and arguments[1]:
            found.append(FIRST_TOKENS)
        if kind.offset != "none" and arguments[-1] not in ("", "0"):
            found.append("offset")
    if "_or_" in spec and Listed.feature in found:
        found.append(LOCAL_WINDOW)
    if split_ends(spec)[1]:
        found += ["lengths", Placed.feature]
    return list(dict.fromkeys(found))


def shift_mask_spec(spec: str, start: int) -> str:
    """Return the spec of the mask's rows from query `start` on.

    No spec describes these rows of a mask with `_or_` or `_at-`, so the spec of a random mask is returned instead.
    """
    if "_or_" in spec or "_at-" in spec:
        return "dense-d60"
    terms = [(term, _BY_NAME[_parse_term(term, spec)[0]]) for term in spec.split("_and_")]
    return "_and_".join(f"{term}-o{start}" if start and kind.offset != "none" else term for term, kind in terms)


@functools.lru_cache(maxsize=64)
def build_mask(spec: str, batch: int, num_q_heads: int, q_length: int, kv_length: int, seed: int) -> Mask:
    """Build the mask that `spec` names at these sizes; random masks are drawn from `seed`."""
    sizes = Sizes(spec, batch, num_q_heads, q_length, kv_length, seed)
    if text := split_ends(spec)[1]:
        sizes = sizes._replace(ends=_parse_one_per_row(sizes, text))
    either = []
    for group in parse_mask_spec(spec):
        both = (_BY_NAME[name].build(sizes, *arguments) for name, arguments in group)
        either.append(functools.reduce(lambda a, b: a & b, both))
    mask = functools.reduce(lambda a, b: a | b, either)
    if sizes.ends is None:
        return mask
    return place(mask, tuple(n - q_length for n in sizes.ends)) & Lengths(sizes.ends)


def _draw_random_mask(seed: int, shape: tuple[int, ...], percent: int) -> np.ndarray:
    """Draw random booleans; the first key and one key in nine are hidden, and one query in seven sees nothing."""
    if not 0 < percent <= 100:
        raise ValueError(f"the percentage of allowed pairs must be in 1..100, got {percent}")
    array = counter_rng.draw_integers(seed, "mask", shape, 100) < percent
    if shape[-1] > 1:
        array[..., 0::9] = False
    if shape[-2] > 1:
        array[..., 3::7, :] = False
    return array


def _draw_lists(sizes: Sizes, count: int) -> np.ndarray:
    """Draw lists of `count` keys, int32 `[B, T, count]`, in random order.

    Half of the queries have all entries, as far as there are keys. A third have fewer, and a sixth have none, but the
    last query of the last batch row has one at least. The other entries are -1, at random places.
    """
    shape = (sizes.batch, sizes.q_length)

    def shuffle(stream: str, length: int) -> np.ndarray:
        """Return the numbers below `length` in an order of its own for each query."""
        keys = counter_rng.draw_integers(sizes.seed, stream, (*shape, length), 2**32)
        return np.argsort(keys, axis=-1, kind="stable")

    lists = np.full((*shape, count), -1, np.int32)
    named = shuffle("lists", sizes.kv_length)[..., :count]
    lists[..., : named.shape[-1]] = named
    kind = counter_rng.draw_integers(sizes.seed, "list_kinds", shape, 6)
    fewer = 1 + counter_rng.draw_integers(sizes.seed, "list_lengths", shape, count)
    lengths = np.where(kind < 3, count, np.where(kind < 5, fewer, 0))
    lengths[-1, -1] = max(1, lengths[-1, -1])
    lists[np.arange(count) >= lengths[..., None]] = -1
    return np.take_along_axis(lists, shuffle("list_places", count), axis=-1)


def _parse_integers(text: str) -> tuple[int, ...]:
    """Parse the integers of `-A-B...`."""
    return tuple(int(part) for part in text.split("-") if part)


def _parse_integer(text: str) -> int:
    """Parse an integer; empty text is 0."""
    return int(text or 0)


def _parse_side(text: str) -> int | None:
    """Parse how far a window reaches to one side; `inf` becomes None, an open side."""
    return None if text == "inf" else int(text)
