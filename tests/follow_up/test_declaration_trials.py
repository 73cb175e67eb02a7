"""Findings that a declaration covers are told from what is wrong, and no bug passes for a convention."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import conformance
from cases.case_id import parse_case_id
from cases.masks import Causal, Full, Mask, Window
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.follow_up import bug_diagnosis, follow_up
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sensitivity.error_profiles import load_profiles
from conformance.session.run_result import merge_runs
from impls.contract.implementation import Implementation
from reports import terminal
from reports.causes.finding import FORWARD, GRADIENTS
from reports.causes.finding_text import FindingText
from reports.causes.sorts import DIFFERS, WRONG
from reports.html_fragment import render_fragment
from reports.page_model import Summary, build_summary
from reports.records import ERROR, FAIL, Run, read_runs
from tests.bank import PlantedBug
from tests.kernels import naive
from tests.planted.bank import BANK
from tests.reports.report_samples import make_record, make_run_info, render_html, render_markdown

GROUPED, WIDE, WIDER, TALL, LONG = (
    f"{sizes}.H32.V32"
    for sizes in ("B2.T40.S40.N4.K2", "B2.T24.S56.N2.K2", "B1.T16.S80.N2.K2", "B2.T72.S40.N2.K2", "B1.T200.S200.N2.K2")
)
EQUAL = "B2.T40.S40.N2.K2.H32.V32"


def name_case(mask: str = "full", options: str = "", *, dtype: str = "f32", sizes: str = EQUAL) -> str:
    return f"train/{dtype}/{sizes}/{mask}/{options}normal/s0"


CASES = (
    *(name_case(), name_case(sizes=WIDE), name_case(sizes=LONG)),
    *(name_case("causal"), name_case("causal", sizes=WIDE), name_case("causal-o32", sizes=WIDE)),
    *(name_case("window-l7-r2", sizes=WIDE), name_case("window-l7-r0", sizes=TALL)),
    *(name_case("full", option) for option in ("softcap2/", "softcap2/biashead/", "biashead/", "sinks/")),
    *(name_case("causal", "scale0.3/", sizes=GROUPED), name_case("full", "sinks/", sizes=GROUPED)),
    *(name_case("causal", dtype="bf16", sizes=GROUPED), name_case("full", "sinks/", dtype="bf16")),
)
"""Cases with one feature each, and few with two."""
CHECKS = ("forward", "residuals", "gradients")
PAIRS = (
    *(("causal", sizes) for sizes in (WIDE, WIDER, EQUAL, GROUPED, LONG)),
    *(("full", sizes) for sizes in (WIDE, WIDER, EQUAL, GROUPED)),
)


def judge(
    kernel: Implementation, cases: Sequence[str] = CASES, checks: Sequence[str] = CHECKS, *, diagnose: float = 0.0
) -> Summary:
    """Judge a kernel on some cases, follow up on its findings, and return what reports show.

    They are compared with planted bugs for `diagnose` seconds.
    """
    run = Run(started="", command="run", level="quick", seeds=(), tolerances=(), kernels={}, resumed=())
    journal, runner = Journal([], run), Runner(Settings(), confirmed=0)
    for case in map(parse_case_id, cases):
        if kernel.supports(case) is None:
            journal.add_records(runner.judge(Job(kernel, case, tuple(CHECKS_BY_NAME[name] for name in checks))))
    seconds = follow_up.FollowUpSeconds(math.inf, diagnose)
    follow_up.follow_up(journal, [kernel], runner, seconds, spent=0.0, say=lambda line: None)
    records, info = merge_runs([dataclasses.replace(journal.recorded, run=None)], command="run")
    return build_summary(records, info)


def find_bug(name: str) -> PlantedBug:
    return next(bug for bug in BANK if bug.name == name)


def make_plain(name: str, *, offset: Callable[[int, int], int] = lambda q, kv: 0) -> Implementation:
    """Return a planted bug as a plain function, with its masks aligned by `offset`."""
    bug = find_bug(name).build()

    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: Any = False,
        window: Any = None,
        bias: Any = None,
        sinks: Any = None,
        soft_cap: Any = None,
        scale: Any = None,
        save_residuals: Any = False,
    ) -> Any:
        first = offset(q.shape[1], k.shape[1])
        mask: Mask = Causal(first) if causal else Full()
        if window is not None:
            left, right = window
            side = Window(left, right, first)
            mask = mask & side if causal else side
        options = {"bias": bias, "sinks": sinks, "soft_cap": soft_cap, "scale": scale}
        static, arrays = bug.lower_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        return bug.call(q, k, v, **static, **arrays, save_residuals=save_residuals, **options)

    return build_implementation(attention, "it")


AT_THE_END = """
from conformance import declare
from tests.kernels import naive


def attend(q, k, v, causal, sinks):
    shift = k.shape[1] - q.shape[1]
    if not causal:
        return naive.attention(q, k, v, sinks=sinks)
    import jax.numpy as jnp

    i, j = jnp.arange(q.shape[1])[:, None] + shift, jnp.arange(k.shape[1])[None, :]
    return naive.attention(q, k, v, mask=(j <= i)[None, None], sinks=sinks)


@declare(behind_mask="finite")
def attention(q, k, v, *, causal=False):
    return attend(q, k, v, causal, None)


@declare(behind_mask="finite")
def without_sinks(q, k, v, *, causal=False, sinks=None):
    return attend(q, k, v, causal, None)
"""


@pytest.fixture
def at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kernel.py").write_text(AT_THE_END)


@pytest.mark.usefixtures("at_the_end")
def test_a_causal_mask_at_the_end_is_proposed_and_a_bug_beside_it_is_wrong() -> None:
    kernel = KernelOptions(in_process=True).find("kernel.py:without_sinks")
    cases = [name_case(mask, option, sizes=sizes) for mask, sizes in PAIRS for option in ("", "sinks/")]
    summary = judge(kernel, cases, ("forward",), diagnose=300.0)
    differs, wrong = sorted(summary.findings, key=lambda text: text.sort)
    assert (differs.sort, differs.declarations) == (DIFFERS, ('causal="end"',))
    assert (wrong.sort, wrong.declarations) == (WRONG, ())
    assert "sinks" in wrong.title
    assert any("sinks-ignored" in line for line in wrong.resemblance)
    assert differs.diagnosis is None  # it is likened to no planted bug
    assert not differs.resemblance
    (proposal,) = summary.proposals
    assert proposal.code == ('@declare(causal="end")',)
    assert proposal.left == f"with it, finding {wrong.number} is left"
    records, info = summary.groups.records, summary.run
    shown = (render_html(records, info), render_markdown(records, info), render_fragment(summary))
    for text in (*shown, "\n".join(terminal.format_findings(summary))):
        assert proposal.left in text
        assert "declare it or mend it" in text


@pytest.mark.usefixtures("at_the_end")
def test_what_is_proposed_is_in_the_file_and_in_what_python_gets(tmp_path: Path) -> None:
    report = conformance.check(
        "kernel.py:attention", level="smoke", cases="*/causal/*", checks="forward", confirm_seconds=60.0
    )
    assert not report.conforms
    assert [(one.sort, one.declarations) for one in report.findings] == [("differs", ('causal="end"',))]
    (recorded,) = read_runs(report.save(tmp_path / "run.jsonl"))
    records, info = merge_runs([recorded], command="report")
    assert build_summary(records, info).proposals == report.session.summary.proposals


@pytest.mark.usefixtures("at_the_end")
def test_conventions_are_tried_in_a_sandbox_too() -> None:
    kernel = KernelOptions().find("kernel.py:attention")
    summary = judge(kernel, (name_case("causal"), name_case("causal", sizes=WIDE), name_case(sizes=WIDE)), ("forward",))
    assert [text.declarations for text in summary.findings] == [('causal="end"',)]
    assert [one.left for one in summary.proposals] == ["with it, no finding is left"]


def test_a_declaration_that_breaks_what_is_right_is_not_proposed() -> None:
    """The causal mask is at the end, and the window at the start: no declaration says that."""
    summary = judge(make_plain("causal-at-bottom-right"))
    assert [text.sort for text in summary.findings] == [WRONG]
    assert not summary.proposals


@jax.custom_vjp
def attend_at_the_end(q: Any, k: Any, v: Any) -> Any:
    """Compute attention under a causal mask at the end, with the gradients of one at the start."""
    rows, columns = jnp.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], jnp.arange(k.shape[1])
    return naive.attention(q, k, v, mask=(columns <= rows)[None, None])


def pull_back_at_the_start(operands: Any, do: Any) -> Any:
    _, pull_back = jax.vjp(functools.partial(naive.attention, causal=True), *operands)
    return pull_back(do)


attend_at_the_end.defvjp(lambda *operands: (attend_at_the_end(*operands), operands), pull_back_at_the_start)


@declare(behind_mask="finite")
def disagree_with_oneself(q: Any, k: Any, v: Any, *, causal: Any = False) -> Any:
    """Compute attention whose causal mask is at the end in the forward pass, and at the start in the backward pass."""
    return attend_at_the_end(q, k, v) if causal else naive.attention(q, k, v)


def test_a_backward_pass_that_is_wrong_under_another_convention_is_no_convention() -> None:
    kernel = build_implementation(disagree_with_oneself, "it")
    cases = [name_case(mask, sizes=sizes) for mask in ("causal", "full") for sizes in (EQUAL, WIDE, WIDER)]
    (text,) = judge(kernel, cases, ("forward", "gradients")).findings
    assert (text.finding.kind, text.sort) == (FORWARD, WRONG)


def test_a_wrong_backward_pass_is_left_beside_a_convention() -> None:
    """The backward pass has its causal blocks at the start, and is wrong without a mask too if T is not S."""
    kernel = make_plain("bwd-causal-aligned-at-start", offset=lambda q, kv: kv - q)
    cases = [name_case(mask, sizes=sizes) for mask in ("causal", "full") for sizes in (EQUAL, WIDE, WIDER)]
    found = judge(kernel, cases, ("forward", "gradients")).findings
    assert [(text.finding.kind, text.declarations) for text in found] == [(FORWARD, ('causal="end"',)), (GRADIENTS, ())]


def test_two_declarations_that_cases_need_together_are_found_together() -> None:
    kernel = make_plain("cap-before-bias", offset=lambda q, kv: kv - q)
    options = ("", "softcap2/", "biashead/", "softcap2/biashead/")
    cases = [name_case(mask, option, sizes=sizes) for mask, sizes in PAIRS for option in options]
    (proposal,) = judge(kernel, cases, ("forward",)).proposals
    (decorator,) = proposal.code
    assert set(decorator.removeprefix("@declare(").removesuffix(")").split(", ")) == {
        'causal="end"',
        'soft_cap="before_bias"',
    }
    assert proposal.left == "with it, no finding is left"


@declare(behind_mask="finite")
def attend_in_window(q: Any, k: Any, v: Any, *, window: Any = None) -> Any:
    """Compute attention in a window whose open sides are -1."""
    sides = None if window is None else tuple(None if side < 0 else side for side in window)
    return naive.attention(q, k, v, window=sides)


@declare(behind_mask="finite")
def refuse_sinks(q: Any, k: Any, v: Any, *, sinks: Any = None) -> Any:
    """Compute attention without sinks."""
    if sinks is not None:
        raise ValueError("no sinks")
    return naive.attention(q, k, v)


@pytest.mark.parametrize(
    ("function", "case", "declaration"),
    [
        (attend_in_window, name_case("window-linf-r3"), "open_sides=-1"),
        (refuse_sinks, name_case("full", "sinks/"), 'refuses="ValueError"'),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_conventions_of_calls_are_proposed(function: Callable[..., Any], case: str, declaration: str) -> None:
    summary = judge(build_implementation(function, "it"), (name_case(), case), ("forward",))
    assert [text.declarations for text in summary.findings] == [(declaration,)]


@pytest.mark.parametrize(("how", "named"), [("heads_first", "[B, N, T, H]"), ("scale_of_one", "scale of 1")])
def test_a_convention_that_no_declaration_has_is_to_be_wrapped(how: str, named: str) -> None:
    @declare(behind_mask="finite")
    def attention(q: Any, k: Any, v: Any, *, causal: Any = False) -> Any:
        if how == "scale_of_one":
            return naive.attention(q, k, v, causal=causal, scale=1.0)
        return naive.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=causal).swapaxes(1, 2)

    cases = (name_case(sizes=EQUAL), name_case("causal"), name_case(sizes=LONG))
    summary = judge(build_implementation(attention, "it"), cases, ("forward",))
    assert {text.sort for text in summary.findings} == {DIFFERS}
    (proposal,) = summary.proposals
    assert named in proposal.heading
    assert proposal.code == ("python -m conformance adapt --impl=it",)


def test_what_a_declaration_loosens_is_said() -> None:
    cases = [name_case(sizes=sizes, dtype="bf16") for sizes in (EQUAL, GROUPED)]
    (text,) = judge(make_plain("logits-rounded-to-operands"), [name_case(), *cases]).findings
    assert text.declarations == ('logits="input"',)
    assert any("loosens" in fact and "one rounding of every logit" in fact for fact in text.facts)


CONFORM_AS_DECLARED: Mapping[str, tuple[str, ...]] = {
    "cap-before-bias": ('soft_cap="before_bias"',),
    "bias-before-scale": ("scaled_bias=True",),
    "logsumexp-in-base-two": ("logsumexp_base=2",),
    "logsumexp-without-sinks": ("logsumexp_sink=False",),
    "logits-rounded-to-operands": ('logits="input"',),
}
"""Planted bugs that are a convention of some library, with the declarations under which they conform."""
ARE_WRONG = (
    *("window-one-key-too-few", "window-zero-is-unbounded", "causal-hides-own-position", "full-becomes-causal"),
    *("bwd-causal-aligned-at-end", "dkv-averaged-over-group", "cap-derivative-missing", "cap-before-scale"),
    *("sinks-ignored", "sinks-by-kv-head", "scale-applied-twice", "custom-scale-ignored"),
    *("bias-subtracted", "kv-heads-tiled", "dk-of-last-head-of-group", "output-in-the-other-layout", "d-missing"),
    *("weights-in-base-two", "tail-one-key-too-few", "block-count-floored", "max-logits-before-cap"),
    *("logsumexp-relative-to-maximum", "dq-scaled-twice", "residuals-swapped"),
)
"""Planted bugs of many families that no declaration describes."""


def list_sorts(findings: Sequence[FindingText]) -> set[str]:
    return {text.sort for text in findings}


@pytest.mark.bank
@pytest.mark.parametrize("name", [*CONFORM_AS_DECLARED, *ARE_WRONG])
def test_a_planted_bug_is_taken_for_a_convention_only_if_it_is_one(name: str) -> None:
    summary = judge(make_plain(name))
    assert {record.verdict for record in summary.groups.records} >= {FAIL}
    assert not any(record.verdict == ERROR for record in summary.groups.records)
    declared = CONFORM_AS_DECLARED.get(name, ())
    assert {text.declarations for text in summary.findings} == {declared}
    assert list_sorts(summary.findings) == {DIFFERS if declared else WRONG}


def test_a_bug_is_not_named_beside_a_finding_whose_results_it_does_not_have() -> None:
    """The bug is wrong only where the mask hides NaN, and the finding is about sums of dk."""
    (bug,) = (one for one in load_profiles() if one.name == "block-values-behind-mask-read")
    case = name_case(dtype="bf16", sizes=GROUPED)
    dk = make_record(case=case, check="gradients", observable="dk", verdict=FAIL, ratio=12.0, dtype="bf16")
    (text,) = build_summary([dk], make_run_info()).findings
    assert not bug_diagnosis._can_cause(text.finding, bug)
