"""Bad command lines, bad files and bad kernels: one clear line or one record each, no traceback, the right exit code.

`test_misspelt` has the command lines that are misspelt; here is what is spelt well and wrong all the same.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance import cli
from reports import records
from reports.records import ERROR, FAIL, RECORD_SCHEMA, RED, RUN_SCHEMA, UNSUPPORTED
from reports.records.measurement import MEASUREMENT_SCHEMA

CASE = "train/f32/B1.T2.S4.N2.K2.H4.V4/full/normal/s0"
RECORD = {
    "implementation": "k",
    "platform": "cpu",
    "case": CASE,
    "check": "forward",
    "observable": "out",
    "verdict": "pass",
    "schema": RECORD_SCHEMA,
}

MEASUREMENT = {
    "schema": MEASUREMENT_SCHEMA,
    "implementation": "k",
    "platform": "cpu",
    "device": "cpu",
    "case": CASE,
    "phase": "forward",
    "outcome": "agrees",
    "samples": [0.5],
    "speed": [1.0, 1.0, 1.0],
    "error": 0.5,
}
RUN = {
    "schema": RUN_SCHEMA,
    "started": "2026-01-01T00:00:00+00:00",
    "command": "run",
    "level": "quick",
    "seeds": [0],
    "tolerances": [],
    "kernels": {"k": {"arrays": []}},
    "jobs": [[0, 0, CASE]],
    "resumed": [],
    "asked": [["forward"]],
}

KERNELS = """\
import asyncio
import jax, jax.numpy as jnp, numpy as np

def right(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)

def none(q, k, v): pass
def lists(q, k, v): return [right(q, k, v)]
def pair(q, k, v): return right(q, k, v), {"logsumexp": q}
def mapping(q, k, v): return {"out": right(q, k, v)}
def three(q, k, v): return right(q, k, v), q, k
def text(q, k, v): return "out"
def yields(q, k, v): yield right(q, k, v)
async def later(q, k, v): return right(q, k, v)
def narrow(q, k, v): return right(q, k, v).astype(jnp.float16)
def whole(q, k, v): return right(q, k, v).astype(int)
def imaginary(q, k, v): return right(q, k, v) + 0j
def transposed(q, k, v): return right(q, k, v).swapaxes(1, 2)[:, :, :1]
def shapes(q, k, v): return jnp.einsum("btnh,bsnh->bnts", q, k[..., :3])
def deep(q, k, v): return deep(q, k, v)
def decides(q, k, v): return q if q.sum() > 0 else k
def numpy(q, k, v): return np.asarray(q)
def huge(q, k, v): return np.empty(1 << 50, np.uint8)
def long(q, k, v): raise ValueError("x" * 1_000_000)
def colours(q, k, v): raise ValueError("\\x1b[31mred\\x1b[0m \\ud800 \\u202e")
def cancelled(q, k, v): raise asyncio.CancelledError
def leaves(q, k, v): raise SystemExit(0)
def ends(q, k, v): raise GeneratorExit
def stops(q, k, v): raise StopIteration
def many(q, k, v): raise ExceptionGroup("two", [ValueError("one"), TypeError("other")])
def never(q, k, v): raise NotImplementedError
def unnamed(q, k, v, save_residuals=False): return (right(q, k, v), [q]) if save_residuals else right(q, k, v)
def nothing(q, k, v, save_residuals=False):
    return (right(q, k, v), {"logsumexp": None}) if save_residuals else right(q, k, v)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(KERNELS)
    return tmp_path


def run(*arguments: str) -> int:
    """Run a command, and return its exit code."""
    try:
        return cli.main(cli.build_parser().parse_args(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


WRONG_RETURN = "the call must return out alone, an array [B, T, N, V], and returned "
NO_RESIDUALS = "with save_residuals=True the call must return (out, {'logsumexp': ..., 'max_logits': ...})"
KINDS = [
    ("none", ERROR, f"{WRONG_RETURN}None: is there a `return`?"),
    ("lists", ERROR, f"{WRONG_RETURN}a list of 1 (an array float32[1, 2, 2, 4])"),
    ("pair", ERROR, "which is right only with save_residuals=True"),
    ("mapping", ERROR, f"{WRONG_RETURN}{{'out': an array float32[1, 2, 2, 4]}}"),
    ("three", ERROR, f"{WRONG_RETURN}a tuple of 3 ("),
    ("text", ERROR, f"{WRONG_RETURN}a string"),
    ("yields", ERROR, f"{WRONG_RETURN}a generator"),
    ("later", ERROR, f"{WRONG_RETURN}a coroutine"),
    ("narrow", FAIL, "dtype is float16, must be that of q, float32"),
    ("whole", FAIL, "dtype is int32, must be that of q, float32"),
    ("imaginary", FAIL, "dtype is complex64, must be that of q, float32"),
    ("transposed", FAIL, "shape is (1, 2, 1, 4), must be (1, 2, 2, 4)"),
    ("shapes", ERROR, '(kernels.py:20: def shapes(q, k, v): return jnp.einsum("btnh,bsnh->bnts", q, k[..., :3]))'),
    ("deep", ERROR, "RecursionError: maximum recursion depth exceeded"),
    ("decides", ERROR, "(kernels.py:22: def decides(q, k, v): return q if q.sum() > 0 else k)"),
    ("numpy", ERROR, "TracerArrayConversionError: "),
    ("huge", ERROR, "MemoryError: Unable to allocate 1.00 PiB"),
    ("long", ERROR, "xxx … (kernels.py:25: def long("),
    ("colours", ERROR, r"ValueError: \x1b[31mred\x1b[0m \ud800 \u202e (kernels.py:26: def colours("),
    ("cancelled", ERROR, "CancelledError: no message (kernels.py:27: "),
    ("leaves", ERROR, "SystemExit: 0 (kernels.py:28: "),
    ("ends", ERROR, "GeneratorExit: no message (kernels.py:29: "),
    ("stops", ERROR, "StopIteration"),
    ("many", ERROR, "ExceptionGroup: two (2 sub-exceptions) (kernels.py:31: "),
    ("never", UNSUPPORTED, "the call raises NotImplementedError"),
    ("unnamed", ERROR, f"{NO_RESIDUALS} with an array [B, N, T] for each, and returned a tuple of 2 ("),
    ("nothing", ERROR, f"{NO_RESIDUALS} with an array [B, N, T] for each, and returned a tuple of 2 ("),
]


@pytest.mark.parametrize(("kernel", "verdict", "reason"), KINDS, ids=[name for name, _, _ in KINDS])
def test_a_bad_kernel_is_one_record(
    kernel: str, verdict: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = "residuals" if "save_residuals=True the" in reason else "forward"
    command = ("run", f"--impl=kernels.py:{kernel}", f"--case={CASE}", f"--check={check}", "--jobs=1")
    assert run(*command, "--json=r.jsonl") == (2 if verdict == UNSUPPORTED else 1)
    (found,) = [record for record in records.read_jsonl(folder / "r.jsonl") if record.verdict in {verdict, *RED}]
    assert found.verdict == verdict
    assert reason in found.reason
    assert len(found.reason) < 2500
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert all(x.isprintable() or x == "\n" for x in said.out + said.err)


def test_a_page_shows_no_more_than_text(folder: Path) -> None:
    (folder / "r.jsonl").write_text(line(verdict="error", reason="\x1b[31m \u202e"))
    assert run("report", "r.jsonl", "--report=r.html") == 0
    page = (folder / "r.html").read_text()
    assert r"\x1b[31m \u202e" in page
    assert all(x.isprintable() or x == "\n" for x in page)


@dataclasses.dataclass(frozen=True)
class BadInput:
    """A command that is refused.

    Attributes:
      name: the name of the test.
      command: the arguments.
      told: words that the one line must have: the operand, and what to do or what there is instead.
      files: files that are written before, by name.
    """

    name: str
    command: tuple[str, ...]
    told: tuple[str, ...]
    files: Mapping[str, str | bytes] = dataclasses.field(default_factory=dict)


def run_with(*options: str) -> tuple[str, ...]:
    return ("run", "--impl=kernels.py:right", *options)


def at_case(case: str) -> tuple[str, ...]:
    return run_with(f"--case={case}")


def at_impl(name: str) -> tuple[str, ...]:
    return ("run", f"--impl={name}", f"--case={CASE}")


def line(**changed: Any) -> str:
    """Build a record's line with some fields changed, and without those that are `...`."""
    return json.dumps({name: value for name, value in {**RECORD, **changed}.items() if value is not ...}) + "\n"


def run_line(**changed: Any) -> str:
    """Build a run's line with some fields changed, and without those that are `...`."""
    return json.dumps({name: value for name, value in {**RUN, **changed}.items() if value is not ...}) + "\n"


RENDER = ("report", "bad.jsonl", "--report=page.html")


def bad_record(name: str, second: str, *told: str) -> BadInput:
    """Build the case of a file whose second line is bad."""
    words = ("bad.jsonl:2 is no", *told, "judge again")
    return BadInput(f"record-{name}", RENDER, words, {"bad.jsonl": line() + second})


def bad_run(name: str, first: str, *told: str) -> BadInput:
    """Build the case of a file whose first line is bad, given to `--resume`."""
    return BadInput(f"run-line-{name}", ("run", "--resume=bad.jsonl"), ("bad.jsonl:1", *told), {"bad.jsonl": first})


def bad_measurement(name: str, **changed: Any) -> BadInput:
    """Build the case of a file whose only line is a bad measurement; the field must be named."""
    (field,) = changed
    data = {name: value for name, value in {**MEASUREMENT, **changed}.items() if value is not ...}
    told = ("bad.jsonl:1 is not a measurement", field, "measure again")
    return BadInput(f"measurement-{name}", RENDER, told, {"bad.jsonl": json.dumps(data) + "\n"})


def settings(name: str, text: str, *told: str) -> BadInput:
    """Build the case of a `pyproject.toml` that is refused."""
    return BadInput(f"settings-{name}", at_case(CASE), ("pyproject.toml", *told), {"pyproject.toml": text})


def kernel(name: str, source: str | bytes, *told: str) -> BadInput:
    """Build the case of a file without a kernel."""
    return BadInput(f"kernel-{name}", at_impl("bad.py:attention"), ("bad.py", *told), {"bad.py": source})


TABLE = "[tool.attention_conformance]\n"
EXPECTED = "[[tool.attention_conformance.expected_failures]]\n"
FROM = "from conformance import declare, Implementation\n"
TOO_LARGE = str(2**64)

VALUES = [
    BadInput("level", run_with("--level=deepest"), ("--level", "'deepest'", "smoke")),
    BadInput("check", run_with("--check=nope"), ("'nope'", "known are forward")),
    BadInput(
        "repeated", run_with("--cases=train", "--cases=decode"), ("--cases takes one value, and is given 2 times",)
    ),
    BadInput("jobs", run_with("--jobs=0"), ("--jobs must be at least 1, got 0",)),
    BadInput("jobs-many", run_with("--jobs=99999999999999999999"), ("--jobs", "at most", "got 99999999999999999999")),
    BadInput("jobs-of-a-survey", ("survey", "--all", "--jobs=99999999999"), ("--jobs", "at most", "got 99999999999")),
    BadInput("timeout", run_with("--timeout=0"), ("--timeout must be more than zero, got 0",)),
    BadInput("timeout-infinite", (*at_case(CASE), "--timeout=inf"), ("--timeout", "finite", "got inf")),
    BadInput(
        "timeout-in-process", run_with("--in-process", "--timeout=5"), ("--timeout=5", "leave out", "--in-process")
    ),
    BadInput(
        "explore-in-process",
        ("explore", "--impl=kernels.py:right", "--in-process", "--memory=5"),
        ("--memory=5", "leave out", "--in-process"),
    ),
    BadInput("memory-infinite", (*at_case(CASE), "--memory=inf"), ("--memory", "finite", "got inf")),
    BadInput("shard", run_with("--shard=3/2"), ("--shard", "'3/2'", "such as 2/3")),
    BadInput("shard-many", run_with("--shard=1/99999999999"), ("--shard", "'1/99999999999'", "at most")),
    BadInput("confirm", run_with("--confirm-seconds=-1"), ("--confirm-seconds must not be negative, got -1",)),
    BadInput("platform", run_with("--require-platform=abacus"), ("'abacus'", "cpu", "gpu")),
    BadInput("products", run_with("--products=fp8"), ("'fp8'", "exact", "tf32")),
    *(
        BadInput(
            f"products-{words[0]}",
            (*words, "--impl=dot_product", "--products=bf16"),
            ("--products=bf16", "dot_product", "leave out"),
        )
        for words in (("run", f"--case={CASE}"), ("explain", CASE), ("bench", f"--case={CASE}"), ("explore",))
    ),
    BadInput("pullback", run_with("--pullback=plain"), ("--pullback goes with --case",)),
    BadInput("problem", run_with("--problem=nope"), ("'nope'", "known are", "list problems")),
    BadInput("full-size", run_with("--full-size"), ("--full-size goes with --problem",)),
    BadInput("option", run_with("--lvel=quick"), ("--lvel=quick", "--help")),
    BadInput("explore-seconds", ("explore", "--impl=kernels.py:right", "--seconds=-1"), ("--seconds", "got -1")),
    BadInput("bench-none", ("bench", "--impl=,"), ("nothing to time: give --impl=NAME",)),
    BadInput("bench-runs", ("bench", "--impl=kernels.py:right", "--runs=0"), ("--runs must be at least 1, got 0",)),
    BadInput("tune-nothing", ("tune", "--impl=kernels.py:right"), ("kernels.py:right declares nothing to tune",)),
    BadInput("calibrate-nothing", ("calibrate",), ("give records of correct implementations",)),
]
SEEDS = [
    BadInput("seed-too-large", run_with(f"--seed={TOO_LARGE}"), ("--seed must be less than 2**64", TOO_LARGE)),
    BadInput("seed-negative", run_with("--seed=-1"), ("--seed must not be negative, got -1",)),
    BadInput("explore-seed", ("explore", "--impl=kernels.py:right", f"--seed={TOO_LARGE}"), ("--seed", "2**64")),
    BadInput("calibrate-seed", ("calibrate", "--impl=nope", f"--seed={TOO_LARGE}"), ("--seed", "2**64")),
]
CASES = [
    BadInput("case-text", at_case("nonsense"), ("'nonsense' is not a case id", "components")),
    BadInput("case-escape", ("explain", "\x1b[31m"), (r"\x1b[31m", "is not a case id")),
    BadInput("case-lines", at_case(CASE.replace("/full", "\n/full")), (r"H4.V4\n' in", "is not a shape such as")),
    BadInput("case-seed", at_case(CASE.replace("s0", "s" + TOO_LARGE)), ("seed must be in 0..2**64-1", TOO_LARGE)),
    BadInput("case-digits", at_case(CASE.replace("B1", "B" + "9" * 5000)), ("is not a case id", "at most 4,000")),
    BadInput("case-memory", at_case(CASE.replace("B1", "B99999999999")), ("GB for its operands alone",)),
    BadInput(
        "case-negative", at_case(CASE.replace("T2", "T-2")), ("'B1.T-2.S4.N2.K2.H4.V4'", "is not a shape such as")
    ),
    BadInput("case-mask", at_case(CASE.replace("full", "window")), ("'window' is not a mask",)),
]
GLOBS = [
    BadInput("glob-none", run_with("--cases=zzz"), ("--cases='zzz'", "list cases")),
    BadInput("glob-bracket", run_with("--cases=["), ("--cases='['", "list cases")),
    BadInput("glob-list", ("list", "cases", "--cases=zzz"), ("'zzz'", "quick grid")),
    BadInput("glob-bench", ("bench", "--impl=dot_product", "--cases=zzz"), ("--cases='zzz'", "they are train/")),
]
NAMES = [
    BadInput("impl-unknown", at_impl("nope"), ("'nope'", "registered are dot_product")),
    BadInput("impl-empty", at_impl(""), ("--impl must not be empty",)),
    BadInput("impl-escape", at_impl("\x1b[31m.py:right"), (r"\x1b[31m.py:right", "a name must be text")),
    BadInput("impl-no-file", at_impl("no.py:right"), ("no such file: no.py",)),
    BadInput("impl-folder", at_impl("..:right"), ("cannot import ..",)),
    BadInput("impl-module", at_impl("no.such:right"), ("cannot import no.such",)),
    BadInput("impl-takes-nothing", at_impl("os:getcwd"), ("os:getcwd() does not take q, k, v",)),
    BadInput("impl-no-attribute", at_impl("kernels.py:wrong"), ("kernels.py has no attribute 'wrong'",)),
    BadInput("impl-no-name", at_impl("kernels.py"), ("file.py:attribute",)),
    BadInput("impl-half", at_impl(":right"), ("':right'", "is incomplete")),
    BadInput("impl-long", at_impl("x" * 300 + ".py:right"), (".py", "too long")),
    BadInput("impl-two", at_impl("dot_product,moba"), ("'dot_product,moba' is several names", "--impl once for each")),
    BadInput("expect-impl", ("expect", "good.jsonl", "--impl=nope"), ("--impl=nope", "known are k")),
    BadInput("expect-nothing", ("expect", "empty.jsonl"), ("no record in empty.jsonl",), {"empty.jsonl": ""}),
]
PATHS = [
    BadInput("json-over-kernel", (*at_case(CASE), "--json=kernels.py"), ("--json=kernels.py", "give another name")),
    BadInput("report-over-kernel", (*at_case(CASE), "--report=kernels.py"), ("--report=kernels.py", "another name")),
    BadInput(
        "markdown-over-readme",
        (*at_case(CASE), "--markdown=README.md"),
        ("--markdown=README.md", "give another name"),
        {"README.md": "# Kernels\n"},
    ),
    BadInput(
        "records-beside-page",
        (*at_case(CASE), "--report=page.html"),
        ("page.jsonl", "give another name"),
        {"page.jsonl": '{"role": "user"}\n'},
    ),
    BadInput("json-over-page", (*at_case(CASE), "--json=p.html"), ("p.html",), {"p.html": "<!doctype html>\n"}),
    BadInput("report-over-records", (*at_case(CASE), "--report=good.jsonl"), ("good.jsonl",)),
    BadInput("report-command", ("report", "good.jsonl", "--report=kernels.py"), ("--report=kernels.py",)),
    BadInput("bench-json", ("bench", "--impl=dot_product", "--json=kernels.py"), ("--json=kernels.py",)),
    BadInput("json-folder", (*at_case(CASE), "--json=."), ("--json=. cannot be written", "directory")),
    BadInput("json-absent", (*at_case(CASE), "--json=absent/r"), ("--json=absent/r cannot be written", "No such file")),
    BadInput("json-long", (*at_case(CASE), "--json=" + "x" * 300), ("cannot be written", "File name too long")),
    BadInput("same-file", (*at_case(CASE), "--json=a", "--markdown=a"), ("two outputs go to a", "its own file")),
    BadInput("baseline", (*at_case(CASE), "--baseline=absent"), ("absent cannot be read", "No such file")),
    BadInput("resume", ("run", "--resume=absent"), ("absent cannot be read", "No such file")),
    BadInput("resume-records", ("run", "--resume=good.jsonl"), ("--resume=good.jsonl has no run record",)),
    BadInput("report-absent", ("report", "absent", "--report=page.html"), ("absent cannot be read", "No such file")),
]
RECORDS = [
    bad_record("cut", line()[:40] + "\n", "truncated"),
    bad_record("twice", line().strip() * 2 + "\n", "trailing"),
    bad_record("deep", "[" * 100_000 + "\n", "`array`"),
    bad_record("nan", line().replace('"pass"', '"pass", "ratio": NaN'), "JSON"),
    bad_record("verdict", line(verdict="fine"), "'fine'", "pass, fail"),
    bad_record("schema", line(schema="other/1"), "'other/1'", "`$.schema`"),
    bad_record("pass-beyond", line(ratio=5.0, limit=4.0), "a pass whose ratio is 5"),
    bad_record("pass-nan", line(ratio="nan", limit=4.0), "a pass whose ratio is nan"),
    bad_record("job", '{"schema": "attention-conformance/job/1", "job": 0, "records": 1}\n', "there is no job 0"),
    bad_record("surrogate", line(reason="\ud800")),
    BadInput("record-bytes", RENDER, ("bad.jsonl", "byte 0"), {"bad.jsonl": b"\xff\xfe\n"}),
    BadInput("record-first", RENDER, ("bad.jsonl:1", "give a file that `run` wrote"), {"bad.jsonl": "text\n"}),
    BadInput("record-none", RENDER, ("there is no record in bad.jsonl",), {"bad.jsonl": ""}),
]
MEASUREMENTS = [
    bad_measurement("sample", samples=["fast"]),
    bad_measurement("calls", calls=0),
    bad_measurement("phase", phase="sideways"),
    bad_measurement("missing", case=...),
]
RUNS = [
    bad_run("level", run_line(level={}), "`$.level`"),
    bad_run("seeds-missing", run_line(seeds=...), "`seeds`"),
    bad_run("query", run_line(query=[]), "`$.query`"),
    bad_run("query-impl", run_line(query={"impl": "kernels.py:right"}), "`$.query.impl`"),
    bad_run("kernel", run_line(kernels={"k": {"arrays": [{"strength": 2}]}}), "`combinations`"),
    bad_run("job-kernel", run_line(jobs=[[7, 0, CASE]]), "kernel number 7"),
    bad_run("job-checks", run_line(jobs=[[0, 7, CASE]]), "list of checks number 7"),
    bad_run("missing", run_line(jobs=...), "`jobs`"),
    BadInput("run-line-two", ("run", "--resume=bad.jsonl"), ("has 2 runs",), {"bad.jsonl": run_line() * 2}),
    BadInput(
        "run-line-no-query",
        ("run", "--resume=bad.jsonl"),
        ("is no run of this command", "--resume=bad.jsonl"),
        {"bad.jsonl": run_line()},
    ),
]
SETTINGS = [
    settings("toml", "[tool.attention_conformance\n", "is not TOML"),
    settings("bytes", b"\xff\n".decode("latin-1"), "is not TOML"),
    settings("tool", "tool = 3\n", "tool must be a table, got 3", "[tool.attention_conformance]"),
    settings("table", "[tool]\nattention_conformance = 'x'\n", "must be a table, got 'x'"),
    settings("unknown", TABLE + "impls = []\n", "unknown keys ['impls']", "known are"),
    settings("group-name", TABLE + "groups = {moba = []}\n", "'moba' has the name of an implementation"),
    settings("expected-platform", EXPECTED + "implementation = 'x'\nreason = 'x'\nplatform = 'npu'\n", "cpu", "'npu'"),
]
KERNEL_FILES = [
    kernel("zeros", b"\xff\xfe\x00", "null bytes"),
    kernel("tabs", "def attention(q, k, v):\n\treturn q\n        return v\n", "does not import: TabError: "),
    kernel("coding", "# -*- coding: nonsense -*-\n", "does not import: SyntaxError: unknown encoding: nonsense"),
    kernel("latin", b'x = "\xe9"\n', "does not import: SyntaxError: "),
    kernel("empty", "", "has no attribute 'attention'"),
    kernel("needs", "import nothing_like_it\n", "'nothing_like_it' (bad.py:1: import nothing_like_it)"),
    kernel("skips", "import pytest\npytest.skip('x', allow_module_level=True)\n", "Skipped: x (bad.py:2: "),
    kernel("interrupts", "raise KeyboardInterrupt\n", "does not import: KeyboardInterrupt", "(bad.py:1: "),
    kernel("exits", "import sys\nsys.exit()\n", "does not import: SystemExit", "(bad.py:2: "),
    kernel("kills", "import os\nos.abort()\n", "SIGABRT"),
    kernel("lines", "raise ValueError('a\\nb\\x1b[2J')\n", "does not import: ValueError: a"),
    kernel("products", FROM + "@declare(products='fp8')\ndef attention(q, k, v): ...\n", "'fp8'"),
    kernel(
        "features", FROM + "@declare(unsupported={'causl': 'no'})\ndef attention(q, k, v): ...\n", "['causl']", "known"
    ),
    kernel("uncalled", FROM + "attention = Implementation(name='x', call=None)\n", "call must be a function"),
    kernel("unnamed", FROM + "attention = Implementation(name='\\x1b[31m', call=print)\n", r"got '\x1b[31m'"),
    kernel(
        "signature",
        "class A:\n    @property\n    def __signature__(self): raise OSError('no')\n    def __call__(self): ...\n"
        "attention = A()\n",
    ),
]
REFUSED = [*VALUES, *SEEDS, *CASES, *GLOBS, *NAMES, *PATHS, *RECORDS, *MEASUREMENTS, *RUNS, *SETTINGS, *KERNEL_FILES]


@pytest.mark.parametrize("bad", REFUSED, ids=[bad.name for bad in REFUSED])
def test_bad_input_is_one_line_and_changes_no_file(
    bad: BadInput, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {"good.jsonl": line(), **bad.files}.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = contents(folder)
    assert run(*bad.command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (message,) = said.err.splitlines()
    assert message.startswith("error: ")
    assert message.isprintable()
    assert len(message) < 2500
    for words in bad.told:
        assert words in message
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_problem_that_needs_more_memory_than_there_is_says_how_much(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run", "--impl=kernels.py:right", "--problem=sparse_attention", "--full-size"]
    monkeypatch.setattr("conformance.session.project_lookup._measure_memory", lambda: 20 * 10**9)
    assert run(*asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sparse_attention needs about 27 GB, and this machine has 20 GB: a --case with fewer" in line


@pytest.mark.long
@pytest.mark.parametrize("name", ["[bold]x.py", "[red]x.py", "sp ace.py"])
def test_a_name_is_no_markup(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).write_text(KERNELS)
    case = ("--check=forward", f"--case={CASE}", "--jobs=1")
    assert run("run", f"--impl={name}:transposed", *case) == 1
    said = capsys.readouterr()
    assert f"{name}:transposed" in said.out
    assert f"{name}:transposed" in said.err


def judged_by(shell: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell command that judges a kernel which prints past Python, by `$RUN`, and return its output."""
    (folder / "kernel.py").write_text(
        f"{KERNELS}\nimport os\ndef prints(q, k, v): os.write(1, b'!'); return right(q, k, v)\n"
    )
    arguments = f"--impl={folder}/kernel.py:prints --case={CASE} --check=forward --in-process --json={folder}/r.jsonl"
    script = f"RUN='{sys.executable} -m conformance run {arguments}'; {shell}"
    return subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_with_all_its_outputs_closed_a_run_leaves_right_records(tmp_path: Path) -> None:
    assert judged_by("$RUN <&- >&- 2>&-", tmp_path).returncode == 0
    assert {record.verdict for record in records.read_jsonl(tmp_path / "r.jsonl")} == {records.PASS}
    assert not [line for line in (tmp_path / "r.jsonl").read_text().splitlines() if line.startswith("!")]


def test_a_folder_that_was_removed_is_one_clear_line(tmp_path: Path) -> None:
    ran = judged_by("mkdir gone; cd gone; rmdir ../gone; $RUN", tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: the current folder")
    assert len(ran.stderr.splitlines()) == 1
