"""Case ids: they parse back to their case, need no quoting, and say what is wrong when they do not parse."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import FEATURES, Case, CaseIdError
from cases.case_fields import DISTRIBUTIONS, DTYPES, PHASES
from cases.case_id import matches_query, parse_case_id
from cases.optional_operands.bias_operand import BIASES
from cases.optional_operands.segment_ids_operand import SEGMENTS

SETTINGS = settings(derandomize=True, deadline=None, max_examples=150)
GOOD = "train/bf16/B2.T128.S128.N4.K2.H64.V64/causal/seg/softcap30/sinks/biashead/scale0.3/normal/s7"


@st.composite
def mask_specs(draw: st.DrawFn, batch: int, q_length: int, kv_length: int) -> str:
    """A spec that is valid at these sizes: one to three terms."""
    offset = draw(st.sampled_from(["", "-o3", "-o-2"]))
    side = st.integers(0, 9).map(str) | st.just("inf")
    lengths = draw(st.lists(st.integers(0, kv_length), min_size=batch, max_size=batch))
    terms = [
        "full",
        f"causal{offset}",
        f"window-l{draw(side)}-r{draw(side)}{offset}",
        f"chunked-{draw(st.integers(1, 9))}{offset}",
        "spans-0-2-4-9",
        "-".join(("lengths", *map(str, lengths))),
        f"dense{draw(st.sampled_from(['', 'head', 'batch']))}-d{draw(st.integers(1, 100))}",
    ]
    if q_length % 4 == 0 and draw(st.booleans()):  # it goes with masks that are for any order of queries
        terms = ["balanced-2", terms[0], *terms[-2:]]
    chosen = draw(st.lists(st.sampled_from(terms), min_size=1, max_size=3))
    joints = draw(st.lists(st.sampled_from(["_and_", "_or_"]), min_size=3, max_size=3))
    return "".join(x for pair in zip(chosen, joints, strict=False) for x in pair).rsplit("_", 2)[0]


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    sizes = st.integers(1, 20)
    batch, q_length, kv_length, kv_heads = draw(st.integers(1, 3)), draw(sizes), draw(sizes), draw(st.integers(1, 3))
    positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
    soft_cap = draw(st.none() | st.sampled_from([1e-7, 30.0, 1e22]) | positive)
    return Case(
        phase=draw(st.sampled_from(PHASES)),
        dtype=draw(st.sampled_from(DTYPES)),
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        num_q_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=draw(sizes),
        v_head_dim=draw(sizes),
        mask=draw(mask_specs(batch, q_length, kv_length)),
        segments=draw(st.none() | st.sampled_from(SEGMENTS)),
        soft_cap=soft_cap,
        sinks=draw(st.booleans()),
        bias=draw(st.none() | st.sampled_from(BIASES)),
        scale=draw(st.none() | positive),
        distribution=draw(st.sampled_from([d for d in DISTRIBUTIONS if d != "knee" or soft_cap is not None])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


@SETTINGS
@given(any_case())
def test_an_id_parses_back_to_its_case_and_needs_no_quoting(case: Case) -> None:
    assert parse_case_id(case.id) == case
    assert str(case) == case.id
    assert re.fullmatch(r"[A-Za-z0-9._/-]+", case.id)
    assert set(case.features) <= set(FEATURES)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("train/", "eval/", "phase 'eval'"),
        ("bf16", "f64", "dtype 'f64'"),
        ("B2.T128", "B2.Q128", "'B2.Q128.S128.N4.K2.H64.V64'.*not a shape"),
        ("T128", "T0", "every size must be at least 1.*T0"),
        ("N4", "N3", "N=3 must be a multiple of K=2"),
        ("causal", "casual", "'casual' in mask 'casual' is not a mask"),
        ("causal", "causal_and_", "'' in mask 'causal_and_' is not a mask"),
        ("causal", "window-l3", "'window-l3' in mask"),
        ("causal", "chunked-0", "chunk size must be positive"),
        ("causal", "dense-d0", "percentage of allowed pairs must be in 1..100, got 0"),
        ("causal", "spans-4-2", r"span must satisfy .* got \(4, 2\)"),
        ("causal", "spans-1-2-3", "'spans-1-2-3' in mask"),
        ("causal", "balanced-3", "length 128 must be a multiple of 2 .* 6"),
        ("causal", "lengths-5", "'lengths-5' needs one length <= S=128 for each of 2"),
        ("causal", "lengths-5-129", "'lengths-5-129' needs one length <= S=128"),
        ("/seg/", "/segments/", "'segments' in .* is none of seg, segpad"),
        ("softcap30", "softcap", "'softcap' in .* is none of"),
        ("softcap30", "softcap0", "soft cap must be positive and finite, got 0"),
        ("softcap30", "seg", "'seg' in .* sets segments a second time"),
        ("sinks", "sink", "'sink' in .* is none of"),
        ("biashead", "biasrow", "'biasrow' in .* is none of"),
        ("scale0.3", "scale0", "scale must be positive and finite, got 0"),
        ("scale0.3", "scale-1", "'scale-1' in .* is none of"),
        ("normal", "uniform", "distribution 'uniform'"),
        ("s7", "7", "'7' in .* is not a seed"),
        ("s7", "s-7", "'s-7' in .* is not a seed"),
        ("s7", f"s{2**64}", f"seed must be .* got {2**64}"),
    ],
)
def test_the_malformed_part_is_named(old: str, new: str, names: str) -> None:
    assert parse_case_id(GOOD).id == GOOD
    assert GOOD.count(old) >= 1
    with pytest.raises(CaseIdError, match=names):
        parse_case_id(GOOD.replace(old, new, 1) if old != "s7" else GOOD.removesuffix(old) + new)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"distribution": "knee"}, "needs a soft cap"),
        ({"soft_cap": float("nan")}, "soft cap must be positive.*nan"),
        ({"soft_cap": float("inf")}, "soft cap must be positive.*inf"),
        ({"scale": float("nan")}, "scale must be positive.*nan"),
        ({"seed": -1}, "seed must be .* got -1"),
    ],
)
def test_a_case_that_no_id_could_name_is_refused(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(CaseIdError, match=names):
        Case(**fields)


def test_too_few_parts_are_counted_and_the_form_is_shown() -> None:
    with pytest.raises(CaseIdError, match="it has 3 components, at least 6 are needed: phase/dtype/shape/mask"):
        parse_case_id("train/f32/causal")


def test_cap_is_an_alias_of_softcap_and_options_come_in_any_order() -> None:
    assert parse_case_id(GOOD.replace("softcap30", "cap30")) == parse_case_id(GOOD)
    assert parse_case_id(GOOD.replace("seg/softcap30/sinks", "sinks/softcap30/seg")).id == GOOD


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (GOOD, True),
        ("train", True),
        ("train/", True),
        ("train/bf16", True),
        ("train/*/*/causal", True),
        ("*/causal", True),
        ("*/softcap*", True),
        ("*", True),
        (" train/bf16 ", True),
        ("tra", False),
        ("train/bf", False),
        ("bf16", False),
        ("*/caus", False),
        ("*/s", False),
        ("TRAIN", False),
        (f"{GOOD}0", False),
        (f"{GOOD}/more", False),
    ],
)
def test_a_query_is_a_prefix_of_whole_parts_with_wildcards(query: str, expected: bool) -> None:
    assert matches_query(query, GOOD) is expected


def test_features_name_what_the_case_needs() -> None:
    case = parse_case_id("decode/f16/B1.T1.S9.N4.K1.H8.V6/causal-o8_and_densehead-d40/sinks/normal/s0")
    assert set(case.features) == {
        *("f16", "decode", "mqa", "causal", "offset", "dense_head", "sinks", "v_head_dim", "unequal_lengths")
    }
    assert set(Case(mask="causal-o0").features) == {"f32", "train", "mha", "causal"}
