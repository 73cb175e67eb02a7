"""Paged attention beyond the checks of every kernel: work, memory, and refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case_id import parse_case_id
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls import paged
from impls.paged.page_copies import build_blocks
from impls.paged.paged_gpu import build_shares
from impls.paged.paged_plan import Operands, PagedPlan, build_tiles
from reports.records import PASS, RED


def operands(q_lens: list[int], kv_lens: list[int], most: int, junk: int) -> Operands:
    """Build tables of some sequences with room for `most`, filled up with `junk`."""
    past = [junk] * (most - len(q_lens))
    ends = np.cumsum([0, *q_lens]).tolist()
    return Operands(
        q=jnp.zeros((max(-(-ends[-1] // 20) * 20, 1), 2, 4)),  # few sizes, each of which is compiled
        k_pages=jnp.zeros((3, 4, 1, 4)),
        v_pages=jnp.zeros((3, 4, 1, 4)),
        kv_lens=jnp.asarray([*kv_lens, *past], jnp.int32),
        page_indices=jnp.full((most, 2), junk, jnp.int32),
        cu_q_lens=jnp.asarray([*ends, *past], jnp.int32),
        num_seqs=jnp.asarray([len(q_lens)], jnp.int32),
    )


def on_host(lists: Any) -> Any:
    """Convert the lists to NumPy arrays."""
    return jax.tree.map(np.asarray, lists)


@pytest.mark.long
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=5),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([-7, 0, 2**30]),
)
def test_tiles_are_the_queries_that_are_there(sequences: list[tuple[int, int]], block_q: int, junk: int) -> None:
    q_lens = [q_len for q_len, _ in sequences]
    kv_lens = [q_len + before for q_len, before in sequences]
    tiles = on_host(build_tiles(operands(q_lens, kv_lens, 6, junk), block_q))
    total = int(tiles.total)
    found = [tuple(int(x[number]) for x in tiles[1:]) for number in range(total)]
    wanted = [
        (number, sum(q_lens[:number]) + start, min(block_q, q_len - start), kv_lens[number] - q_len + start)
        for number, q_len in enumerate(q_lens)
        for start in range(0, q_len, block_q)
    ]
    assert found == wanted
    assert total <= len(tiles.row)


@pytest.mark.long
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=5),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([None, 0, 6]),
    st.sampled_from([None, 0, 3]),
)
def test_blocks_have_the_pages_that_a_tile_sees_and_follow_one_another(
    sequences: list[tuple[int, int]], block_q: int, block_pages: int, left: int | None, right: int | None
) -> None:
    q_lens = [q_len for q_len, _ in sequences]
    # Some sequences have fewer keys than queries: the first of these see none.
    given_ = operands(q_lens, [max(q_len + before - 5, 0) for q_len, before in sequences], 6, 2**30)
    plan = PagedPlan(left=left, right=right, scale=1.0, soft_cap=None, block_q=block_q, block_pages=block_pages)
    tiles = build_tiles(given_, block_q)
    blocks = on_host(build_blocks(plan, given_, tiles))
    tiles = on_host(tiles)
    page_size, total = given_.k_pages.shape[1], int(tiles.total)
    counted = 0
    for number in range(total):
        first = int(tiles.position[number])
        last = first + int(tiles.queries[number]) - 1
        keys = int(given_.kv_lens[tiles.sequence[number]])
        stop = keys if right is None else last + 1 if right == 0 else min(last + right + 1, keys)
        seen = {j // page_size for j in range(0 if left is None else max(first - left, 0), stop)}
        copied = set(range(int(blocks.slot[number]), int(blocks.end[number])))
        assert copied == seen
        assert blocks.length[number] == -(-len(seen) // block_pages)
        assert blocks.before[number] == counted
        counted += int(blocks.length[number])
        later = [other for other in range(number + 1, total) if blocks.length[other]]
        assert blocks.following[number] == (later[0] if later else len(blocks.length))
    assert not blocks.length[total:].any()


@pytest.mark.long
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=5),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 4, 7]),
    st.sampled_from([1, 3, 40]),
    st.sampled_from([None, 0, 6]),
)
def test_shares_are_the_blocks_that_tiles_see_each_once_and_of_one_size(
    sequences: list[tuple[int, int]], block_q: int, block: int, programs: int, left: int | None
) -> None:
    q_lens = [q_len for q_len, _ in sequences]
    # Some sequences have fewer keys than queries: the first of these see none.
    given_ = operands(q_lens, [max(q_len + before - 5, 0) for q_len, before in sequences], 6, 2**30)
    plan = PagedPlan(left=left, scale=1.0, soft_cap=None, block_q=block_q, block_pages=1)
    tiles = build_tiles(given_, block_q)
    shares = on_host(
        build_shares(plan, tiles, jnp.asarray(given_.kv_lens)[tiles.sequence], block=block, programs=programs)
    )
    tiles = on_host(tiles)
    total = int(tiles.total)
    sizes: list[int] = []
    for number in range(total):
        first = int(tiles.position[number])
        last = first + int(tiles.queries[number]) - 1
        seen = {j // block for j in range(0 if left is None else max(first - left, 0), last + 1)}
        mine = range(shares.before[number], shares.before[number] + shares.own[number])
        assert all(shares.tile[share] == number for share in mine)
        found = [list(range(shares.first[share], shares.end[share])) for share in mine]
        assert [block for blocks in found for block in blocks] == sorted(seen)
        sizes += [len(blocks) for blocks in found[:-1]]
        assert not found or 0 < len(found[-1]) <= max(sizes, default=len(found[-1]))
    assert len(set(sizes)) <= 1
    assert shares.own.sum() <= programs + total
    assert not shares.own[total:].any()
    past = slice(int(shares.own.sum()), None)
    assert (shares.end[past] <= shares.first[past]).all()


TABLES: dict[str, Any] = {
    "kv_lens": jnp.asarray([3, 5], jnp.int32),
    "page_indices": jnp.zeros((2, 2), jnp.int32),
    "cu_q_lens": jnp.asarray([0, 1, 2], jnp.int32),
    "num_seqs": jnp.asarray([2], jnp.int32),
}


def call(page_size: int = 4, pages_per_seq: int = 2, **changed: Any) -> Any:
    """Build a call with two sequences of one query each over a cache of six pages."""
    given: dict[str, Any] = {
        "q": jnp.ones((2, 4, 8)),
        "k_pages": jnp.ones((6, page_size, 2, 8)),
        "v_pages": jnp.ones((6, page_size, 2, 8)),
        "kv_lens": jnp.asarray([3, 5], jnp.int32),
        "page_indices": jnp.zeros((2, pages_per_seq), jnp.int32),
        "cu_q_lens": jnp.asarray([0, 1, 2], jnp.int32),
        "num_seqs": jnp.asarray([2], jnp.int32),
    } | changed
    return paged.attention(**given)


PAGES = {"k_pages": jnp.ones((6, 4, 2, 8)), "v_pages": jnp.ones((6, 4, 2, 8))}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": jnp.ones((2, 8))}, r"q must have the axes \[total_q, heads, depth\]"),
        ({"v_pages": jnp.ones((5, 4, 2, 8))}, "k_pages and v_pages must agree"),
        ({"q": jnp.ones((2, 4, 7))}, "k_pages has head_dim 8, q has 7"),
        ({"q": jnp.ones((2, 3, 8))}, "q has 3 heads"),
        ({"q": jnp.ones((2, 4, 8), jnp.bfloat16)}, "q and pages must have one dtype"),
        ({"sinks": jnp.ones(2)}, "sinks must have shape"),
        ({"window": (1, -1)}, r"window must be \(left, right\)"),
        ({"window": (-1, 0)}, r"window must be \(left, right\)"),
        ({"mask": jnp.ones((3, 4), bool)}, "mask must be booleans"),
        ({"tree_mask": jnp.ones((2, 4))}, "tree_mask must be booleans"),
        ({"alibi_slopes": jnp.ones(2)}, "alibi_slopes must have shape"),
        ({"block_q": 0}, "block_q must be positive"),
        ({"backend": "cpu"}, "backend must be one of portable, tpu, gpu"),
        ({"block_kv": 48, "backend": "gpu"}, "block_kv must be a power of two of at least 16"),
        ({"num_programs": 0, "backend": "gpu"}, "num_programs must be positive"),
        ({"kv_lens": jnp.ones(3, jnp.int32)}, "page_indices must have shape"),
        ({"cu_q_lens": jnp.ones(2, jnp.int32)}, r"cu_q_lens must have shape \(3,\)"),
        ({"num_seqs": jnp.int32(2)}, r"num_seqs must have shape \(1,\)"),
        ({"page_indices": jnp.zeros((2, 2))}, "page_indices must be integers"),
    ],
)
def test_what_is_refused_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changed)


MIXED = "prefill/f32/B4.T13.S45.N4.K2.H64.V48/own-l15-45-16-17-9/softcap30/sinks/kvint8-token/shared16-q13-1-1-9"
DECODE = "decode/bf16/B4.T1.S70.N6.K1.H80.V80/own-linf-70-33-1-0/scale0.3/kvfp8-token/paged5"
OF_JAX = "decode/f32/B3.T1.S48.N4.K2.H64.V64/own-linf-48-33-15/softcap30/kvint8-token/paged16"


@pytest.mark.parametrize(
    ("name", "case", "asked"),
    [
        ("paged_quantized", MIXED, "forward residuals poison independence"),
        pytest.param("paged_quantized", DECODE, "forward residuals poison independence", marks=pytest.mark.long),
        ("paged_quantized_tpu", MIXED, "forward residuals poison"),
        pytest.param("paged_quantized_tpu", DECODE, "forward residuals poison", marks=pytest.mark.long),
        ("paged_quantized_gpu", MIXED, "forward residuals poison"),
        pytest.param("paged_quantized_gpu", DECODE, "forward residuals poison", marks=pytest.mark.long),
        ("jax_paged_tpu", OF_JAX, "forward poison independence"),
        pytest.param("jax_paged_gpu", OF_JAX.replace("int8", "fp8"), "forward poison", marks=pytest.mark.long),
    ],
)
def test_pages_with_scales_conform(name: str, case: str, asked: str) -> None:
    checks = [CHECKS_BY_NAME[check] for check in asked.split()]
    found = Runner(Settings()).run(
        run_plan.plan_case(
            implementation_registry.find_implementation(name), parse_case_id(f"{case}/normal/s0"), checks
        ).jobs
    )
    assert {record.check for record in found if record.verdict == PASS} == set(asked.split())
    assert [record for record in found if record.verdict in RED] == []


def assert_conforms_on_a_tpu(case: str) -> None:
    checks = ("forward", "residuals", "poison", "interpreter")
    implementation = implementation_registry.find_implementation("paged_tpu")
    plan = run_plan.plan_case(
        implementation, parse_case_id(f"{case}/normal/s0"), [CHECKS_BY_NAME[check] for check in checks]
    )
    found = Runner(Settings()).run(plan.jobs)
    assert {record.check for record in found if record.verdict == PASS} == set(checks)
    assert [record for record in found if record.verdict in RED] == []


PAIRS = {
    "decode": "decode/bf16/B3.T1.S200.N8.K4.H128.V256/own-linf-200-145-33/paged16",
    "mixed": "prefill/bf16/B4.T13.S145.N4.K2.H128.V128/own-l95-145-96-117-9/softcap30/shared16-q13-1-1-9",
    # More heads than are computed together.
    "heads": "decode/bf16/B2.T1.S150.N16.K16.H128.V128/own-linf-150-64/paged16",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name == "mixed" else pytest.mark.long) for name, case in PAIRS.items()],
)
def test_heads_that_are_loaded_in_pairs_conform(case: str) -> None:
    """Judge bf16 in whole lanes, also by the interpreter that loads pairs in another way."""
    assert_conforms_on_a_tpu(case)


MASKS = {
    "ahead": "prefill/f32/B4.T13.S145.N6.K2.H64.V48/window-l9-r3_at-145-16-17-9/softcap30/alibi/paged16-q13-1-1-9",
    "tree": "prefill/bf16/B4.T13.S145.N4.K2.H128.V128/tree-13-1-1-9_at-145-16-17-9/logitscale/paged16-q13-1-1-9",
    "varying": "prefill/bf16/B4.T13.S145.N4.K2.H128.V128/varying-l4_at-145-16-17-9/score-rows/paged5-q13-1-1-9",
    "array": "prefill/f32/B4.T13.S145.N4.K2.H64.V64/dense-d40_at-145-16-17-9/sinks/alibi/logitscale/paged16-q13-1-1-9",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name == "tree" else pytest.mark.long) for name, case in MASKS.items()],
)
def test_masks_over_sequences_conform_on_a_tpu(case: str) -> None:
    """Judge values that a mask hides, which may be NaN, and copies that are started under masks."""
    assert_conforms_on_a_tpu(case)


def test_a_tpu_takes_no_function_that_captures_an_array() -> None:
    table = jnp.arange(8) % 2 == 0
    with pytest.raises(NotImplementedError, match="a mask_mod that captures an array: pass the array as mask"):
        call(backend="tpu", mask_mod=lambda b, n, i, j: table[j])
    with pytest.raises(NotImplementedError, match="a score_mod that captures an array: compute the score"):
        call(backend="tpu", score_mod=lambda x, b, n, i, j: x + table[j])


BYTES: dict[str, Any] = {name: x.astype(jnp.int8) for name, x in PAGES.items()}
SCALES: dict[str, Any] = {"k_scales": jnp.ones((6, 4, 2)), "v_scales": jnp.ones((6, 4, 2))}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (BYTES, r"q and pages must have one dtype .* or k_scales and v_scales, f32 \[pages, page_size, heads\]"),
        ({**BYTES, "k_scales": SCALES["k_scales"]}, r"v_scales must be given .*, f32 \[6, 4, 2\], got none"),
        ({**BYTES, "v_scales": SCALES["v_scales"]}, "k_scales must be given"),
        (
            SCALES,
            "k_pages and v_pages must have one dtype of .*int8.* got float32 and float32: quantise them, or leave",
        ),
        (
            {**BYTES, **SCALES, "v_scales": jnp.ones((6, 4, 1))},
            r"v_scales must have shape \(6, 4, 2\), .* got \(6, 4, 1\)",
        ),
        ({**BYTES, **SCALES, "k_scales": jnp.ones((6, 4, 2), jnp.int8)}, "k_scales must be float32, got int8: cast"),
        (
            {**BYTES, "page_scales": jnp.ones((6, 4, 64))},
            r"page_scales must have shape \[6, 4, a multiple of 128\], .* got \(6, 4, 64\)",
        ),
        ({**BYTES, "page_scales": jnp.ones((6, 4, 128), jnp.int8)}, "page_scales must be float32, got int8: cast"),
        ({**BYTES, "k_scale": 0.1}, "v_scale must be a number .* got None"),
        ({**BYTES, "v_scale": 0.1, "k_scale": jnp.float32(1)}, "k_scale must be a number that is known before tracing"),
        ({"k_scale": 0.1, "v_scale": 0.2}, "k_pages and v_pages must have one dtype of .* got float32 and float32"),
        ({**BYTES, **SCALES, "k_scale": 0.1, "v_scale": 0.2}, "k_scale and v_scale must be the only scales"),
    ],
)
def test_what_is_wrong_of_scales_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changed)


def test_scales_are_taken_in_the_layout_of_the_back_end_and_of_pages_that_are_read() -> None:
    with pytest.raises(NotImplementedError, match="paged on a TPU does not support k_scales"):
        call(**BYTES, **SCALES, backend="tpu")
    with pytest.raises(NotImplementedError, match="paged supports page_scales on a TPU only"):
        call(**BYTES, page_scales=paged.side_by_side(**SCALES))


def test_a_tpu_takes_no_float16() -> None:
    half: dict[str, Any] = {name: x.astype(jnp.float16) for name, x in {"q": jnp.ones((2, 4, 8)), **PAGES}.items()}
    with pytest.raises(NotImplementedError, match="paged on a TPU does not support f16"):
        call(**half, backend="tpu")


def test_a_derivative_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="paged does not support train"):
        jax.grad(lambda q: call(q=q).sum())(jnp.ones((2, 4, 8)))


def test_no_more_than_a_block_of_pages_is_gathered() -> None:
    def temporary(pages_per_seq: int) -> int:
        tables = jnp.zeros((2, pages_per_seq), jnp.int32)
        lowered = jax.jit(lambda tables: call(page_indices=tables, block_kv=16)).lower(tables)
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    # Tables may be copied, for each of both sequences 1,024 more int32.
    tables = 2 * 1024 * 4
    one_page_of_every_entry = 2 * 1024 * 4 * 2 * 8 * 4
    assert temporary(1040) - temporary(16) <= 4 * tables < one_page_of_every_entry
