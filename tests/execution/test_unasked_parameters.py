"""Parameters of a plain function to which nothing is passed: which they are, and what its author may have meant."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

from cases.parameter_names import find_operand, is_tuning, name_parameters
from conformance import declare
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from tests.kernels import naive


def flash(
    q: Any,
    k: Any,
    v: Any,
    *,
    window_size: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    seed: int = 0,
    block_q: int = 64,
    interpret: bool = False,
    _private: int = 0,
) -> Any:
    """Attend, and use none of the parameters but `causal`."""
    return naive.attention(q, k, v, causal=causal)


def find_unasked(function: Callable[..., Any]) -> tuple[str, ...]:
    return build_implementation(function, "kernel").unasked


def test_parameters_that_get_nothing_are_named_and_tuning_is_not() -> None:
    assert find_unasked(flash) == ("window_size", "softmax_scale", "seed")
    assert find_unasked(naive.attention) == ()


def test_what_is_declared_or_bound_needs_no_value() -> None:
    assert find_unasked(declare(ignores=("window_size", "seed"))(functools.partial(flash))) == ("softmax_scale",)
    bound = functools.partial(flash, window_size=None, seed=3)
    assert find_unasked(bound) == ("softmax_scale",)
    assert find_unasked(jax.jit(bound, static_argnames="causal")) == ("softmax_scale",)


def test_what_is_declared_to_be_ignored_must_be_a_parameter_that_gets_nothing() -> None:
    for name, hint in (("windowsize", "did you mean 'window_size'"), ("causal", "known are window_size")):
        with pytest.raises(NotAnAttentionFunction, match=f"kernel ignores '{name}'.*{hint}"):
            find_unasked(declare(ignores=(name,))(functools.partial(flash)))
    with pytest.raises(TypeError, match="ignores"):
        declare(ignores="window_size")


def test_a_function_that_takes_any_parameter_is_told_of_those_that_it_names() -> None:
    def takes_any(*operands: Any, window_size: Any = None, **options: Any) -> Any:
        raise AssertionError("nothing is asked of it")

    assert find_unasked(takes_any) == ("window_size",)


def test_stored_operands_have_names_of_their_own() -> None:
    def packed(
        q: Any, k: Any, v: Any, *, cu_q_lens: Any, cu_kv_lens: Any, num_seqs: Any, bias: Any = None, softcap: Any = None
    ) -> Any:
        raise AssertionError("nothing is asked of it")

    assert find_unasked(packed) == ("bias", "softcap")


@pytest.mark.parametrize(
    ("parameter", "operand"),
    [
        ("is_causal", "causal"),
        ("window_size", "window"),
        ("attn_mask", "mask"),
        ("sm_scale", "scale"),
        ("logits_soft_cap", "soft_cap"),
        ("ab", "bias"),
        ("cu_seqlens_q", "segment_ids"),
        ("s_aux", "sinks"),
        ("return_lse", "save_residuals"),
        ("bias", "bias"),
        ("dropout_rate", ""),
        ("block_q", ""),
    ],
)
def test_the_table_says_which_operand_is_probably_meant(parameter: str, operand: str) -> None:
    assert find_operand(parameter) == operand
    assert is_tuning(parameter) == (parameter == "block_q")


def test_an_operand_is_named_beside_the_parameter_unless_they_are_the_same() -> None:
    said = name_parameters(("window_size", "bias", "seed"))
    assert said == "`window_size` (is it `window`?), `bias`, `seed`"


def test_every_parameter_of_our_own_implementations_is_passed() -> None:
    names = implementation_registry.list_implementations()
    assert [name for name in names if implementation_registry.find_implementation(name).unasked] == []
