"""Plain functions: the features that their signature and one trace show."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import pytest

from cases.case_id import parse_case_id
from cases.masks import Causal, Full, Mask, Window
from cases.masks.mask_functions import MaskFunction
from cases.operand_values import draw_problem
from cases.score_functions import Alibi
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import ERROR, FAIL, PASS, RED, UNSUPPORTED, Record
from tests.kernels import naive

FULL = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/normal/s0"
CAUSAL = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0"
WINDOW = "train/f32/B1.T16.S16.N2.K2.H16.V16/window-l4-r0/normal/s0"
CHUNKED = "train/f32/B1.T16.S16.N2.K2.H16.V16/chunked-8/normal/s0"
LACKING = {CAUSAL: "'causal' or 'mask'", WINDOW: "'window' or 'mask'", CHUNKED: "'mask'"}


def judge(function: Callable[..., Any], case: str, *checks: str) -> list[Record]:
    chosen = [CHECKS_BY_NAME[name] for name in checks or ("forward",)]
    planned = run_plan.plan_case(build_implementation(function, "kernel"), parse_case_id(case), chosen)
    return Runner(Settings()).run(planned.jobs)


def conforms(function: Callable[..., Any], case: str, *checks: str) -> bool:
    found = judge(function, case, *checks)
    return any(r.verdict == PASS for r in found) and not any(r.verdict in RED for r in found)


def only_three(q: Any, k: Any, v: Any) -> Any:
    return naive.attention(q, k, v)


def only_causal(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    return naive.attention(q, k, v, causal=causal)


def causal_by_default(q: Any, k: Any, v: Any, causal: bool = True) -> Any:
    return naive.attention(q, k, v, causal=causal)


def only_mask(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    return naive.attention(q, k, v, mask=mask)


def needs_mask(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return naive.attention(query, key, value, mask=mask)


def variadic(*operands: Any, causal: bool = False) -> Any:
    return naive.attention(*operands, causal=causal)


class CallableObject:
    """A callable object."""

    def __call__(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        return naive.attention(q, k, v, causal=causal)


@pytest.mark.parametrize(
    ("function", "supported", "declined"),
    [
        (only_three, [FULL], [CAUSAL, WINDOW, CHUNKED]),
        (only_causal, [FULL, CAUSAL], [WINDOW, CHUNKED]),
        (causal_by_default, [FULL, CAUSAL], [WINDOW]),
        (only_mask, [FULL, CAUSAL, WINDOW, CHUNKED], []),
        (needs_mask, [FULL, CAUSAL], []),
        (variadic, [FULL, CAUSAL], [WINDOW]),
        (CallableObject(), [FULL, CAUSAL], [WINDOW]),
        (functools.partial(only_causal), [FULL, CAUSAL], [WINDOW]),
        (jax.jit(only_causal, static_argnames="causal"), [FULL, CAUSAL], [WINDOW]),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__) if callable(value) else None,
)
def test_the_signature_says_what_is_supported(
    function: Callable[..., Any], supported: list[str], declined: list[str]
) -> None:
    assert all(conforms(function, case) for case in supported)
    for case in declined:
        (found,) = judge(function, case)
        assert found.verdict == UNSUPPORTED
        assert found.reason.endswith(f"has no parameter {LACKING[case]}")


def test_a_parameter_of_another_name_is_told_beside_the_one_that_is_missing() -> None:
    def kernel(q: Any, k: Any, v: Any, *, is_causal: bool = False, sm_scale: Any = None, attn_mask: Any = None) -> Any:
        raise AssertionError("nothing is asked of it")

    implementation = build_implementation(kernel, "kernel")
    told = "the function has no parameter 'scale' (nothing is passed to its 'sm_scale')"
    assert implementation.unsupported["scale"] == told
    assert implementation.unsupported["sinks"] == "the function has no parameter 'sinks'"
    shape = "train/f32/B1.T8.S8.N1.K1.H16.V16"
    causal, chunked = (
        implementation.supports(parse_case_id(f"{shape}/{mask}/normal/s0")) for mask in ("causal", "chunked-4")
    )
    assert causal == "causal: the function has no parameter 'causal' or 'mask' (nothing is passed to its 'is_causal')"
    assert chunked == "chunked: the function has no parameter 'mask' (nothing is passed to its 'attn_mask')"


def test_declined_features_name_the_missing_parameter() -> None:
    implementation = build_implementation(only_causal, "kernel")
    assert implementation.unsupported["sinks"] == "the function has no parameter 'sinks'"
    assert implementation.gradients == {"dq", "dk", "dv"}
    assert implementation.residuals == frozenset()


def test_causal_and_window_are_passed_together() -> None:
    seen: list[dict[str, Any]] = []

    def records(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, mask: Any = None) -> Any:
        seen.append({"causal": causal, "window": window, "mask": mask is not None})
        return naive.attention(q, k, v, causal=causal, window=window, mask=mask)

    assert all(conforms(records, case) for case in (CAUSAL, WINDOW, CHUNKED))
    assert {"causal": True, "window": None, "mask": False} in seen
    assert {"causal": False, "window": (4, 0), "mask": False} in seen
    assert any(call["mask"] for call in seen)


def test_functions_of_places_are_closures_with_one_code() -> None:
    given: list[Any] = []

    def attention(q: Any, k: Any, v: Any, *, mask_mod: Any = None, score_mod: Any = None) -> Any:
        given.append((mask_mod, score_mod))
        return q

    call = build_implementation(attention, "kernel").call
    for window, step in ((3, 0.5), (4, 0.25), (3, 0.5)):
        call(0, 0, 0, mask_mod=MaskFunction(Window(window, 0)), score_mod=Alibi(step=step))
    first, second, again = given
    for one, other, same in zip(first, second, again, strict=True):
        assert one.__code__ is other.__code__
        assert one is not other
        assert one is same
    assert [mask(0, 0, 5, 2) for mask in (first[0], second[0])] == [True, True]
    assert [mask(0, 0, 5, 1) for mask in (first[0], second[0])] == [False, True]


def test_ignored_keywords_fail() -> None:
    def ignores(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return naive.attention(q, k, v)

    assert not conforms(ignores, CAUSAL)
    # What has to be offered is not: nobody who takes whatever there is has said that he knows it.
    taken = build_implementation(ignores, "ignores")
    assert taken.supports(parse_case_id(CAUSAL)) is None
    assert "alibi_slopes" in str(taken.supports(dataclasses.replace(parse_case_id(CAUSAL), alibi=True)))


def returning(*names: str) -> Callable[..., Any]:
    def kernel(q: Any, k: Any, v: Any, *, causal: bool = False, save_residuals: Any = False) -> Any:
        out, residuals = naive.attention(q, k, v, causal=causal, save_residuals=True)
        return (out, {name: residuals[name] for name in names}) if save_residuals else out

    return kernel


@pytest.mark.parametrize("names", [(), ("logsumexp",), ("max_logits",), ("logsumexp", "max_logits")])
def test_a_missing_residual_is_one_not_offered(names: tuple[str, ...]) -> None:
    kernel = returning(*names)
    assert build_implementation(kernel, "kernel").residuals == set(names)
    assert build_implementation(kernel, "kernel").differentiable_residuals == {"logsumexp"} & set(names)
    found = {r.observable: r.verdict for r in judge(kernel, CAUSAL, "residuals")}
    for name in ("logsumexp", "max_logits"):
        assert found[name] == (PASS if name in names else UNSUPPORTED)


def test_residuals_are_traced_on_a_case_that_is_supported() -> None:
    @declare(unsupported={"f32": "half precision only", "full": "causal only"})
    def picky(q: Any, k: Any, v: Any, *, causal: bool = False, save_residuals: Any = False) -> Any:
        assert causal
        assert q.dtype == "bfloat16"
        return returning("logsumexp")(q, k, v, causal=causal, save_residuals=save_residuals)

    assert build_implementation(picky, "kernel").residuals == {"logsumexp"}


@pytest.mark.parametrize("refused", [("train",), ("train", "prefill")])
def test_residuals_are_traced_where_training_is_not_supported(refused: tuple[str, ...]) -> None:
    served = declare(unsupported=dict.fromkeys(refused, "for serving"))(returning("logsumexp"))
    assert build_implementation(served, "kernel").residuals == {"logsumexp"}


def test_residuals_returned_in_another_form_are_an_error_that_says_what_is_needed() -> None:
    def pair(q: Any, k: Any, v: Any, *, causal: bool = False, save_residuals: Any = False) -> Any:
        out, residuals = naive.attention(q, k, v, causal=causal, save_residuals=True)
        return (out, residuals["logsumexp"]) if save_residuals else out

    (found,) = judge(pair, CAUSAL, "residuals")
    assert found.verdict == ERROR
    assert "must return (out, {'logsumexp': ..., 'max_logits': ...})" in found.reason


def two(q: Any, k: Any) -> Any:
    return q


def mystery(q: Any, k: Any, v: Any, mystery: Any) -> Any:
    return q


def mask_third(q: Any, k: Any, mask: Any, v: Any) -> Any:
    return q


def positional_mask(q: Any, k: Any, v: Any, mask: Any, /) -> Any:
    return q


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (3, "kernel is a int, not a function"),
        (two, "kernel(q, k) does not take q, k, v"),
        (mystery, "needs the argument 'mystery'"),
        (mask_third, "takes 'mask' where q, k or v must be"),
        (positional_mask, "needs the argument 'mask', which is none of"),
        (lambda *, q, k, v: q, "does not take q, k, v"),
        (min, "kernel has no signature"),
    ],
)
def test_what_is_no_attention_function_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(NotAnAttentionFunction) as caught:
        build_implementation(thing, "kernel")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_declared_products_and_their_override() -> None:
    declared = declare(products="tf32")(lambda q, k, v: q)
    assert build_implementation(declared, "kernel").arithmetic.products == "tf32"
    assert build_implementation(declared, "kernel", products="bf16").arithmetic.products == "bf16"
    assert build_implementation(functools.partial(declared), "kernel").arithmetic.products == "tf32"


def test_the_description_is_the_first_line_of_the_docstring() -> None:
    first_line = str(naive.attention.__doc__).splitlines()[0]
    assert build_implementation(naive.attention, "kernel").description == first_line
    described = build_implementation(functools.partial(naive.attention, soft_cap=None), "kernel").description
    assert described == first_line


def test_where_queries_stand_is_declared() -> None:
    seen: list[tuple[bool, object, bool]] = []

    def records(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, mask: Any = None) -> Any:
        seen.append((causal, window, mask is not None))
        kept = k.shape[1] - q.shape[1]
        own: Mask = Full()
        if causal or window:
            own = Causal(kept) if causal else Window(window[0], window[1], kept)
        allowed = own.dense(q.shape[1], k.shape[1])
        return naive.attention(q, k, v, mask=allowed if mask is None else allowed & mask)

    shape = "train/f32/B1.T16.S24.N2.K2.H16.V16"
    at_end = declare(causal="end")(records)
    for case in ("causal-o8", "window-l4-r0-o8", "causal", "window-l4-r0"):
        assert conforms(at_end, f"{shape}/{case}/normal/s0"), case
    assert (True, None, False) in seen
    assert (False, (4, 0), False) in seen
    assert not conforms(declare(causal="start")(records), f"{shape}/causal/normal/s0")
    only_end = build_implementation(declare(causal="end")(functools.partial(only_causal)), "kernel")
    assert only_end.supports(parse_case_id(f"{shape}/causal-o8/normal/s0")) is None
    reasons = [only_end.supports(parse_case_id(f"{shape}/causal{offset}/normal/s0")) for offset in ("", "-o3")]
    assert reasons == [
        f"causal: {where}, and the function declares it at the end" for where in ("at the start", "at neither end")
    ]


def test_logits_in_f16_are_not_asked_for_what_f16_does_not_hold() -> None:
    huge = parse_case_id("train/f16/B1.T16.S16.N2.K2.H16.V16/full/huge/s0")
    assert build_implementation(only_three, "kernel").supports(huge) is None
    narrow = declare(logits="input")(functools.partial(only_three))
    reason = build_implementation(narrow, "kernel").supports(huge)
    assert reason is not None
    assert reason.startswith("huge: logits beyond 65504")


def test_a_result_in_another_dtype_fails_as_out_and_its_gradients_are_judged() -> None:
    def wide(q: Any, k: Any, v: Any) -> Any:
        return naive.attention(q, k, v).astype("float32")

    found = judge(wide, FULL.replace("f32", "bf16"), "forward", "primal", "gradients", "linearity")
    assert {record.verdict for record in found} == {PASS, FAIL}
    for record in found:
        assert (record.verdict == FAIL) == (record.observable == "out"), record
        assert record.verdict == PASS or "dtype is float32, must be that of q, bfloat16" in record.reason


@pytest.mark.parametrize(
    ("declared", "array", "left_out"),
    [({}, "dropout_key", "dropout_mask"), ({"dropout_mask": "given"}, "dropout_mask", "dropout_key")],
)
def test_of_key_and_mask_one_decides_what_is_dropped(declared: Any, array: str, left_out: str) -> None:
    @declare(**declared)
    def both(
        q: Any, k: Any, v: Any, *, dropout_rate: Any = 0.0, dropout_key: Any = None, dropout_mask: Any = None
    ) -> Any:
        """Take both."""

    implementation = build_implementation(both, "both")
    assert "dropout" in implementation.offers
    assert implementation.unasked == (left_out,)
    problem = draw_problem(parse_case_id("train/f32/B1.T8.S8.N1.K1.H8.V8/full/dropout0.25/normal/s0"))
    assert array in Executor(implementation).arguments(problem)[1]


@pytest.mark.parametrize("alone", ["dropout_rate", "dropout_key", "dropout_mask"])
def test_a_parameter_of_dropout_alone_is_named_as_never_called(alone: str) -> None:
    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Take one of the parameters."""

    kinds = inspect.Parameter
    parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in "qkv"]
    named = inspect.Signature([*parameters, kinds(alone, kinds.KEYWORD_ONLY, default=None)])
    vars(attention)["__signature__"] = named
    implementation = build_implementation(attention, "alone")
    assert "dropout" not in implementation.offers
    assert implementation.unasked == (alone,)
