"""Masks and scores as functions: which kernels get them, how they are built, and what is then unsupported."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from cases.case_id import parse_case_id
from cases.masks import Causal, Full, Lengths, MaskFunction, Window
from cases.operand_values import draw_problem
from cases.score_functions import Rows, ThenCapped
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import plain_functions
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.block_flash.attention import attention as block_flash
from impls.contract.implementation import Implementation, mask_function
from impls.dot_product.attention import attention as dot_product
from reports.records import FAIL, PASS
from tests.planted.planting import flex

SHAPE = "prefill/f32/B2.T16.S24.N4.K2.H16.V16"
CASE = f"{SHAPE}/{{}}/normal/s0"
Given = dict[str, Any]


class Recorder:
    """A function with some parameters, and the arguments that it got."""

    def __init__(self, *names: str) -> None:
        self.given: Given = {}
        parameters = ", ".join(f"{name}=None" for name in names)
        space: Given = {"record": self.record}
        exec(f"def kernel(q, k, v, *, {parameters}): return record(q, dict(locals()))", space)
        self.kernel = space["kernel"]

    def record(self, q: Any, given: Given) -> Any:
        self.given = {name: x for name, x in given.items() if name not in "qkv" and x is not None}
        return q

    def asked(self, spec: str) -> Given:
        """Return the arguments that the function gets for a case, or why it does not support the case."""
        case, implementation = parse_case_id(CASE.format(spec)), build_implementation(self.kernel, "kernel")
        if (reason := implementation.supports(case)) is not None:
            return {"unsupported": reason}
        Executor(implementation).forward(draw_problem(case))
        return self.given


ROWS = Rows(step=0.25, offset=8)


@pytest.mark.parametrize(
    ("names", "spec", "given"),
    [
        (("mask_mod",), "full", {}),
        (("mask_mod",), "causal-o8", {"mask_mod": MaskFunction(Causal(8))}),
        (("mask_mod",), "lengths-5-24", {"mask_mod": MaskFunction(Lengths((5, 24)))}),
        (
            ("mask_mod", "causal"),
            "causal_and_lengths-5-24",
            {"causal": True, "mask_mod": MaskFunction(Lengths((5, 24)))},
        ),
        (("mask_mod", "window"), "window-l3-r0", {"window": (3, 0)}),
        (("score_mod",), "full/score-rows", {"score_mod": ROWS}),
        (("score_mod",), "full/softcap2/score-rows", {"score_mod": ThenCapped(ROWS, 2.0)}),
        (("score_mod",), "full/softcap2", {"score_mod": ThenCapped(None, 2.0)}),
        (("score_mod", "soft_cap"), "full/softcap2/score-rows", {"score_mod": ROWS, "soft_cap": 2.0}),
    ],
)
def test_a_function_is_given_what_it_has_parameters_for(names: tuple[str, ...], spec: str, given: Given) -> None:
    functions = {name: plain_functions._build_closure(x) for name, x in given.items() if callable(x)}
    assert Recorder(*names).asked(spec) == {**given, **functions}


def test_what_is_no_formula_arrives_as_booleans() -> None:
    both, dense = (
        draw_problem(parse_case_id(CASE.format(x))).mask for x in ("window-l3-r0-o8_and_dense-d60", "dense-d60")
    )
    kernel = build_implementation(Recorder("mask_mod", "mask").kernel, "kernel")
    static, arrays = kernel.lower_mask(both, 2, 4, 16, 24)
    assert static == {"mask_mod": MaskFunction(Window(3, 0, 8))}
    assert set(arrays) == {"mask"}
    assert (arrays["mask"] == dense.dense(16, 24)).all()


@pytest.mark.parametrize(
    ("names", "spec", "reason"),
    [
        (
            ("mask_mod",),
            "dense-d60",
            "dense: mask_mod takes a formula of indices, this mask is an array, and the function",
        ),
        (("mask_mod",), "causal_or_dense-d60", "mask_mod takes a formula of indices, this mask is an array"),
        (("mask_mod",), "full/seg", "segment_ids: the function has no parameter 'segment_ids'"),
        (("mask_mod",), "full/softcap2", "soft_cap: the function has no parameter 'soft_cap'"),
        (("mask_mod",), "full/score-rows", "score_mod: the function has no parameter 'score_mod'"),
        (("score_mod",), "causal-o8", "causal: the function has no parameter 'causal' or 'mask'"),
        (("causal",), "causal-o8_and_lengths-5-24", "causal: at the end, and the function declares it at the start"),
        (("causal",), "causal_and_lengths-5-24", "lengths: the function has no parameter 'kv_lengths' or 'mask'"),
        (("window",), "window-l3-r0_and_window-l9-r2", "window: the function has no parameter 'mask'"),
        (("score_mod",), "full/alibi", "alibi_slopes: the function has no parameter 'alibi_slopes'"),
    ],
)
def test_what_no_function_can_say_is_unsupported(names: tuple[str, ...], spec: str, reason: str) -> None:
    assert reason in Recorder(*names).asked(spec)["unsupported"]


def test_who_takes_whatever_there_is_gets_no_functions() -> None:
    seen: list[Given] = []

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append(options)
        return q

    implementation = build_implementation(kernel, "kernel")
    assert "score_mod" in str(implementation.supports(parse_case_id(CASE.format("full/score-rows"))))
    Executor(implementation).forward(draw_problem(parse_case_id(CASE.format("lengths-5-24/softcap2"))))
    assert seen
    assert set(seen[-1]) == {"mask", "soft_cap"}

    def names_them(q: Any, k: Any, v: Any, *, score_mod: Any = None, alibi_slopes: Any = None, **options: Any) -> Any:
        return q

    assert build_implementation(names_them, "kernel").offers == {"score_mod", "alibi_slopes"}


def test_a_function_that_must_have_them_is_given_none_where_there_is_nothing() -> None:
    seen: list[Any] = []

    def kernel(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
        seen.append((score_mod, mask_mod))
        return q

    Executor(build_implementation(kernel, "kernel")).forward(draw_problem(parse_case_id(CASE.format("full"))))
    assert seen == [(None, None)]
    with pytest.raises(NotAnAttentionFunction, match=r"needs the argument 'block_mask', which is none of .*mask_mod"):
        build_implementation(lambda q, k, v, block_mask: q, "kernel")


def judged(implementation: Implementation, spec: str, *checks: str) -> set[str]:
    planned = run_plan.plan_case(
        implementation, parse_case_id(CASE.format(spec)), [CHECKS_BY_NAME[name] for name in checks]
    )
    return {record.verdict for record in Runner(Settings()).run(planned.jobs)}


def test_an_implementation_takes_its_mask_as_a_function_by_its_lowering() -> None:
    kernel = flex.kernel()
    implementation = Implementation(
        name="functions",
        call=lambda q, k, v, *, soft_cap=None, **options: kernel(q, k, v, **options),
        lower_mask=mask_function,
        offers=frozenset({"score_mod"}),
        unsupported=dict.fromkeys(("segment_ids", "soft_cap", "sinks", "bias"), "it takes functions only"),
        behind_mask="finite",
        empty_rows="zero",
    )
    assert mask_function(Full(), 2, 4, 16, 24) == ({}, {})
    assert judged(implementation, "lengths-5-24/score-cap", "forward", "residuals") == {PASS}
    for spec in ("dense-d60", "indexer-d60", "causal_and_densehead-d60"):
        assert "mask_mod is a function of places" in str(implementation.supports(parse_case_id(CASE.format(spec))))


@pytest.mark.parametrize("call", [dot_product, block_flash])
def test_ours_say_what_a_score_must_be(call: Any) -> None:
    q = jnp.ones((1, 8, 2, 4))
    with pytest.raises(TypeError, match=r"score_mod must be a function \(score, b, n, i, j\) -> score, got float"):
        call(q, q, q, score_mod=2.0)


def test_a_wrong_function_does_not_pass() -> None:
    turned = flex.FlexSteps(score_places=lambda at, start, call: at._replace(i=at.j, j=at.i))
    assert judged(flex.implementation("right"), "full/score-relative", "forward") == {PASS}
    assert judged(flex.implementation("turned", turned), "full/score-relative", "forward") == {FAIL}
