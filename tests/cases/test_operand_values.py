"""Operands: the same bits everywhere, and each distribution is what its name says."""

from __future__ import annotations

import hashlib
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import counter_rng
from cases.case import Case
from cases.case_fields import DISTRIBUTIONS, DTYPES
from cases.case_id import parse_case_id
from cases.distributions import MOVED
from cases.grid import build_grid
from cases.mask_spec import build_mask
from cases.operand_values import Problem, draw_cotangent, draw_problem
from cases.optional_operands.bias_operand import HIDING
from cases.optional_operands.sinks_operand import EXTREME
from conformance.truth import oracle

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)
BASE = Case(q_length=64, kv_length=96, head_dim=16, v_head_dim=16)


def digest(*arrays: np.ndarray | None) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def probabilities(problem: Problem) -> np.ndarray:
    """`[B * N * T, S]`."""
    return np.concatenate([group.p.reshape(-1, group.p.shape[-1]) for group in oracle.iter_head_groups(problem)])


def logits(problem: Problem) -> np.ndarray:
    """Before the soft cap, `[B * K, G, T, S]`."""
    return np.stack([group.x for group in oracle.iter_head_groups(problem)])


def of(distribution: str, **changes: object) -> Problem:
    text = BASE.id.replace("/normal/", f"/{distribution}/")
    for old, new in changes.items():
        text = text.replace(f"/{old}/", f"/{new}/")
    return draw_problem(parse_case_id(text))


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (counter_rng.draw_integers(7, "mask", (3, 5), 100), "8cde0f254064c1b0"),
        (counter_rng.draw_normal(7, "q", (4, 9)), "fa980ce19ef5ff11"),
        (counter_rng.draw_normal(0, "do", (1000,)), "358449b4ca7da76e"),
    ],
)
def test_random_numbers_have_the_same_bits_everywhere(array: np.ndarray, expected: str) -> None:
    assert digest(array.astype(array.dtype.newbyteorder("<"))) == expected


@pytest.mark.parametrize(
    ("case_id", "expected"),
    [
        (
            "train/f32/B2.T20.S24.N4.K2.H8.V4/densehead-d40/segpad/softcap2/sinks/bias/scale0.3/normal/s3",
            "0f3e5c5a5b911f31",
        ),
        ("train/bf16/B1.T16.S16.N2.K2.H8.V8/causal/sinks/biaskey/heavy/s5", "7104e76753029070"),
        ("train/f16/B1.T16.S16.N2.K2.H8.V8/causal/huge/s9", "ba209b53717a7996"),
    ],
)
def test_the_operands_of_a_case_have_the_same_bits_everywhere(case_id: str, expected: str) -> None:
    case = parse_case_id(case_id)
    problem, cotangent = draw_problem(case), draw_cotangent(case)
    operands = (problem.q, problem.k, problem.v, problem.allowed, problem.sinks, problem.bias)
    assert digest(*operands, cotangent.out, cotangent.logsumexp) == expected


def test_drawing_does_not_look_at_jax() -> None:
    case = parse_case_id("train/bf16/B1.T16.S16.N2.K2.H8.V8/causal/sinks/biaskey/heavy/s5")
    with jax.enable_x64(True), jax.default_matmul_precision("bfloat16"):
        inside = draw_problem(case)
    assert digest(inside.q, inside.sinks, inside.bias) == digest(
        draw_problem(case).q, draw_problem(case).sinks, draw_problem(case).bias
    )


def test_normal_values_have_the_moments_of_a_normal_and_streams_differ() -> None:
    x = counter_rng.draw_normal(3, "q", (200_000,))
    of_mean = len(x) ** -0.5  # standard error of the mean of numbers whose variance is 1
    # Tolerance: five standard errors, with the variances of a normal's powers (2, 15 and 96), which are larger.
    assert abs(x.mean()) < 5 * of_mean
    assert abs(x.var() - 1) < 5 * 2**0.5 * of_mean  # Tolerance: likewise
    assert abs((x**3).mean()) < 5 * 15**0.5 * of_mean
    # Tolerance: likewise, about the fourth moment of a sum of eight uniforms, 3 - 1.2 / 8.
    assert abs((x**4).mean() - 2.85) < 5 * 96**0.5 * of_mean
    others = [counter_rng.draw_normal(4, "q", x.shape), counter_rng.draw_normal(3, "k", x.shape)]
    assert all(abs(np.corrcoef(x, y)[0, 1]) < 5 * of_mean for y in others)


def test_integers_are_uniform_and_stay_below_high() -> None:
    counts = np.bincount(counter_rng.draw_integers(1, "mask", (70_000,), 7))
    assert len(counts) == 7
    # Tolerance: five standard deviations of a count of 70,000 draws, each with a chance of one in seven.
    np.testing.assert_allclose(counts, 10_000, rtol=0, atol=5 * (70_000 * 6 / 49) ** 0.5)


@given(st.integers(0, 2**64 - 1), st.text(max_size=8), st.integers(1, 9), st.integers(1, 9))
@SETTINGS
def test_a_draw_depends_on_seed_and_stream_and_starts_alike_at_every_size(
    seed: int, stream: str, rows: int, more: int
) -> None:
    few, many = (
        counter_rng.draw_normal(seed, stream, (rows, 4)),
        counter_rng.draw_normal(seed, stream, (rows + more, 4)),
    )
    np.testing.assert_array_equal(few, many[:rows])
    assert np.abs(many).max() <= 4.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_operands_are_finite_in_their_dtype_and_of_the_contracts_shapes(dtype: str, distribution: str) -> None:
    case = parse_case_id(f"train/{dtype}/B2.T20.S30.N4.K2.H8.V6/causal/segpad/softcap5/sinks/biaskey/{distribution}/s1")
    problem, cotangent = draw_problem(case), draw_cotangent(case)
    assert problem.q.shape == (2, 20, 4, 8)
    assert problem.k.shape == (2, 30, 2, 8)
    assert problem.v.shape == (2, 30, 2, 6)
    assert cotangent.out.shape == (2, 20, 4, 6)
    assert problem.segment_ids is not None
    assert problem.bias is not None
    assert problem.q.dtype == problem.k.dtype == problem.v.dtype == problem.bias.dtype == cotangent.out.dtype
    assert [ids.dtype for ids in problem.segment_ids] == [np.dtype(np.int32)] * 2
    for array in (problem.q, problem.k, problem.v, problem.bias, problem.sinks, cotangent.out):
        assert np.isfinite(np.asarray(array, np.float64)).all()
        assert np.asarray(array, np.float64).any()


def test_the_logits_spread_is_what_the_distribution_names() -> None:
    for distribution, spread in (("ties", 2.0), ("small", 0.3), ("normal", 1.0), ("large", 4.0)):
        # Of `<q, k>` over 128 queries, and 192 keys or the 6 that ties leave, the variance has the standard
        # error of a mean of squared lengths, which are 16 squared normals; a spread has half of it.
        keys = 6 if distribution == "ties" else 192
        error = 0.5 * (2 / 16 / 128 + 2 / 16 / keys) ** 0.5
        # Tolerance: five standard errors.
        assert logits(of(distribution)).std() == pytest.approx(spread, rel=5 * error, abs=0), distribution
    scaled = parse_case_id(BASE.id.replace("/full/", "/full/scale0.7/"))
    assert logits(draw_problem(scaled)).std() == pytest.approx(1.0, rel=5 * error, abs=0)  # Tolerance: as above


def test_huge_logits_are_beyond_float16_and_still_choose() -> None:
    for dtype in DTYPES:
        problem = of("huge", f32=dtype)
        size = np.abs(logits(problem))
        assert 65504 < size.min() <= size.max() < 3e5
        assert (logits(problem)[:, :, 1::2] < 0).all()
        assert np.isfinite(problem.q.astype(np.float64)).all()
        assert 0.01 < probabilities(problem).max(axis=-1).mean() < 0.9


def test_ties_have_exactly_equal_keys() -> None:
    problem = of("ties")
    for j in range(3, problem.k.shape[1]):
        np.testing.assert_array_equal(problem.k[:, j], problem.k[:, j - 3])
    assert not np.array_equal(problem.k[:, 0], problem.k[:, 1])
    assert not np.array_equal(problem.v[:, 0], problem.v[:, 3])


def test_cancelling_neighbours_share_a_key_and_nearly_cancel_in_value() -> None:
    problem = of("cancel")
    np.testing.assert_array_equal(problem.k[:, 1::2], problem.k[:, 0::2])
    pair = problem.v[:, 1::2].astype(np.float64) + problem.v[:, 0::2]
    # Tolerance: either of the two was rounded to f32.
    roundings = 2 * 2.0**-24 * np.abs(problem.v).max()
    np.testing.assert_allclose(pair, problem.v[:, 0::2] * 2.0**-6, rtol=0, atol=roundings)  # Tolerance: `roundings`
    out = oracle.compute_forward(problem).out
    assert np.abs(out).max() < 0.05 * np.abs(oracle.compute_forward(of("normal")).out).max()


def test_knee_logits_spread_about_the_cap() -> None:
    for cap in (2.0, 30.0):
        problem = of("knee", full=f"full/softcap{cap:g}")
        x = logits(problem)
        # Tolerance: five standard errors of a spread over 128 queries and 192 keys of 16 dimensions.
        assert x.std() == pytest.approx(cap, rel=5 * 0.5 * (2 / 16 / 128 + 2 / 16 / 192) ** 0.5, abs=0)
        bent = 1 - np.tanh(x / cap) ** 2
        assert (bent < 0.8).mean() > 0.3
        assert (bent > 0.2).mean() > 0.3


def test_every_soft_cap_bends_some_logits() -> None:
    for distribution in ("normal", "small", "dominant", "heavy"):
        problem = of(distribution, full="full/softcap30")
        assert (np.abs(logits(problem)) > 15).mean() > 0.05, distribution


def test_dominant_keys_win_most_rows_and_the_last_wins_most() -> None:
    p = probabilities(of("dominant"))
    winners = p[:, [0, p.shape[1] // 2, p.shape[1] - 1]]
    assert (winners.sum(axis=-1) > 0.5).mean() > 0.9
    assert winners.mean(axis=0)[2] == winners.mean(axis=0).max()
    assert p.max(axis=-1).mean() > 2 * probabilities(of("normal")).max(axis=-1).mean()


def test_heavy_tails_are_heavier_than_a_normals() -> None:
    def kurtosis(x: np.ndarray) -> float:
        return float((x.astype(np.float64) ** 4).mean() / (x.astype(np.float64) ** 2).mean() ** 2)

    assert kurtosis(of("normal").k) < 3.3
    assert all(kurtosis(x) > 5 for x in (of("heavy").q, of("heavy").k, of("heavy").v))


def test_aligned_values_have_one_sign_and_sums_beyond_the_range_of_f16() -> None:
    for dtype in DTYPES:
        case = parse_case_id(f"train/{dtype}/B1.T64.S512.N2.K2.H64.V64/full/aligned/s0")
        problem, do = draw_problem(case), draw_cotangent(case).out.astype(np.float64)
        v, p = problem.v.astype(np.float64), probabilities(problem)
        assert v.min() >= 0
        assert do.min() >= 0
        dp = np.einsum("btnv,bsnv->bnts", do, v)
        assert (np.abs(dp).min() > 65504) == (dtype == "bf16")
        assert np.abs(dp).max() < 65504 or dtype == "bf16"
        weights = p / p.max(axis=-1, keepdims=True)
        total = weights.reshape(2, 64, 512) @ v[0].transpose(1, 0, 2)
        assert (np.median(total) > 65504) == (dtype == "f16")


def test_opposed_values_cancel_over_all_keys_and_not_over_an_eighth() -> None:
    case = parse_case_id("train/f32/B1.T64.S512.N2.K2.H64.V64/full/opposed/s0")
    v = draw_problem(case).v.astype(np.float64)[0]
    eighths = v.reshape(8, 64, 2, 64).mean(axis=1)
    assert np.abs(eighths).min() > 2
    assert np.abs(v.mean(axis=0)).max() < 0.3
    patterns = np.sign(eighths)[:, 0].T
    assert len(np.unique(patterns, axis=0)) == 7


def test_rising_logits_rise_by_amounts_between_the_ranges_of_f16_and_f32() -> None:
    case = parse_case_id("train/f16/B1.T128.S512.N2.K2.H64.V64/full/rising/s0")
    z = logits(draw_problem(case))
    rise = z[..., -64:].mean(axis=-1) - z[..., :64].mean(axis=-1)
    assert rise.min() < 5
    assert 88 < rise.max() < 130
    assert ((rise > 11) & (rise < 88)).mean() > 0.3


CAPPED_SINKS = [
    (distribution, soft_cap)
    for distribution in DISTRIBUTIONS
    for soft_cap in ("", "/softcap2", "/softcap30")
    # A knee needs a cap; logits far from zero sit on the flat end of any.
    if (distribution != "knee" or soft_cap != "") and (distribution not in MOVED or soft_cap == "")
]


@pytest.mark.parametrize(("distribution", "soft_cap"), CAPPED_SINKS)
def test_sinks_take_a_visible_part_of_the_weight(distribution: str, soft_cap: str) -> None:
    case = parse_case_id(BASE.id.replace("/full/normal/", f"/causal-o32{soft_cap}/sinks/{distribution}/"))
    weight = np.mean([group.p_sink.mean() for group in oracle.iter_head_groups(draw_problem(case))])
    assert 0.05 < weight < 0.95


MASKS = ("full", "causal", "causal-o30", "window-l9-r0", "chunked-9-o4", "densebatch-d40", "lengths-11-37")


@SETTINGS
@given(
    st.sampled_from(MASKS),
    st.sampled_from(["seg", "segpad"]),
    st.sampled_from([(37, 37), (12, 50), (50, 37), (1, 40), (64, 64)]),
    st.integers(0, 50),
)
def test_segments_hide_no_row_from_all_the_keys_that_its_mask_shows(
    mask: str, segments: str, lengths: tuple[int, int], seed: int
) -> None:
    q, kv = lengths
    case = parse_case_id(f"train/f32/B2.T{q}.S{kv}.N2.K2.H2.V2/{mask}/{segments}/normal/s{seed}")
    problem = draw_problem(case)
    assert problem.segment_ids is not None
    q_ids, kv_ids = problem.segment_ids
    padded = np.full(q_ids.shape, False)
    if segments == "segpad":
        padded = q_ids == -1
        assert (kv_ids == -2).any(axis=1).all()
        assert not (kv_ids == -1).any()
        assert not (q_ids == -2).any()
        assert not problem.allowed[np.broadcast_to(padded[:, None, :, None], problem.allowed.shape)].any()
    visible = build_mask(mask, 2, 2, q, kv, seed).dense(q, kv) & (kv_ids != -2)[:, None, None, :]
    should_see = visible.any(axis=-1) & ~padded[:, None, :]
    assert (problem.allowed.any(axis=-1) >= should_see).all()


def test_segments_are_packed_sequences_that_differ_by_batch_row() -> None:
    problem = draw_problem(parse_case_id("train/f32/B2.T64.S64.N2.K2.H2.V2/full/seg/normal/s0"))
    assert problem.segment_ids is not None
    q_ids, kv_ids = problem.segment_ids
    np.testing.assert_array_equal(q_ids, kv_ids)
    for row in kv_ids:
        changes = np.flatnonzero(np.diff(row))
        assert len(changes) >= 2
        assert len(set(row)) == len(changes) + 1  # each label in one piece
        assert (np.diff(row) < 0).any()
    assert not np.array_equal(np.diff(kv_ids[0]) != 0, np.diff(kv_ids[1]) != 0)


def test_empty_rows_and_dead_keys_are_those_of_the_allowed_pairs() -> None:
    problem = draw_problem(parse_case_id("train/f32/B2.T20.S30.N4.K2.H4.V4/densehead-d40/segpad/normal/s1"))
    allowed = np.broadcast_to(problem.allowed, (2, 4, 20, 30))
    np.testing.assert_array_equal(problem.empty_rows, ~allowed.any(axis=-1))
    seen = np.stack([allowed[:, :2].any(axis=(1, 2)), allowed[:, 2:].any(axis=(1, 2))], axis=-1)
    np.testing.assert_array_equal(problem.dead_keys, ~seen)
    assert problem.empty_rows.any()
    assert problem.dead_keys.any()


def test_a_seed_changes_values_and_nothing_else() -> None:
    one, other = draw_problem(BASE), draw_problem(parse_case_id(re.sub(r"s0$", "s1", BASE.id)))
    assert one.q.shape == other.q.shape
    assert (one.q == other.q).mean() < 0.01
    assert not np.array_equal(one.q[0, :4, 0], one.k[0, :4, 0])


def test_every_case_of_the_grid_draws_finite_operands() -> None:
    for case in build_grid("quick", 0).cases[::8]:
        problem = draw_problem(case)
        for array in (problem.q, problem.k, problem.v, problem.sinks, problem.bias):
            values = np.zeros(()) if array is None else array.astype(np.float64)
            hides = (array is problem.bias and case.bias in HIDING) or (
                array is problem.sinks and case.sinks == EXTREME
            )
            assert (np.isfinite(values) | (hides & np.isneginf(values))).all(), case.id
        assert problem.allowed.any(), case.id


def _compute_logits(problem: Problem) -> np.ndarray:
    group = problem.q.shape[2] // problem.k.shape[2]
    keys = np.repeat(problem.k.astype(float), group, axis=2)
    return np.einsum("btnh,bsnh->bnts", problem.q.astype(float), keys) * problem.effective_scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["", "/scale1", "/scale0.3"])
def test_low_logits_are_below_the_starts_of_a_running_maximum(dtype: str, scale: str) -> None:
    problem = draw_problem(parse_case_id(f"train/{dtype}/B1.T40.S70.N3.K1.H64.V64/full{scale}/low/s0"))
    logits = _compute_logits(problem)
    assert (logits[:, 0] < -105).all()
    assert (logits[:, 1] < -1e4 - 105).all()
    spread = logits.std(axis=-1)
    # Tolerance: drawn with a standard deviation of 1; that of 70 logits errs by 0.09.
    assert ((spread > 0.5) & (spread < 2)).all()


def test_logits_that_are_apart_jump_up_and_down_in_every_head() -> None:
    problem = draw_problem(parse_case_id("train/bf16/B1.T40.S100.N2.K2.H64.V64/full/apart/s0"))
    stretches = np.stack(np.split(_compute_logits(problem), 5, axis=-1)).mean(axis=-1)  # [5, B, N, T]
    jumps = np.diff(stretches, axis=0)
    for size in (200, 95, 18):
        for sign in (-1, 1):
            # Tolerance: the mean of 20 logits has a standard deviation of 0.22, and a jump is rounded by 0.4 at most.
            assert (np.abs(jumps - sign * size) < 3).any(axis=(0, 1, 3)).all(), (size, sign)


def test_extreme_sinks_take_all_weight_or_none_beside_an_ordinary_one() -> None:
    problem = draw_problem(parse_case_id("train/f32/B1.T8.S70.N6.K6.H64.V64/full/sinksedge/normal/s0"))
    assert problem.sinks is not None
    largest, ordinary, none, low, again, last = problem.sinks
    assert largest == again == np.finfo(np.float32).max
    assert (none, low) == (-np.inf, np.float32(-1e30))
    assert abs(ordinary) < 20
    assert abs(last) < 20


def test_a_bias_hides_the_first_block_where_a_later_key_is_left() -> None:
    problem = draw_problem(parse_case_id("train/f32/B2.T300.S300.N2.K2.H64.V64/causal/biasfirst/normal/s0"))
    assert problem.bias is not None
    assert np.isneginf(problem.bias[:, :, 128:, :128]).all()
    assert np.isfinite(problem.bias[:, :, :128]).all()
    assert np.isfinite(problem.bias[..., 128:]).all()
