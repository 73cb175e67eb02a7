"""The check `dropout` sees which weights a kernel drops, passes correct kernels, and fails the planted ones."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cases.case import Case
from cases.case_id import parse_case_id
from cases.dropout_cases import select_dropout_cases
from cases.operand_values import draw_cotangent, draw_problem
from conformance import declare
from conformance.check_api.subject import Subject
from conformance.checks.dropout import _Masks
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from conformance.sandbox import kernel_process
from conformance.sandbox.kernel_options import KernelOptions
from conformance.truth import oracle
from conformance.truth.tolerances import load_default_tolerances
from impls.contract.implementation import Implementation
from reports.records import FAIL, PASS, UNJUDGED
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.features.dropout import BUGS
from tests.planted.planting import dropped

CASE = parse_case_id("train/f32/B2.T24.S32.N2.K1.H16.V32/causal-o8/softcap2/sinks/bias/dropout0.25/normal/s1")
ARRAYS, COUNTERS = dropped.Steps(), dropped.Steps(draw=None)
GIVEN = dropped.Steps(draw=None, read=lambda call: call.mask)


def build(steps: dropped.Steps, **declared: Any) -> Implementation:
    return dropped.build("kernel", steps, by_hand=steps.draw is None, **declared)


def find_red(implementation: Implementation, case: Case = CASE) -> set[str]:
    return {one.observable for one in judge(implementation, case.id, "dropout") if one.verdict == FAIL}


def test_gradients_of_the_oracle_are_derivatives_of_its_forward_pass() -> None:
    problem, drawn = draw_problem(CASE), draw_cotangent(CASE)
    rng = np.random.default_rng(0)
    problem = dataclasses.replace(problem, kept_pairs=rng.random((2, 2, 24, 32)) >= 0.25)
    assert drawn.logsumexp is not None
    gradients = oracle.compute_backward(problem, drawn.out, drawn.logsumexp)

    def loss(changed: Any) -> float:
        forward = oracle.compute_forward(changed)
        assert drawn.logsumexp is not None
        return float((forward.out * drawn.out).sum() + (forward.logsumexp * drawn.logsumexp).sum())

    for name in ("q", "k", "v", "sinks", "bias"):
        x = getattr(problem, name).astype(np.float64)
        step = 1e-5 * rng.normal(size=x.shape)
        ends: list[dict[str, Any]] = [{name: x + step}, {name: x - step}]
        change = [loss(dataclasses.replace(problem, **end)) for end in ends]
        # The difference is off by the square of the step and by 1e-16 / 1e-5: 1e-10, far below 1e-6.
        assert (change[0] - change[1]) / 2 == pytest.approx((gradients[f"d{name}"] * step).sum(), rel=1e-6)


def test_the_oracle_asks_which_weights_are_kept() -> None:
    with pytest.raises(ValueError, match="kept_pairs"):
        oracle.compute_forward(draw_problem(CASE))


@pytest.mark.parametrize("steps", [ARRAYS, COUNTERS], ids=["arrays", "counters"])
def test_the_mask_of_a_kernel_is_seen(steps: dropped.Steps) -> None:
    masks = _Masks(Subject(Executor(build(steps)), CASE, load_default_tolerances()))
    problem = masks.problem
    call = dropped.Dropout(
        rate=0.25,
        key=jax.numpy.asarray(problem.dropout_key),
        q=jax.numpy.asarray(problem.q),
        shape=(2, 2, 24, 32),
        group=2,
    )
    assert problem.kept_pairs is not None
    assert not ((np.asarray(dropped.draw(call, steps)) != problem.kept_pairs) & problem.allowed).any()


@pytest.mark.parametrize("steps", [ARRAYS, COUNTERS], ids=["arrays", "counters"])
def test_correct_kernels_pass(steps: dropped.Steps) -> None:
    found = judge(build(steps, dropout_mask="places" if steps.draw is None else "shape"), CASE.id, "dropout")
    assert {one.verdict for one in found} == {PASS}
    assert {"kept.rate", "corners.independence", "dv.results", "out.vmap_keys"} <= {one.observable for one in found}


@pytest.mark.parametrize("name", ["factor-twice", "same-for-all-heads", "lost-in-dv", "key-of-the-number-of-the-call"])
def test_a_wrong_kernel_fails_where_it_is_wrong(name: str) -> None:
    bug = next(bug for bug in BUGS if bug.name == f"dropout-{name}")
    assert {observable.split(".")[0] for observable in find_red(bug.build())} & set(bug.shows)


def test_shared_masks_are_declared_and_must_be_shared() -> None:
    shared = dataclasses.replace(
        ARRAYS, draw=lambda call: jax.random.bernoulli(call.key, 1 - call.rate, (1, 1, 24, 32))
    )
    assert find_red(build(shared)) == {"masks.independence"}
    assert find_red(build(shared, dropout_shared=("batch", "heads"))) == set()
    assert find_red(build(ARRAYS, dropout_shared=("heads",))) >= {"heads.shared"}


def test_weights_are_seen_under_a_declared_order_of_terms() -> None:
    @declare(soft_cap="before_bias", empty_rows="mean", behind_mask="finite")
    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        soft_cap: Any = None,
        bias: Any = None,
        dropout_rate: Any = None,
        dropout_key: Any = None,
    ) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * q.shape[-1] ** -0.5
        x = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
        p = jax.nn.softmax(x if bias is None else x + bias)
        if dropout_rate:
            p = jnp.where(jax.random.bernoulli(dropout_key, 1 - dropout_rate, p.shape), p / (1 - dropout_rate), 0)
        return jnp.einsum("bnts,bsnv->btnv", p, v, precision="highest")

    case = parse_case_id("train/f32/B1.T32.S32.N2.K2.H16.V32/full/softcap2/bias/dropout0.25/normal/s1")
    assert find_red(build_implementation(attention, "before"), case) == set()


# A seed from what is different in each process, and one from what is not.
SALTED = """
import zlib
import jax
import jax.numpy as jnp
import numpy as np
from conformance import declare

def build(salt):
    @declare(empty_rows="mean", behind_mask="finite")
    def attention(q, k, v, *, dropout_rate=None, dropout_key=None):
        p = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * q.shape[-1] ** -0.5)
        if dropout_rate:
            kept = jax.random.bernoulli(jax.random.fold_in(dropout_key, salt), 1 - dropout_rate, p.shape)
            p = jnp.where(kept, p / (1 - dropout_rate), 0)
        return jnp.einsum("bnts,bsnv->btnv", p, v, precision="highest")
    return attention

by_checksum = build(zlib.crc32(b"attention"))
by_hash = build(hash("attention") & 0xFFFF)
by_random_state = build(np.random.randint(2**16))
"""


@pytest.mark.parametrize(
    ("name", "red"),
    [("by_checksum", set()), ("by_hash", {"mask.same_key"}), ("by_random_state", {"mask.same_key"})],
)
def test_the_same_key_drops_the_same_weights_in_another_process(name: str, red: set[str], tmp_path: Path) -> None:
    (tmp_path / "salted.py").write_text(SALTED)
    case = parse_case_id("train/f32/B1.T16.S16.N2.K2.H16.V16/full/dropout0.25/normal/s1")
    try:
        assert find_red(KernelOptions().find(f"{tmp_path}/salted.py:{name}"), case) == red
    finally:
        kernel_process.end_all_processes()


def _draw_by_bits(key: Any, shape: tuple[int, int], rate: float) -> Any:
    pltpu.prng_seed(key[0, 0], key[0, 1])
    return pltpu.bitcast(pltpu.prng_random_bits(shape), jnp.uint32) >= np.uint32(rate * 2**32)


def _draw_statefully(key: Any, shape: tuple[int, int], rate: float) -> Any:
    pltpu.prng_seed(key[0, 0], key[0, 1])
    return pltpu.stateful_uniform(shape) >= rate


def _draw_by_pallas_key(key: Any, shape: tuple[int, int], rate: float) -> Any:
    return jax.random.uniform(jax.random.wrap_key_data(key[...].astype(jnp.uint32), impl="pallas_tpu"), shape) >= rate


@pytest.mark.parametrize("interpret", [True, pltpu.InterpretParams()], ids=["fast", "slow"])
@pytest.mark.parametrize("draw", [_draw_by_bits, _draw_statefully, _draw_by_pallas_key])
def test_a_generator_that_cannot_be_interpreted_leaves_dropout_unjudged(draw: Any, interpret: Any) -> None:
    @declare(behind_mask="finite", gradients=())
    def attention(q: Any, k: Any, v: Any, *, dropout_rate: float = 0.0, dropout_key: Any = None) -> Any:
        def kernel(key: Any, q: Any, k: Any, v: Any, out: Any) -> None:
            p = jax.nn.softmax(jnp.dot(q[...], k[...].T) * q.shape[-1] ** -0.5)
            if dropout_rate:
                p = jnp.where(draw(key, p.shape, dropout_rate), p / (1 - dropout_rate), 0)
            out[...] = jnp.dot(p, v[...])

        key = jnp.zeros(2, jnp.int32) if dropout_key is None else jnp.asarray(dropout_key).astype(jnp.int32)
        out = jax.ShapeDtypeStruct((q.shape[1], v.shape[-1]), q.dtype)
        one = pl.pallas_call(kernel, out, interpret=interpret)
        of_heads = jax.vmap(functools.partial(one, key[None]), in_axes=1, out_axes=1)
        return jax.vmap(of_heads)(q, k, v)

    case = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/dropout0.25/normal/s1"
    (one,) = judge(build_implementation(attention, "chip"), case, "dropout")
    assert one.verdict == UNJUDGED, one.reason
    assert "the generator cannot be interpreted here" in one.reason


def test_only_a_function_with_rate_and_key_has_cases() -> None:
    def only_rate(q: Any, k: Any, v: Any, *, dropout_rate: float = 0.0) -> Any:
        return q

    assert select_dropout_cases("quick", 0, build_implementation(only_rate, "only_rate").supports) == ()
    cases = select_dropout_cases("quick", 0, build(ARRAYS).supports)
    assert [case.dropout_rate for case in cases] == [0.25, 0.1, 0.5, 0.9, 0.001]
    assert all(parse_case_id(case.id) == case for case in cases)


def test_a_kernel_that_takes_a_mask_passes_by_the_masks_that_it_is_given() -> None:
    implementation = build(GIVEN)
    assert implementation.dropout_mask == "given"
    found = {one.observable: one.verdict for one in judge(implementation, CASE.id, "dropout")}
    assert set(found.values()) == {PASS}
    given = {f"{x}.{mask}.given" for x in ("mask", "out", "dv") for mask in ("rows", "batch", "heads")}
    assert found.keys() >= given | {"mask.given", "dq.results", "out.vmap_keys", "dk.scan"}
    assert not [name for name in found if name.endswith((".rate", ".independence"))]  # those of the judge's generator


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.kind == "dropout.given"], ids=lambda bug: bug.name)
def test_a_kernel_that_reads_its_mask_wrongly_fails(bug: PlantedBug) -> None:
    assert bug.trigger(CASE)
    assert {observable.split(".")[0] for observable in find_red(bug.build())} & set(bug.shows)


SHARED = parse_case_id("train/f32/B1.T64.S64.N2.K1.H16.V32/causal/dropout0.25/normal/s1")


def test_a_kernel_on_several_devices_passes() -> None:
    found = judge(dropped.build_on_devices("kernel", COUNTERS), SHARED.id, "dropout")
    assert {one.verdict for one in found} == {PASS}
    assert {"mask.devices", "mask.places", "dq.results"} <= {one.observable for one in found}


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.kind == "dropout.devices"], ids=lambda bug: bug.name)
def test_a_kernel_whose_devices_drop_wrongly_fails(bug: PlantedBug) -> None:
    red = find_red(bug.build(), SHARED)
    assert {observable.split(".")[0] for observable in red} & set(bug.shows)
    assert (red == {"mask.devices"}) == (bug.name == "dropout-by-number-of-devices")


def test_a_key_decides_if_a_function_takes_a_mask_too() -> None:
    def both(
        q: Any, k: Any, v: Any, *, dropout_rate: float = 0.0, dropout_key: Any = None, dropout_mask: Any = None
    ) -> Any:
        return q

    implementation = build_implementation(both, "both")
    assert implementation.dropout_mask == "shape"
    assert implementation.unasked == ("dropout_mask",)
    with pytest.raises(NotAnAttentionFunction, match="takes no dropout_mask"):
        build(ARRAYS, dropout_mask="given")


def test_a_case_with_dropout_is_judged_by_no_other_check() -> None:
    from conformance.judging.run_plan import plan_case

    (job,) = plan_case(build(ARRAYS), CASE).jobs
    assert [check.name for check in job.checks] == ["dropout"]
