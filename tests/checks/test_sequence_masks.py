"""Masks and operands over stored sequences: correct kernels in two styles pass, and each planted bug is red."""

from __future__ import annotations

import pytest

from reports.records import FAIL, PASS
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.planting import masked
from tests.planted.planting.masked import MaskSteps
from tests.planted.serving.sequence_masks import PACKED, PAGED

PAGES = {
    name: f"prefill/f32/B4.T13.S45.N4.K2.H16.V16/{mask}_at-45-16-17-9/{operands}paged16-q13-1-1-9/normal/s0"
    for name, mask, operands in (
        ("chunks", "chunked-7", ""),
        ("varying", "varying-l2", ""),
        ("ahead", "window-l9-r3", ""),
        ("array", "dense-d40", ""),
        ("tree", "tree-13-1-1-9", ""),
        ("alibi", "causal_or_spans-2-11", "softcap2/alibi/"),
        ("score", "chunked-16", "softcap2/score-rows/"),
        ("relative", "causal_or_spans-2-11", "score-relative/"),
        ("scale", "chunked-16", "softcap2/alibi/logitscale/"),
    )
}
PAGES["far"] = "prefill/f32/B2.T3.S700.N4.K2.H16.V16/chunked-400_at-700-9/alibi/paged16-q3-2/normal/s0"
PACKS = {
    name: f"train/f32/B4.T30.S30.N4.K2.H16.V16/{mask}_at-24-1-17-30/{operands}packed-q20-1-17-22/normal/s0"
    for name, mask, operands in (
        ("chunks", "chunked-7", ""),
        ("tree", "tree-20-1-17-22", ""),
        ("segments", "window-linf-r2", "seg/"),
        ("wild", "window-linf-r2", "segwild/"),
        ("alibi", "causal_or_spans-2-11", "softcap2/alibi/"),
        ("score", "chunked-16", "score-alibi/"),
        ("scale", "chunked-16", "logitscale/"),
    )
}
# The case that shows a bug, by the name that the bug's begins with; the first line that fits counts.
SHOWN_IN_PAGES = {
    "stored-function-of-the-first": "varying",
    "stored-function-of-key": "varying",
    "stored-function": "chunks",
    "stored-causal": "ahead",
    "stored-right": "ahead",
    "stored-window": "ahead",
    "stored-mask": "array",
    "stored-tree": "tree",
    "stored-slopes-of-places": "far",
    "stored-slopes": "alibi",
    "stored-score-of-the-place": "relative",
    "stored-score": "score",
    "stored-logit": "scale",
}
SHOWN_IN_PACKS = {
    "stored-packed-function": "chunks",
    "stored-packed-chunks": "chunks",
    "stored-packed-parents": "tree",
    "stored-packed-segments-in": "wild",
    "stored-packed-segments": "segments",
    "stored-packed-slopes": "alibi",
    "stored-packed-score": "score",
    "stored-packed-logit": "scale",
}


def find_red(bug: PlantedBug, shown: dict[str, str], cases: dict[str, str]) -> set[str]:
    """Return the red observables of the case that shows the bug."""
    name = next(case for start, case in shown.items() if bug.name.startswith(start))
    check = "gradients" if "dq" in bug.shows else "forward"
    return {one.observable.split(".")[0] for one in judge(bug.build(), cases[name], check) if one.verdict == FAIL}


@pytest.mark.parametrize("bug", PAGED, ids=lambda bug: bug.name)
def test_a_planted_bug_over_pages_is_red(bug: PlantedBug) -> None:
    assert find_red(bug, SHOWN_IN_PAGES, PAGES) & set(bug.shows)


@pytest.mark.parametrize("bug", PACKED, ids=lambda bug: bug.name)
def test_a_planted_bug_over_packed_sequences_is_red(bug: PlantedBug) -> None:
    assert find_red(bug, SHOWN_IN_PACKS, PACKS) & set(bug.shows)


@pytest.mark.parametrize("case", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("check", ["forward", "residuals", "poison"])
def test_a_correct_kernel_over_pages_passes(case: str, check: str) -> None:
    judged = judge(masked.build_paged(MaskSteps(), "right"), case, check)
    assert {one.verdict for one in judged} == {PASS}


@pytest.mark.parametrize("case", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("check", ["forward", "residuals", "gradients"])
def test_a_correct_kernel_over_packed_sequences_passes(case: str, check: str) -> None:
    judged = judge(masked.build_packed(MaskSteps(), "right"), case, check)
    assert {one.verdict for one in judged} <= {PASS, "unsupported"}
    assert PASS in {one.verdict for one in judged}
