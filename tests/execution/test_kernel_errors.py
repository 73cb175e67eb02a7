"""Errors and wrong returns of user code: one sentence, with the line of the user's own code."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from conformance.check_api.judgement import Judgement, catch_errors
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import kernel_errors, returned_values
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import build_implementation
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.contract.declarations import declare
from reports.printable_text import make_printable
from reports.records import ERROR, UNSUPPORTED, Record, parse_record, serialize_record

OPEN = "train/f32/B1.T64.S64.N1.K1.H32.V32/window-l9-rinf/normal/s0"
CASE = parse_case_id("train/f32/B1.T2.S4.N2.K2.H4.V4/full/normal/s0")
KERNEL = """\
import jax, jax.numpy as jnp

def scores(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k[..., :3])

def below(q, k, v):
    return scores(q, k)

def raises(q, k, v):
    raise ValueError("bad \\x1b[31mred\\x1b[0m thing\\nsecond line")

def on_host(q, k, v):
    def fail(x):
        raise RuntimeError("trouble on the host")
    return jax.pure_callback(fail, jax.ShapeDtypeStruct(q.shape, q.dtype), q)

def backward(q, k, v):
    @jax.custom_vjp
    def copied(x):
        return x
    copied.defvjp(lambda x: (x, None), lambda saved, cotangent: (cotangent[..., :2],))
    return copied(q)

def chained(q, k, v):
    try:
        scores(q, k)
    except Exception as error:
        raise jax.errors.JaxRuntimeError("from afar") from error

def mute(q, k, v):
    class Mute(RuntimeError):
        def __str__(self):
            raise SystemExit(0)
    raise Mute

def wordless(q, k, v):
    assert q is None

def leaves(q, k, v):
    raise SystemExit(0)

def skips(q, k, v):
    class Skipped(BaseException):
        pass
    raise Skipped("not today")

def declines(q, k, v):
    raise NotImplementedError("no\\x07thing")

def bare(q, k, v):
    raise NotImplementedError

from beartype import beartype
from jaxtyping import Array, Float, jaxtyped

@jaxtyped(typechecker=beartype)
def typed(q: Float[Array, "b t n h"], k: Float[Array, "b t n h"], v):
    return q
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[..., Any]]:
    """Load the functions of a user's file in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("kernel", tmp_path / "kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return functools.partial(getattr, module)


def judged(function: Callable[..., Any]) -> Judgement:
    """Return the error of a compiled call in which a function raises."""
    executor, problem = Executor(build_implementation(function, "theirs")), draw_problem(CASE)

    def ask() -> Iterator[Judgement]:
        executor.forward(problem)
        yield Judgement(observable="out", verdict="pass")

    (found,) = catch_errors("all", ask)
    return found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("below", r"ValueError: Size of label 'h' .* (kernel.py:4: return jnp.einsum("),
        ("raises", r"ValueError: bad \x1b[31mred\x1b[0m thing (kernel.py:10: raise ValueError("),
        ("on_host", r"RuntimeError: trouble on the host (kernel.py:14: raise RuntimeError("),
        ("chained", r"JaxRuntimeError: from afar (kernel.py:28: raise jax.errors.JaxRuntimeError("),
        ("mute", r"Mute: its message cannot be had (kernel.py:34: raise Mute)"),
        ("wordless", r"AssertionError: no message (kernel.py:37: assert q is None)"),
        ("leaves", r"SystemExit: 0 (kernel.py:40: raise SystemExit(0))"),
        ("typed", r"TypeCheckError: parameter 'k' is f32[1,4,2,4] .* 'b t n h'] "),
        ("skips", r"Skipped: not today (kernel.py:45: raise Skipped("),
    ],
)
def test_what_is_raised_has_its_type_its_words_and_its_place(
    name: str, reason: str, kernel: Callable[[str], Callable[..., Any]]
) -> None:
    found = judged(kernel(name))
    assert found.verdict == ERROR
    start, _, end = reason.partition(" .* ")
    assert found.reason.startswith(start)
    assert end in found.reason
    assert found.reason.isprintable()


def test_what_a_backward_pass_does_wrong_is_where_it_is_called(kernel: Callable[[str], Callable[..., Any]]) -> None:
    implementation = build_implementation(kernel("backward"), "theirs")
    judge = Runner(Settings()).judge
    (found,) = judge(Job(implementation, CASE, (CHECKS_BY_NAME["gradients"],)))
    assert found.reason.startswith("ValueError: Custom VJP bwd rule must produce")
    assert found.reason.endswith("(kernel.py:22: return copied(q))")


def test_a_refusal_is_no_error(kernel: Callable[[str], Callable[..., Any]]) -> None:
    found = judged(kernel("declines"))
    assert (found.verdict, found.reason) == (UNSUPPORTED, r"no\x07thing")
    assert judged(kernel("bare")).reason == "the call raises NotImplementedError"


def test_ctrl_c_and_the_end_of_a_generator_are_nobodys_fault() -> None:
    def pressed() -> Iterator[Judgement]:
        yield from ()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(catch_errors("all", pressed))
    left = catch_errors("all", lambda: iter([Judgement(observable="out", verdict="pass")] * 2))
    next(left)
    left.close()  # type: ignore[attr-defined] # a generator


def test_no_place_where_no_code_of_theirs_is_on_the_way() -> None:
    with pytest.raises(AttributeError) as raised:
        draw_problem("no case")  # type: ignore[arg-type] # raises in our own code
    error = raised.value
    here = kernel_errors.find_place(error)
    assert here is not None
    assert here.file == __file__
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    assert kernel_errors.find_place(error) is None
    assert kernel_errors.describe_kernel_error(error).endswith("has no attribute 'dtype'")


def test_paths_elsewhere_are_whole(
    kernel: Callable[[str], Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    raises, folder = kernel("raises"), Path.cwd()
    monkeypatch.chdir("/")
    assert f"({str(folder).removeprefix('/')}/kernel.py:10: " in judged(raises).reason
    (folder / "deeper").mkdir()
    monkeypatch.chdir(folder / "deeper")
    assert f"({folder}/kernel.py:10: " in judged(raises).reason


def generator(q: Any, k: Any, v: Any) -> Any:
    yield q


async def coroutine(q: Any, k: Any, v: Any) -> Any:
    return q


RETURNED: list[tuple[Callable[..., Any], str]] = [
    (lambda q, k, v: None, "None: is there a `return`?"),
    (generator, "a generator: is there a `yield` where `return` is meant?"),
    (coroutine, "a coroutine: the function is `async`"),
    (lambda q, k, v: "out", "a string"),
    (lambda q, k, v: 1.0, "a float"),
    (lambda q, k, v: {"out": q}, "{'out': an array float32[1, 2, 2, 4]}"),
    (lambda q, k, v: [q, None], "a list of 2 (an array float32[1, 2, 2, 4], None)"),
    (
        lambda q, k, v: (q, {"logsumexp": q}),
        "{'logsumexp': an array float32[1, 2, 2, 4]}), which is right only with save_residuals=True",
    ),
    (lambda q, k, v: (q, k, v), "a tuple of 3 (an array float32[1, 2, 2, 4], an array float32[1, 4, 2, 4], an array"),
    (lambda q, k, v: (q,) * 9, "a tuple of 9 ("),
]


@pytest.mark.parametrize(("function", "what"), RETURNED, ids=[what for _, what in RETURNED])
def test_a_wrong_return_is_a_sentence(function: Callable[..., Any], what: str) -> None:
    found = judged(function)
    assert found.verdict == ERROR
    assert found.reason.startswith("the call must return out alone, an array [B, T, N, V], and returned ")
    assert what in found.reason


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (jnp.zeros(3), "returned an array float32[3]"),
        ((jnp.zeros(3), None), "returned a tuple of 2 (an array float32[3], None)"),
        ((jnp.zeros(3), [jnp.zeros(3)]), "returned a tuple of 2 (an array float32[3], a list)"),
        ((None, {}), "returned a tuple of 2 (None, an empty mapping)"),
        ((jnp.zeros(3), {"logsumexp": None}), "{'logsumexp': None})"),
    ],
)
def test_wrong_residuals_are_a_sentence(returned: object, what: str) -> None:
    with pytest.raises(kernel_errors.WrongReturn, match="with save_residuals=True the call must return") as raised:
        returned_values.check_residuals(returned)
    assert what in str(raised.value)


def test_a_residual_that_is_missing_is_named() -> None:
    out, residuals = returned_values.check_residuals((np.zeros(3), {"lse": np.zeros(3)}))
    assert out.shape == (3,)
    with pytest.raises(kernel_errors.WrongReturn, match=r"{'lse': an array float64\[3\]}, without 'logsumexp'"):
        returned_values.get_residual(residuals, "logsumexp")
    with pytest.raises(kernel_errors.WrongReturn, match="where 'lse' is unknown"):
        returned_values.check_names({"out": out, **residuals})


def test_an_error_about_an_open_side_names_its_declaration() -> None:
    def kernel(q: Any, k: Any, v: Any, *, window: Any = None) -> Any:
        return q[: window[0] + window[1]]

    def refusing(q: Any, k: Any, v: Any, *, window: Any = None) -> Any:
        raise ValueError("bad")

    problem = draw_problem(parse_case_id(OPEN))
    for function, error, has_hint in ((kernel, TypeError, True), (refusing, ValueError, False)):
        with pytest.raises(error) as raised:
            Executor(build_implementation(function, "theirs")).forward(problem)
        assert ("open_sides=-1" in kernel_errors.describe_kernel_error(raised.value)) == has_hint
    Executor(build_implementation(declare(open_sides=-1)(kernel), "theirs")).forward(problem)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text … as it is", "plain text … as it is"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("two\nlines\tand\r\x0cmore", "two lines and  more"),
        ("\u202eright to left", "\\u202eright to left"),
        ("half a \ud800 pair", "half a \\ud800 pair"),
        ("\x00", "\\x00"),
        ("a\n::error::b", "a \\x3a:error::b"),
        ("##[error]a", "\\x23#[error]a"),
        ("tests/test_a.py::test_b", "tests/test_a.py::test_b"),
    ],
)
def test_text_is_no_more_than_text(text: str, shown: str) -> None:
    assert make_printable(text) == shown
    record = Record(
        implementation=text, platform="cpu", case="c", check="k", observable="o", verdict=ERROR, reason=text
    )
    assert (record.implementation, record.reason) == (shown, shown)
    assert parse_record(serialize_record(record)) == record


def raised_in(path: Path, source: str) -> str:
    """Return the description of the error that a call of `f` in a file raises."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("raising", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- what it says is what the caller asks about
        module.f()
    return kernel_errors.describe_kernel_error(caught.value)


@pytest.mark.parametrize("words", ["plain", "a (b:1) (c.py:2: d", "(own.py:1: def f():)", "a\x1b[31m\u202e"])
@pytest.mark.parametrize("folder", ["", "with space (1)"])
def test_the_place_is_read_from_what_is_told(
    words: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir(exist_ok=True)
    file = Path(folder) / "own.py"
    told = raised_in(file.resolve(), f"def f():\n\tx = (1, 2)\n\traise ValueError({words!r}, x)  # (own.py:1: x)\n")
    assert kernel_errors.parse_place(told) == kernel_errors.Place(str(file), 3)
    assert kernel_errors.parse_place(f"{told}; it printed (own.py:1: y)") == kernel_errors.Place(str(file), 3)
    # A file that has been changed since, or is not there, has no such line.
    file.write_text("\n\n\n\n")
    assert kernel_errors.parse_place(told) is None
    file.unlink()
    assert kernel_errors.parse_place(told) is None


def test_words_without_a_place_have_none() -> None:
    for words in ("", "ratio 5 exceeds 4", "ValueError: a (b", "(x:1)", " (:1)", " (a:b)", " (/dev/null:1)"):
        assert kernel_errors.parse_place(words) is None
