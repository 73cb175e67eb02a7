"""Pages with scales of sequences, of blocks and of channels: correct kernels pass, and each planted bug is red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from cases.case_id import parse_case_id
from cases.quantization import READ_CACHES
from conformance.check_api.scopes import ImplementationGrids
from conformance.execution import implementation_registry
from impls.contract.implementation import Implementation
from reports.records import FAIL, PASS
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.planting.latent import scaled_latent
from tests.planted.planting.scaled_pages import build_at_once, build_by_page
from tests.planted.planting.served import scaled, whole
from tests.planted.serving.page_formats import BUGS, OFFERED

_BUILDERS = [build_at_once, build_by_page]


def _format_case(cache: str, dtype: str = "f32", storage: str = "paged16") -> str:
    sizes, ends = "B4.T13.S45.N4.K2.H64.V96", "own-l20-45-20-17-9"
    return f"prefill/{dtype}/{sizes}/{ends}/softcap2/{cache}/{storage}-q13-1-1-9/normal/s0"


CASES = {
    "fp8-sequence": _format_case("kvfp8-sequence"),
    "int8-sequence": _format_case("kvint8-sequence", storage="shared5"),
    "mxfp8": _format_case("kvmxfp8-block"),
    "nvfp4": _format_case("kvnvfp4-block", storage="shared5"),
    "nvfp4-bf16": _format_case("kvnvfp4-block", "bf16"),
    "uint8": _format_case("kvuint8-channel", storage="shared5"),
    "uint8-bf16": _format_case("kvuint8-channel", "bf16"),
    "queries": _format_case("kvfp8-sequence/qfp8"),
    "queries-bf16": _format_case("kvfp8-sequence/qfp8", "bf16"),
}


def _build_right(build: Callable[..., Implementation]) -> Implementation:
    return build("right", features=OFFERED)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    assert bug.trigger is not None
    found = set()
    for case in CASES.values():
        if bug.build().supports(parse_case_id(case)) is None and bug.trigger(parse_case_id(case)):
            judged = judge(bug.build(), case, "forward") + judge(bug.build(), case, "residuals")
            found |= {one.observable.split(".")[0] for one in judged if one.verdict == FAIL}
    assert found & set(bug.shows)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("check", ["forward", "residuals", "poison", "independence", "linearity"])
def test_our_kernel_passes(case: str, check: str) -> None:
    ours = implementation_registry.find_implementation("paged_quantized")
    assert {one.verdict for one in judge(ours, case, check)} == {PASS}


@pytest.mark.parametrize("build", _BUILDERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("check", ["forward", "residuals", "poison", "independence"])
def test_a_correct_kernel_passes(build: Callable[..., Implementation], case: str, check: str) -> None:
    assert {one.verdict for one in judge(_build_right(build), case, check)} == {PASS}


_OF_LATENTS = "prefill/f32/B4.T13.S45.N4.K1.H80.V64/own-l20-45-20-17-9/softcap2/scale0.144"
LATENTS = {cache: f"{_OF_LATENTS}/{cache}/latent5-q13-1-1-9/normal/s0" for cache in ("kvint8-token", "kvfp8-tensor")}


@pytest.mark.parametrize("case", LATENTS.values(), ids=LATENTS)
@pytest.mark.parametrize("name", ["planted", "paged_latent_quantized"])
def test_a_correct_kernel_of_latents_with_scales_passes(name: str, case: str) -> None:
    kernel = scaled_latent("right") if name == "planted" else implementation_registry.find_implementation(name)
    for check in ("forward", "residuals", "poison", "independence"):
        assert {one.verdict for one in judge(kernel, case, check)} == {PASS}


@pytest.mark.parametrize(
    ("case", "scales"),
    [
        ("kvint8-token", lambda scales, scale: (scales, jnp.ones_like(scales), scale, scale)),
        ("kvint8-token", lambda scales, scale: (jnp.roll(scales, 1, axis=1), scales, scale, scale)),
        ("kvint8-token", lambda scales, scale: (scales[::-1], scales, scale, scale)),
        ("kvfp8-tensor", lambda scales, scale: (scales, scales, scale, 1.0)),
        ("kvfp8-tensor", lambda scales, scale: (scales, scales, scale * scale, scale)),
    ],
    ids=["values-unscaled", "of-the-next-row", "of-another-page", "value-unscaled", "key-scaled-twice"],
)
def test_wrong_scales_of_latents_are_red(case: str, scales: Callable[..., Any]) -> None:
    assert FAIL in {one.verdict for one in judge(scaled_latent("wrong", scales), LATENTS[case], "forward")}


def test_only_functions_with_the_parameters_get_the_cases() -> None:
    def count(implementation: Implementation) -> Any:
        grids = ImplementationGrids(implementation, "quick", 0)
        return {case.kv_cache for case in (*grids.grid.cases, *grids.sizes.cases)}

    assert count(scaled("scaled")) == {"kvint8-token", "kvfp8-token"}
    assert count(whole("whole")) == {"kvint8-tensor", "kvfp8-tensor"}
    assert count(build_at_once("own", features=OFFERED)) == {*READ_CACHES}
