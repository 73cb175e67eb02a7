"""Masks against a loop written from the contract's table, and the laws that they obey."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.masks import (
    EMPTY,
    FULL,
    PARTIAL,
    And,
    Bidirectional,
    Causal,
    Chunked,
    Dense,
    Full,
    HeadWindow,
    Indexer,
    Lengths,
    LoadBalancedCausal,
    Mask,
    Or,
    OwnWindow,
    Window,
    list_conjuncts,
)

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)
Allowed = Callable[[int, int, int, int], bool]


def balanced_order(cp_size: int, length: int) -> list[int]:
    """Sequence positions in the order in which the devices hold them."""
    chunks = np.split(np.arange(length), 2 * cp_size)
    return [p for r in range(cp_size) for p in (*chunks[r], *chunks[2 * cp_size - 1 - r])]


def definition(mask: Mask) -> Allowed:
    """`allowed(b, n, i, j)` by its formula (docs/contract.md, section 3), one pair at a time."""
    match mask:
        case Full():
            return lambda b, n, i, j: True
        case Causal(offset):
            return lambda b, n, i, j: j <= i + offset
        case Window(left, right, offset):
            return lambda b, n, i, j: (
                (left is None or i + offset - left <= j) and (right is None or j <= i + offset + right)
            )
        case Chunked(size, offset):
            return lambda b, n, i, j: (i + offset) // size == j // size and j <= i + offset
        case Bidirectional(spans):
            return lambda b, n, i, j: any(lo <= i < hi and lo <= j < hi for lo, hi in spans)
        case LoadBalancedCausal(cp_size, length):
            order = balanced_order(cp_size, length)
            return lambda b, n, i, j: j <= order[i]
        case Dense(array):
            rows, heads = array.shape[:2]
            return lambda b, n, i, j: bool(array[b if rows > 1 else 0, n if heads > 1 else 0, i, j])
        case Lengths(lengths):
            return lambda b, n, i, j: j < lengths[b]
        case OwnWindow(left, positions, first):
            return lambda b, n, i, j: (
                j <= positions[b] + i and (left is None or j >= positions[b] + i - left or j < first)
            )
        case HeadWindow(lefts):
            return lambda b, n, i, j: i - lefts[n] <= j <= i
        case And(one, other):
            both = definition(one), definition(other)
            return lambda b, n, i, j: both[0](b, n, i, j) and both[1](b, n, i, j)
        case Or(one, other):
            either = definition(one), definition(other)
            return lambda b, n, i, j: either[0](b, n, i, j) or either[1](b, n, i, j)
    raise AssertionError(mask)


def by_loops(mask: Mask, batch: int, heads: int, q_length: int, kv_length: int) -> np.ndarray:
    allowed = definition(mask)
    found = np.zeros((batch, heads, q_length, kv_length), bool)
    for index in itertools.product(*map(range, found.shape)):
        found[index] = allowed(*index)
    return found


def random_booleans(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < 0.4


@st.composite
def computed_masks(draw: st.DrawFn, q_length: int, kv_length: int) -> Mask:
    offset = draw(st.integers(-q_length - 2, kv_length + 2))
    sides = st.none() | st.integers(0, kv_length)
    start = draw(st.integers(0, kv_length - 1))
    choices = [
        Full(),
        Causal(offset),
        Window(draw(sides), draw(sides), offset),
        Chunked(draw(st.integers(1, kv_length + 2)), offset),
        Bidirectional(((start, draw(st.integers(start + 1, kv_length + 1))), (0, 1))),
    ]
    return draw(st.sampled_from(choices))


@st.composite
def balanced_masks(draw: st.DrawFn, q_length: int, kv_length: int) -> Mask:
    """Load-balanced order, alone or with a mask that is for any order of the queries."""
    mask = LoadBalancedCausal(draw(st.sampled_from([1, 2])), q_length)
    lengths = Lengths(draw(st.tuples(*[st.integers(0, kv_length)] * 2)))
    return draw(
        st.sampled_from([mask, mask & lengths, lengths | mask, mask & Dense(random_booleans((q_length, kv_length)))])
    )


@st.composite
def stored_masks(draw: st.DrawFn, q_length: int, kv_length: int) -> Mask:
    lead = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    lengths = draw(st.tuples(*[st.integers(0, kv_length)] * 2))
    array = random_booleans((*lead, q_length, kv_length), draw(st.integers(0, 3)))
    left, first = draw(st.none() | st.integers(0, kv_length)), draw(st.integers(0, 3))
    own = OwnWindow(left, (lengths[0] - q_length, lengths[1] - q_length), first)
    arrays = [Dense(array), Dense(array | True), Dense(array & False)]
    return draw(st.sampled_from([Lengths(lengths), own, HeadWindow(lengths), *arrays]))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mask, int, int]:
    """A mask, possibly composed, and the lengths that it is for; batch 2, two heads."""
    q_length, kv_length = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    leaves = computed_masks(q_length, kv_length) | stored_masks(q_length, kv_length)
    pair = st.builds(And, leaves, leaves) | st.builds(Or, leaves, leaves)
    if q_length % 4 == 0 and draw(st.booleans()):
        return draw(balanced_masks(q_length, kv_length)), q_length, kv_length
    return draw(leaves | pair | st.builds(Or, pair, leaves) | st.builds(And, pair, leaves)), q_length, kv_length


@SETTINGS
@given(problems())
def test_dense_is_what_the_contract_says_pair_by_pair(problem: tuple[Mask, int, int]) -> None:
    mask, q_length, kv_length = problem
    expected = by_loops(mask, 2, 2, q_length, kv_length)
    np.testing.assert_array_equal(np.broadcast_to(mask.dense(q_length, kv_length), expected.shape), expected)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_load_balanced_is_causal_with_its_rows_permuted(cp_size: int) -> None:
    length = 24
    causal = Causal().dense(length, length)[0, 0]
    balanced = LoadBalancedCausal(cp_size, length).dense(length, length)[0, 0]
    np.testing.assert_array_equal(balanced, causal[balanced_order(cp_size, length)])
    assert sorted(LoadBalancedCausal(cp_size, length).compute_position(np.arange(length))) == list(range(length))


def test_the_two_sliding_window_conventions_differ_by_one_key() -> None:
    ours, splash = Window(7, 0).dense(20, 20), Window(8, 0).dense(20, 20)
    assert ours[0, 0, 15].sum() == 8
    assert splash[0, 0, 15].sum() == 9


@SETTINGS
@given(problems(), st.integers(1, 11), st.integers(1, 11))
def test_blocks_summarize_dense_for_any_block_size_and_tail(
    problem: tuple[Mask, int, int], block_q: int, block_kv: int
) -> None:
    mask, q_length, kv_length = problem
    dense = mask.dense(q_length, kv_length)
    starts = (range(0, q_length, block_q), range(0, kv_length, block_kv))
    blocks = mask.blocks(q_length, kv_length, block_q, block_kv)
    assert blocks.shape == (*dense.shape[:2], len(starts[0]), len(starts[1]))
    for (r, i), (c, j) in itertools.product(enumerate(starts[0]), enumerate(starts[1])):
        part = dense[:, :, i : i + block_q, j : j + block_kv]
        every, some = part.all(axis=(2, 3)), part.any(axis=(2, 3))
        expected = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
        np.testing.assert_array_equal(blocks[:, :, r, c], expected)


def test_every_block_of_an_indexer_is_partial_since_its_values_come_at_run_time() -> None:
    array = np.zeros((2, 1, 6, 6), bool)
    assert (Indexer(array).blocks(6, 6, 4, 4) == PARTIAL).all()
    assert Indexer(array) != Dense(array)


@SETTINGS
@given(st.data())
def test_composition_is_elementwise(data: st.DataObject) -> None:
    q_length, kv_length = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    masks = computed_masks(q_length, kv_length) | stored_masks(q_length, kv_length)
    a, b, c = (data.draw(masks) for _ in range(3))
    da, db, dc = (mask.dense(q_length, kv_length) for mask in (a, b, c))
    np.testing.assert_array_equal((a & b).dense(q_length, kv_length), da & db)
    np.testing.assert_array_equal((a | b).dense(q_length, kv_length), da | db)
    np.testing.assert_array_equal(((a | b) & c).dense(q_length, kv_length), (da | db) & dc)
    np.testing.assert_array_equal((a & b | c).dense(q_length, kv_length), da & db | dc)
    assert (a & b).is_computed == (a.is_computed and b.is_computed)
    assert list_conjuncts(a & b & c) == (a, b, c)
    assert list_conjuncts(a | b) == (a | b,)


@SETTINGS
@given(st.data())
def test_computed_masks_are_formulas_on_jax_arrays_under_jit(data: st.DataObject) -> None:
    mask = data.draw(computed_masks(4, 7))
    i, j = jnp.arange(4)[:, None], jnp.arange(7)[None, :]
    expected = mask.dense(4, 7)[0, 0]
    np.testing.assert_array_equal(jnp.broadcast_to(mask.allowed(i, j), (4, 7)), expected)
    traced = jax.jit(lambda i, j: jnp.broadcast_to(mask.allowed(i, j), (4, 7)))
    np.testing.assert_array_equal(traced(i, j), expected)


def test_dense_masks_are_equal_and_hash_alike_exactly_when_their_values_and_shapes_are() -> None:
    array = random_booleans((6, 8))
    flipped = array.copy()
    flipped[2, 3] ^= True
    assert Dense(array) == Dense(array.astype(np.int8))
    assert hash(Dense(array)) == hash(Dense(array.copy()))
    assert Dense(array) == Dense(array[None, None])
    assert Dense(array) != Dense(flipped)
    assert Dense(array) != Dense(array.reshape(8, 6))
    assert Dense(np.zeros((2, 3), bool)) != Dense(np.zeros((2, 4), bool))
    assert Dense(array) != Full()
    assert len({Dense(array), Dense(array.copy()), Dense(flipped)}) == 2


def test_a_dense_mask_keeps_its_value_when_the_callers_array_changes() -> None:
    array = random_booleans((4, 4))
    mask, twin = Dense(array), Dense(array.copy())
    if array.flags.writeable:
        array ^= True
    assert mask == twin
    np.testing.assert_array_equal(mask.dense(4, 4), twin.dense(4, 4))
    with pytest.raises(ValueError, match="read-only"):
        mask.array[0, 0, 0, 0] = True


def test_what_dense_returns_may_be_written_to() -> None:
    for mask in (Full(), Dense(np.ones((3, 3), bool)), Full() & Causal()):
        mask.dense(3, 3)[:] = False
        assert mask.dense(3, 3).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(-1, 0), "window left must be >= 0 .* got -1"),
        (lambda: Window(0, -2), "window right must be >= 0 .* got -2"),
        (lambda: Chunked(0), "chunk size must be positive, got 0"),
        (lambda: Dense(np.ones(3, bool)), r"mask array must be .* got shape \(3,\)"),
        (lambda: Dense(np.ones((2, 3, 3), bool)), r"mask array must be .* got shape \(2, 3, 3\)"),
        (lambda: Dense(np.ones((3, 4), bool)).dense(3, 5), r"mask array is for lengths \(3, 4\).*T=3, S=5"),
        (lambda: (Dense(np.ones((9, 9), bool)) & Causal()).dense(3, 5), r"mask array is for lengths \(9, 9\)"),
        (lambda: (Full() | Dense(np.ones((9, 9), bool))).dense(3, 5), r"mask array is for lengths \(9, 9\)"),
        (lambda: Dense(np.ones((9, 9), bool)).blocks(3, 5, 2, 2), r"mask array is for lengths \(9, 9\)"),
        (lambda: Bidirectional(((3, 3),)), r"span must satisfy 0 <= start < stop, got \(3, 3\)"),
        (lambda: Bidirectional(((-1, 3),)), r"span must satisfy 0 <= start < stop, got \(-1, 3\)"),
        (lambda: Lengths((3, -1)), r"lengths must be >= 0, got \(3, -1\)"),
        (lambda: OwnWindow(-1, (3, 4)), "window left must be >= 0 .* got -1"),
        (lambda: OwnWindow(1, (3, 4), -1), "window first must be >= 0, got -1"),
        (lambda: HeadWindow((3, -1)), r"window lefts must be >= 0, got \(3, -1\)"),
        (lambda: LoadBalancedCausal(0, 8), "cp_size must be positive, got 0"),
        (lambda: LoadBalancedCausal(2, 10), "length 10 must be a multiple of 2 .* 4"),
        (lambda: LoadBalancedCausal(2, 8).dense(12, 12), "balanced for length 8, .* T=12"),
        (lambda: Full().blocks(4, 4, 0, 2), "block sizes must be positive, got block_q=0"),
        (lambda: Chunked(8, 2**30), "chunk offset must be at most .* got 1073741824"),
        (lambda: OwnWindow(3, (2**31, 4)), r"mask positions must be at most .* got \(2147483648, 4\)"),
        (lambda: Dense(np.zeros((3, 3), np.float32)), "mask array must be booleans, .* got float32"),
    ],
)
def test_nonsense_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


EDGES = [0, 1, 5, 2**15, 2**30 - 1, 2**30, 2**30 + 3, 2**31 - 1, 2**31, 2**32 + 7, 2**63 - 1, 2**70]
OFFSETS = [*EDGES, *(-n for n in EDGES[1:])]


def of_exact_integers(left: int | None, right: int | None, offset: int) -> np.ndarray:
    """The window of 4 queries and 6 keys, with integers that cannot overflow."""
    allowed = definition_of_window(left, right, offset)
    return np.array([[allowed(i, j) for j in range(6)] for i in range(4)])


def definition_of_window(left: int | None, right: int | None, offset: int) -> Callable[[int, int], bool]:
    return lambda i, j: (left is None or i + offset - left <= j) and (right is None or j <= i + offset + right)


def as_traced(mask: Mask) -> np.ndarray:
    """The mask as kernels evaluate it, in int32, inside a program."""
    i, j = jnp.arange(4, dtype=jnp.int32)[:, None], jnp.arange(6, dtype=jnp.int32)[None, :]
    return np.asarray(jax.jit(lambda i, j: jnp.broadcast_to(mask.allowed(i, j), (4, 6)))(i, j))


@pytest.mark.parametrize("offset", OFFSETS)
def test_bounds_and_offsets_of_any_size_mean_what_they_say_traced_and_in_numpy(offset: int) -> None:
    for left, right in itertools.product([None, *EDGES], repeat=2):
        mask, expected = Window(left, right, offset), of_exact_integers(left, right, offset)
        np.testing.assert_array_equal(mask.dense(4, 6)[0, 0], expected, err_msg=f"{left} {right}")
        if (left, right) in [(4, 2**31 - 1), (2**31 - 1, 0), (2**30, 2**30), (5, 2**30 - 1), (2**70, 2**15)]:
            np.testing.assert_array_equal(as_traced(mask), expected, err_msg=f"{left} {right}")
    causal = Causal(offset)
    np.testing.assert_array_equal(causal.dense(4, 6)[0, 0], of_exact_integers(None, 0, offset))
    np.testing.assert_array_equal(as_traced(causal), of_exact_integers(None, 0, offset))


def test_a_side_beyond_every_position_is_an_open_one() -> None:
    assert Window(4, 2**31 - 1) == Window(4, None)
    assert Window(2**31 - 1, 3) == Window(None, 3)
    assert Window(4, 2**30 - 1).right == 2**30 - 1
    assert OwnWindow(2**31, (3,)) == OwnWindow(None, (3,))
    np.testing.assert_array_equal(as_traced(Chunked(2**31 + 5)), np.tri(4, 6, dtype=bool))
    np.testing.assert_array_equal(as_traced(Bidirectional(((2, 2**31),))), Bidirectional(((2, 99),)).dense(4, 6)[0, 0])


@pytest.mark.parametrize(
    "other",
    [Causal(), Window(3, 0), Chunked(4), Bidirectional(((0, 3),)), OwnWindow(2, (0,)), LoadBalancedCausal(1, 8)],
)
def test_load_balanced_order_refuses_masks_that_count_queries_in_another_order(other: Mask) -> None:
    mask = LoadBalancedCausal(2, 8)
    for make in (lambda: mask & other, lambda: other | mask, lambda: (mask & Lengths((3,))) & (Full() | other)):
        with pytest.raises(ValueError, match=f"mask: .*{type(other).__name__} takes the queries to lie in .*; write"):
            make()


def test_a_window_written_in_load_balanced_order_is_one_of_the_sequence() -> None:
    order = balanced_order(2, 8)
    window = Window(2, None).dense(8, 8)[:, :, order]
    both = (Causal() & Window(2, None)).dense(8, 8)[:, :, order]
    np.testing.assert_array_equal((LoadBalancedCausal(2, 8) & Dense(window)).dense(8, 8), both)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: Window(x, 0), "window left must be an integer"),
        (lambda x: Causal(x), "causal offset must be an integer"),
        (lambda x: Chunked(x), "chunk size must be an integer"),
        (lambda x: Lengths((3, x)), "mask lengths must be an integer"),
        (lambda x: Lengths(x), "mask lengths must be a sequence"),
        (lambda x: OwnWindow(1, (x,)), "mask positions must be an integer"),
        (lambda x: LoadBalancedCausal(x, 8), "cp_size must be an integer"),
        (lambda x: Dense(jnp.ones((4, 4), bool) & (x > 0)), "mask array of Dense must be known .* wrap .* in Indexer"),
    ],
)
def test_what_is_traced_is_refused_by_name(make: Callable[[object], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda x: make(x) and x)(3)


def test_lengths_may_be_an_array_whose_values_are_known() -> None:
    assert Lengths(np.array([3, 4])) == Lengths(jnp.array([3, 4])) == Lengths((3, 4))  # type: ignore[arg-type]
