"""Bad command lines, bad files and bad kernels: one clear line or one record each, no traceback, the right exit code.

`test_misspelt` has the command lines that are misspelt; here is what is spelt well and wrong all the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance import cli, records
from conformance.records import ERROR, FAIL, RED, UNSUPPORTED

CASE = "train/f32/B1.T2.S4.N2.K2.H4.V4/full/normal/s0"
RECORD = {
    "implementation": "k",
    "platform": "cpu",
    "case": CASE,
    "check": "forward",
    "observable": "out",
    "verdict": "pass",
    "schema": records.SCHEMA,
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
    """The exit code of a command."""
    try:
        return cli.main(cli.parser().parse_args(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


WRONG_RETURN = "the call must return out alone, an array [B, T, N, V], and returned "
NO_RESIDUALS = "with save_residuals=True the call must return (out, {'logsumexp': ..., 'max_logits': ...})"
KINDS = [
    ("none", ERROR, f"{WRONG_RETURN}None: is there a `return`?"),
    ("lists", ERROR, f"{WRONG_RETURN}a list of 1 (an array float32[1, 2, 2, 4])"),
    ("pair", ERROR, "which save_residuals=True alone asks for"),
    ("mapping", ERROR, f"{WRONG_RETURN}a mapping with 'out'"),
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
    ("unnamed", ERROR, f"{NO_RESIDUALS} with an array for each, and returned a tuple of 2 ("),
    ("nothing", ERROR, f"{NO_RESIDUALS} with an array for each, and returned a tuple of 2 ("),
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
    (folder / "r.jsonl").write_text(
        json.dumps({**RECORD, "verdict": "error", "reason": "\x1b[31m \ud800 \u202e"}) + "\n"
    )
    assert run("report", "r.jsonl", "--report=r.html") == 0
    page = (folder / "r.html").read_text()
    assert r"\x1b[31m \ud800 \u202e" in page
    assert all(x.isprintable() or x == "\n" for x in page)


FILES: list[tuple[str, Any, str]] = [
    ("cut", json.dumps(RECORD)[:40], "Unterminated string"),
    ("twice", json.dumps(RECORD) * 2, "Extra data"),
    ("deep", "[" * 100_000, "maximum recursion depth"),
    ("digits", '{"schema": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ("null", "null", "a JSON object is needed, got NoneType"),
    ("verdict", {"verdict": "fine"}, "verdict 'fine' is none of pass"),
    ("unknown", {"colour": "red"}, "unexpected keyword argument 'colour'"),
    ("name", {"implementation": None}, "implementation must be text, got None"),
    ("reason", {"reason": 5}, "reason must be text, got 5"),
    ("ratio", {"ratio": "many"}, "could not convert string to float: 'many'"),
    ("ratios", {"ratio": [1]}, "ratio must be a number, got [1]"),
    ("seconds", {"seconds": "x"}, "seconds must be a number, got 'x'"),
    ("figures", {"figures": [1]}, "is not a conformance record"),
    ("features", {"features": [1]}, "features must be text"),
    ("worst", {"worst": [1]}, "is not a conformance record"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=[name for name, _, _ in FILES])
def test_a_bad_file_is_one_line_that_names_it(
    name: str, content: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = content if isinstance(content, str) else json.dumps({**RECORD, **content})
    (folder / f"{name}.jsonl").write_text(json.dumps(RECORD) + "\n" + text + "\n")
    assert run("report", f"{name}.jsonl", "--report=r.html") == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"error: {name}.jsonl:2 is not a conformance record: ")
    assert message in line
    assert not (folder / "r.html").exists()


SOURCES: list[tuple[str, str | bytes, str]] = [
    ("zeros", b"\xff\xfe\x00", "null bytes"),
    ("tabs", "def attention(q, k, v):\n\treturn q\n        return v\n", "does not import: TabError: "),
    ("coding", "# -*- coding: nonsense -*-\n", "does not import: SyntaxError: unknown encoding: nonsense"),
    ("latin", b'x = "\xe9"\n', "does not import: SyntaxError: "),
    ("empty", "", "has no attribute 'attention'"),
    ("needs", "import nothing_like_it\n", "No module named 'nothing_like_it' (needs.py:1: import nothing_like_it)"),
    (
        "skips",
        "import pytest\npytest.skip('x', allow_module_level=True)\n",
        "does not import: Skipped: x (skips.py:2: ",
    ),
    ("word", "attention = 'x'\n", "is a str, not a function or an Implementation"),
    ("products", "from conformance import declare\n@declare(products='fp8')\ndef attention(q, k, v): ...\n", "'fp8'"),
    (
        "rows",
        "from conformance import declare\n@declare(empty_rows='nan')\ndef attention(q, k, v): ...\n",
        "empty_rows must be one of 'zero', 'mean', 'undefined', got 'nan' (rows.py:2: @declare(empty_rows='nan'))",
    ),
    (
        "features",
        "from conformance import declare\n@declare(unsupported={'causl': 'no'})\ndef attention(q, k, v): ...\n",
        "unsupported names ['causl'], known are",
    ),
    (
        "reasons",
        "from conformance import declare\n@declare(unsupported=['causal'])\ndef attention(q, k, v): ...\n",
        "unsupported must name features with their reasons, got ['causal']",
    ),
    (
        "uncalled",
        "from conformance import Implementation\nattention = Implementation(name='x', call=None)\n",
        "x: call must be a function, got a NoneType",
    ),
    (
        "unnamed",
        "from conformance import Implementation\nattention = Implementation(name='\\x1b[31m', call=print)\n",
        r"name must be text that shows as it is, got '\x1b[31m'",
    ),
    (
        "signature",
        "class A:\n    @property\n    def __signature__(self): raise OSError('no')\n    def __call__(self): ...\n"
        "attention = A()\n",
        "signature.py:attention",
    ),
]


@pytest.mark.parametrize(("name", "source", "message"), SOURCES, ids=[name for name, _, _ in SOURCES])
def test_what_is_no_kernel_is_one_line(
    name: str, source: str | bytes, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / f"{name}.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    assert run("run", f"--impl={name}.py:attention", f"--case={CASE}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert line.isprintable()


def test_a_problem_that_needs_more_memory_than_there_is_says_how_much(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run", "--impl=kernels.py:right", "--problem=sparse_attention", "--full-size"]
    monkeypatch.setattr("conformance.commands.lookup._memory", lambda: 20 * 10**9)
    assert run(*asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sparse_attention needs about 27 GB, and this machine has 20 GB: a --case with fewer" in line


COMMANDS = [
    (["run", "--impl=kernels.py:right", f"--case={CASE.replace('B1', 'B99999999999')}"], "GB for its operands alone"),
    (["run", "--impl=kernels.py:right", f"--case={CASE.replace('s0', 's' + '9' * 30)}"], "seed must be in 0..2**64-1"),
    (["run", "--impl=kernels.py:right", f"--case={CASE}", "--report=\0.html"], "cannot be written: embedded null byte"),
    (
        ["run", "--impl=\x1b[31m.py:right", f"--case={CASE}"],
        r"\x1b[31m.py:right: a name must be text",
    ),
    (["run", "--impl=..:right", f"--case={CASE}"], "cannot import ..: TypeError"),
    (["run", "--impl=os:getcwd", f"--case={CASE}"], "os:getcwd() does not take q, k, v"),
    (["explain", "\x1b[31m"], "is not a case id"),
    (["bench", "--impl=kernels.py:right", "--cases=zzz"], "no default case matches --cases='zzz': they are train/"),
    (["bench", "--impl=kernels.py:right", "--seconds=nan"], "--seconds must be positive, got nan"),
    (["bench", "--impl=,"], "nothing to time: give --impl=NAME"),
    (["tune", "--impl=kernels.py:right"], "kernels.py:right declares nothing to tune"),
    (["explore", "--impl=kernels.py:right", "--seconds=-1"], "--seconds must be positive and finite, got -1"),
    (["calibrate"], "nothing to calibrate by: give records"),
    (["calibrate", "nope.jsonl"], "nope.jsonl cannot be read: No such file"),
    (["sensitivity", "--bank=json:dumps"], "must be a sequence of conformance.sensitivity.PlantedBug"),
    (["sensitivity"], "no bank: give --bank=module:attribute"),
    (["report", ".", "--report=r.html"], ". cannot be read: Is a directory"),
]


@pytest.mark.parametrize(("arguments", "message"), COMMANDS, ids=[message for _, message in COMMANDS])
def test_a_bad_command_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert line.isprintable()


def test_settings_that_are_no_toml_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pyproject.toml").write_text("[tool.attention_conformance\n")
    assert run("run", "--impl=kernels.py:right", f"--case={CASE}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pyproject.toml" in line


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
    """What a shell says that judges a kernel which prints past Python, by `$RUN`."""
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
