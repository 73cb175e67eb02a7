"""Foreign functions are adapted as they are meant, and a bug is never taken for a convention without a question."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conformance
from conformance.adaptation.adapting import Adapted, adapt
from conformance.adaptation.modules import CannotAdapt
from conformance.execution.implementation_registry import find_implementation
from tests.adaptation.foreign import STYLES, make_foreign
from tests.planted.bank import BANK

_LONG = 3600.0  # no test depends on how fast the machine is
_BUGS = {bug.name: bug for bug in BANK}
_SEEN = ("scale-dropped", "window-one-key-too-few", "causal-at-bottom-right")
_FAMILIES = (
    *("backward", "blocks", "heads", "hidden pairs", "masks", "precision", "residuals", "scale", "soft cap", "windows"),
)


@functools.cache
def _adapt(style: str, bug: str = "") -> Adapted:
    implementation = _BUGS[bug].build() if bug else find_implementation("dot_product")
    return adapt(make_foreign(implementation, STYLES[style]), seconds=_LONG)


def test_adapts_conventions_of_flash_attention() -> None:
    adapted = _adapt("flash-attention")
    assert list(inspect.signature(adapted.function).parameters) == [
        *("q", "k", "v", "causal", "window", "mask", "soft_cap", "scale", "save_residuals")
    ]
    assert (adapted.declaration.causal, adapted.declaration.empty_rows) == ("end", "zero")
    assert any("aligned at the end" in question for question in adapted.open_questions)
    assert not any("raises" in answer.answer or "none" in answer.answer for answer in adapted.evidence)
    compile(adapted.source, "adapter.py", "exec")


@pytest.mark.long
@pytest.mark.parametrize("style", ["heads first", "sequence first"])
def test_adapter_of_another_style_conforms(style: str) -> None:
    adapted = _adapt(style)
    base = STYLES[style].logsumexp[1]
    assert adapted.declaration.logsumexp_base == base
    answered = conformance.declare(
        **{
            field.name: getattr(adapted.declaration, field.name)
            for field in dataclasses.fields(adapted.declaration)
            if field.name != "open_questions"
        }
    )(adapted.function)
    report = conformance.check(answered, level="smoke", checks=("forward", "residuals", "gradients"), progress=False)
    assert report.conforms, report


def _pick_bugs() -> list[str]:
    """Pick four bugs of each family, without those by day."""
    names = []
    for family in _FAMILIES:
        fit = [bug for bug in BANK if bug.family == family and bug.name not in _SEEN]
        names += [bug.name for bug in fit[:4]]
    return names


@pytest.mark.parametrize("name", [*_SEEN, *(pytest.param(name, marks=pytest.mark.nightly) for name in _pick_bugs())])
def test_no_bug_is_taken_for_a_convention_without_a_question(name: str) -> None:
    style = "heads first" if name.startswith(("window", "causal")) else "flash-attention"
    right, wrong = _adapt(style), _adapt(style, name)
    unanswered = dataclasses.replace(wrong.declaration, open_questions=right.declaration.open_questions)
    more = set(wrong.open_questions) - set(right.open_questions)
    assert more or unanswered == right.declaration, wrong.source
    if name in _SEEN:
        assert more, wrong.source


def _fail(q: Any, k: Any, v: Any) -> Any:
    raise ValueError("nothing works")


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (_fail, "nothing works"),
        (lambda x: x, "has x"),
        (lambda q, k, v: jnp.zeros(3), r"returned float32\[3\]"),
    ],
)
def test_function_that_is_no_attention_is_refused_with_the_reason(function: Callable[..., Any], named: str) -> None:
    with pytest.raises(CannotAdapt, match=named):
        adapt(function, seconds=_LONG)


def _attend(query: Any, key: Any, value: Any, sm_scale: Any = None) -> Any:
    scale = query.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    x = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") * scale
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x), value, precision="highest")


def test_questions_without_time_are_open() -> None:
    adapted = adapt(_attend, seconds=0.0)
    assert any("time was over" in question for question in adapted.open_questions)


def test_function_with_open_questions_does_not_conform() -> None:
    @conformance.declare(open_questions=("Is it meant?",))
    def asked(q: Any, k: Any, v: Any, *, scale: Any = None) -> Any:
        return _attend(q, k, v, scale)

    case = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/normal/s0"
    report = conformance.check(asked, case=case, checks="forward", progress=False)
    assert not report.conforms
    assert not report.findings
    assert "open question" in str(report)


def test_check_adapts() -> None:
    case = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/normal/s0"
    report = conformance.check(_attend, adapt=True, case=case, checks="forward", progress=False)
    assert "_attend" in str(report)
    assert not report.findings


def test_numpy_operands_reach_the_adapter_unchanged() -> None:
    adapted = adapt(_attend, seconds=_LONG)
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 5, 3, 8)).astype(np.float32)
    np.testing.assert_array_equal(adapted(q, k, v), _attend(q, k, v))
