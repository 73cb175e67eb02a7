"""`conformance.check` and `assert_conforms`: what they take, what they return, and what they leave behind."""

from __future__ import annotations

import asyncio
import functools
import html
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conformance
from reports import records
from tests.api import kernels
from tests.api.kernels import BIAS_AND_CAP, GROUPS, PLAIN, WINDOW

FORWARD: dict[str, Any] = {"case": PLAIN, "checks": "forward", "progress": False}


def scaled(factor: float) -> Callable[..., Any]:
    def closure(q: Any, k: Any, v: Any) -> Any:
        return factor * kernels.attention(q, k, v)

    return closure


class CallableKernel:
    """A kernel that is an object."""

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return kernels.attention(q, k, v)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(scaled(1.0), id="closure"),
        pytest.param(lambda q, k, v: kernels.attention(q, k, v), id="lambda"),
        pytest.param(functools.partial(kernels.attention, soft_cap=None), id="partial"),
        pytest.param(jax.jit(kernels.attention), id="jitted"),
        pytest.param(CallableKernel(), id="object"),
        pytest.param(conformance.declare(logits="input")(scaled(1.0)), id="declared"),
        pytest.param("dot_product", id="name"),
        pytest.param(
            conformance.Implementation(name="mine", call=conformance.reference_attention), id="implementation"
        ),
    ],
)
def test_anything_that_computes_attention_can_be_judged(function: Any) -> None:
    report = conformance.check(function, **FORWARD)
    assert report.conforms
    assert report
    assert report.verdict == "conforms"
    assert not report.findings
    assert [record.verdict for record in report.records if record.check == "forward"] == [records.PASS]


def test_a_function_without_a_source_file_can_be_judged() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def attention(q, k, v):\n    return 2 * base(q, k, v)\n", namespace | {"base": kernels.attention}, namespace)
    report = conformance.check(namespace["attention"], **FORWARD)
    assert not report.conforms
    assert "2 times" in report.findings[0].pattern


@pytest.mark.parametrize(
    ("case", "check", "observable"),
    [(WINDOW, "forward", "out"), (BIAS_AND_CAP, "forward", "out"), (GROUPS, "gradients", "dk")],
)
def test_a_finding_says_where_the_fault_is_and_its_code_repeats_it(case: str, check: str, observable: str) -> None:
    report = conformance.check(kernels.faulty_attention, case=case, checks=check, progress=False)
    assert not report
    (finding,) = report.findings
    assert (finding.case, finding.check, finding.observable) == (case, check, observable)
    assert finding.ratio is not None
    assert finding.limit is not None
    assert finding.ratio > finding.limit
    assert finding.worst is not None
    assert len(finding.worst.index) == 4
    again = eval(finding.code, {"conformance": conformance, "faulty_attention": kernels.faulty_attention})
    assert [x.cause for x in again.findings] == [finding.cause]
    assert again.records == report.records or again.findings[0].ratio == finding.ratio
    assert conformance.check(kernels.attention, case=case, checks=check, progress=False).conforms


def test_a_finding_prints_as_in_the_terminal_with_the_likeliest_bug() -> None:
    report = conformance.check(
        kernels.faulty_attention,
        cases="train/f32/*/window*",
        checks="forward",
        level="quick",
        diagnose_seconds=600,
        progress=False,
    )
    finding = report.findings[0]
    assert str(finding) in str(report)
    assert finding.diagnosis is not None
    assert finding.diagnosis.cases
    assert "window" in finding.diagnosis.bugs[0].name
    assert finding.diagnosis.bugs[0].name in str(finding)
    assert "--" not in str(finding)


def test_code_that_repeats_a_finding_has_the_declarations() -> None:
    report = conformance.check(scaled(2.0), behind_mask="finite", **FORWARD)
    assert "behind_mask='finite'" in report.findings[0].code
    assert "conformance.check(closure" in report.findings[0].code


def test_declarations_of_the_call_replace_those_of_the_function_and_leave_it_as_it_is() -> None:
    function = conformance.declare(logits="input", empty_rows="zero")(scaled(1.0))
    before = dict(vars(function))
    report = conformance.check(function, logits="f32", **FORWARD)
    kernel = report.session.recorded.run
    assert kernel is not None
    declared = kernel.kernels["closure"].declared
    assert declared["arithmetic"]["logits"] == "f32"
    assert declared["empty_rows"] == "zero"
    assert dict(vars(function)) == before


def test_the_verdict_and_the_page_name_what_is_declared(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    report = conformance.check(scaled(1.0), causal="end", empty_rows="zero", report=page, **FORWARD)
    declared = 'empty_rows="zero", causal="end"'
    assert report.session.summary.headline.endswith(f": {declared}.")
    assert f"declares {declared}" in html.unescape(page.read_text(encoding="utf-8"))


def test_assert_conforms_raises_the_findings() -> None:
    with pytest.raises(AssertionError) as raised:
        conformance.assert_conforms(kernels.faulty_attention, case=WINDOW, checks="forward", progress=False)
    text = str(raised.value)
    for part in ("does not conform", WINDOW, "max ratio", "expected", "conformance.check(faulty_attention"):
        assert part in text
    conformance.assert_conforms(kernels.attention, case=WINDOW, checks="forward", progress=False)


def test_what_could_not_be_judged_is_neither_a_pass_nor_an_assertion() -> None:
    def dense(q: Any, k: Any, v: Any) -> Any:
        return kernels.attention(q, k, v)

    report = conformance.check(dense, case=WINDOW, checks="forward", progress=False)
    assert report.verdict == "could not be judged"
    assert "window" in report.reason
    assert not report
    with pytest.raises(conformance.NotJudgedError, match="window"):
        conformance.assert_conforms(dense, case=WINDOW, checks="forward", progress=False)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"level": "smok"}, ValueError, ["level", "'smoke'"]),
        ({"checks": "fordward"}, ValueError, ["checks", "'forward'"]),
        ({"logit": "input"}, TypeError, ["logit", "'logits'"]),
        ({"logits": "f16"}, ValueError, ["logits", "'input'"]),
        ({"case": "train/f32"}, ValueError, ["case", "train/f32"]),
        ({"case": 3}, TypeError, ["case", "3"]),
        ({"seeds": -1}, ValueError, ["seed", "-1"]),
        ({"seeds": "0"}, TypeError, ["seeds"]),
        ({"cases": "nothing/like/it"}, ValueError, ["cases", "nothing/like/it"]),
        ({"case": PLAIN, "cases": "train"}, ValueError, ["case", "cases"]),
        ({"timeout": 3}, ValueError, ["timeout", "sandbox=True"]),
        ({"report": "/no/such/folder/report.html"}, ValueError, ["report", "/no/such/folder"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(
    arguments: dict[str, Any], kind: type[Exception], words: Any
) -> None:
    with pytest.raises(kind) as raised:
        conformance.check(kernels.attention, progress=False, **arguments)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("function", [3, lambda q: q, max, None])
def test_what_is_no_attention_function_is_a_type_error(function: Any) -> None:
    with pytest.raises(TypeError, match=r"function|arguments|signature"):
        conformance.check(function, **FORWARD)


def test_a_name_that_does_not_exist_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no_such_module"):
        conformance.check("no_such_module:attention", **FORWARD)


def test_the_report_saves_all_its_forms(tmp_path: Path) -> None:
    report = conformance.check(kernels.faulty_attention, case=WINDOW, checks="forward", progress=False)
    page = report.save(tmp_path / "report.html").read_text()
    assert WINDOW in page
    assert WINDOW in report.save(tmp_path / "report.md").read_text()
    path = report.save(tmp_path / "report.jsonl")
    assert [record.key for record in records.read_jsonl(path)] == [record.key for record in report.records]
    assert all(json.loads(line) for line in path.read_text().splitlines())
    with pytest.raises(ValueError, match=r"\.html"):
        report.save(tmp_path / "report.pdf")


def test_the_report_shows_in_a_notebook_a_terminal_and_a_repr() -> None:
    report = conformance.check(scaled(2.0), name="<b>mine</b>", **FORWARD)
    html = report._repr_html_()
    assert "<b>mine" not in html
    assert "&lt;b&gt;mine" in html
    assert PLAIN in html
    assert PLAIN in str(report)
    assert "does not conform" in str(report)
    assert "1 finding" in repr(report)
    assert len(repr(report)) < 120


def test_records_become_a_table() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    report = conformance.check(kernels.attention, **FORWARD)
    table = report.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert list(table["check"]) == ["forward"]
    assert set(table["verdict"]) == {"pass"}


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    report = conformance.check(kernels.attention, **FORWARD)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        report.to_pandas()


def read_state() -> list[Any]:
    """Return what a call must leave as it is."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    settings = {name: value for name, value in jax.config.values.items() if "compilation" not in name}
    return [dict(os.environ), settings, handlers, os.getcwd(), list(warnings.filters), np.geterr(), list(sys.path)]


def test_a_call_leaves_no_state(tmp_path: Path) -> None:
    before = read_state()
    report = conformance.check(kernels.faulty_attention, case=WINDOW, checks="forward", progress=False)
    report.save(tmp_path / "report.html")
    assert read_state() == before
    assert "matplotlib.pyplot" not in sys.modules


def test_the_callers_settings_do_not_change_the_verdict_and_stay() -> None:
    plain = conformance.check(kernels.attention, **FORWARD).records[0]
    with jax.enable_x64(True), jax.debug_nans(True), np.errstate(all="raise"):
        before = read_state()
        judged = conformance.check(kernels.attention, **FORWARD).records[0]
        assert read_state() == before
        assert jnp.ones((), "float64").dtype == "float64"
    assert (judged.verdict, judged.ratio) == (plain.verdict, plain.ratio)


def test_the_callers_precision_of_products_does_not_hide_that_a_kernel_requests_none() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)

    with jax.default_matmul_precision("highest"):
        report = conformance.check(attend, case=PLAIN, checks="program", progress=False)
    assert any("requests the precision of f32" in record.reason for record in report.records)


def test_without_jit_nothing_is_judged() -> None:
    with jax.disable_jit(), pytest.raises(RuntimeError, match="disable_jit"):
        conformance.check(kernels.attention, **FORWARD)


def test_it_works_in_a_thread_and_beside_an_event_loop() -> None:
    found: list[conformance.Report] = []
    thread = threading.Thread(target=lambda: found.append(conformance.check(kernels.attention, **FORWARD)))
    thread.start()
    thread.join()

    async def judge() -> None:
        found.append(conformance.check(kernels.attention, **FORWARD))

    asyncio.run(judge())
    assert [report.conforms for report in found] == [True, True]


def test_progress_goes_to_stderr_with_one_line_on_where_the_kernel_runs(capfd: pytest.CaptureFixture[str]) -> None:
    conformance.check(kernels.attention, case=PLAIN, checks="forward")
    out, err = capfd.readouterr()
    assert not out
    assert "in this process" in err
    assert "sandbox=True" in err
    conformance.check(kernels.attention, **FORWARD)
    assert capfd.readouterr() == ("", "")


_INTERRUPTED = """
import os, signal, sys
import conformance
from tests.api import kernels

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit that it is ignored
calls = []

def attention(q, k, v):
    calls.append(1)
    if len(calls) == {calls}:
        os.kill(os.getpid(), signal.{signal})
    return 2 * kernels.attention(q, k, v)

try:
    conformance.check(attention, checks=["forward", "gradients"], cases="train/f32")
except conformance.CheckInterrupted as stopped:
    assert isinstance(stopped, KeyboardInterrupt)
    print("records", len(stopped.report.records), stopped.report.verdict)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM"])
def test_a_stop_signal_keeps_what_was_judged(stop: str) -> None:
    code = _INTERRUPTED.format(calls=12, signal=stop)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if stop == "SIGTERM":  # the process ends by it, as it would have without a call
        assert done.returncode == -signal.SIGTERM, done.stderr
        return
    assert done.returncode == 0, done.stderr
    word, count, *verdict = done.stdout.split()
    assert word == "records"
    assert int(count) > 0
    assert " ".join(verdict) in ("does not conform", "could not be judged")
