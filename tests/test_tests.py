"""Tests draw from generators of their own, and derive the tolerances that they do not take from the oracle's bounds."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# What makes a generator, or a key that others are split from.
GENERATORS = {"default_rng", "RandomState", "Generator", "PCG64", "Philox", "MT19937", "SFC64", "Random"}
KEYS = {"key", "PRNGKey"}
# What compares up to a tolerance, and which of its arguments have to be given: the defaults are nobody's derivation.
TOLERANT = {
    "assert_allclose": {"rtol", "atol"},
    "allclose": {"rtol", "atol"},
    "isclose": {"rtol", "atol"},
    "approx": {"abs"},
    "check_grads": {"rtol", "atol"},
}
# They count digits or units in the last place.
NEVER = {"assert_almost_equal", "assert_array_almost_equal", "assert_approx_equal", "assert_array_max_ulp"}
DERIVED = "tolerance:"
FILES = sorted(TESTS.rglob("*.py"))


def dotted(node: ast.expr) -> tuple[str, ...]:
    """`("np", "random", "default_rng")` of `np.random.default_rng`; what is no name is left out."""
    if isinstance(node, ast.Attribute):
        return (*dotted(node.value), node.attr)
    return (node.id,) if isinstance(node, ast.Name) else ()


def calls(nodes: Iterator[ast.AST]) -> Iterator[tuple[ast.Call, tuple[str, ...]]]:
    """Calls by name."""
    for node in nodes:
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            yield node, name


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below `node` that importing the module evaluates: of functions, decorators and defaults alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = [*getattr(child, "decorator_list", []), child.args]
        else:
            inner = [child]
        for part in inner:
            yield part
            yield from at_import(part)


def makes_generator(name: tuple[str, ...]) -> bool:
    return name[-1] in GENERATORS or (name[-1] in KEYS and name[-2:-1] == ("random",))


def lives_on(function: ast.FunctionDef) -> bool:
    """Whether what the function returns is kept from one test to the next."""
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        scoped = isinstance(decorator, ast.Call) and any(keyword.arg == "scope" for keyword in decorator.keywords)
        if dotted(called)[-1:] in (("cache",), ("lru_cache",)) or (dotted(called)[-1:] == ("fixture",) and scoped):
            return True
    return False


def shared_generators(source: str) -> list[int]:
    """Lines that make a generator which several tests may draw from, or that draw from a library's own."""
    tree = ast.parse(source)
    found = {node.lineno for node, name in calls(at_import(tree)) if makes_generator(name)}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if lives_on(function):
            given = (node.value for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield))
            found |= {node.lineno for node, name in calls(x for x in given if x is not None) if makes_generator(name)}
    for node, name in calls(ast.walk(tree)):
        if name[:-1] in (("np", "random"), ("numpy", "random"), ("random",)) and not makes_generator(name):
            found.add(node.lineno)
    return sorted(found)


def comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def explained(statement: ast.stmt, found: dict[int, str], lines: list[str]) -> bool:
    """Whether a derivation stands beside the statement or in the comment right above it."""
    beside = [found.get(line, "") for line in range(statement.lineno, (statement.end_lineno or 0) + 1)]
    above = statement.lineno - 1
    while above in found and lines[above - 1].lstrip().startswith("#"):
        beside.append(found[above])
        above -= 1
    return any(DERIVED in comment.lower() for comment in beside)


def is_zero(keyword: ast.keyword) -> bool:
    return isinstance(keyword.value, ast.Constant) and keyword.value.value == 0


def compares_difference(node: ast.AST) -> bool:
    """Whether this is `abs(x - y) <= something`, however it is reduced."""
    if not (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE)):
        return False
    sizes = [call for call, name in calls(ast.walk(node.left)) if name[-1] in ("abs", "absolute")]
    return any(isinstance(x, ast.BinOp) and isinstance(x.op, ast.Sub) for call in sizes for x in ast.walk(call))


def smallest(tree: ast.Module, at: ast.expr) -> ast.stmt:
    """The innermost statement around an expression."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= at.lineno <= at.end_lineno <= node.end_lineno  # type: ignore[operator] # parsed nodes have their ends
    ]
    return max(around, key=lambda node: node.lineno)


def underived_tolerances(source: str) -> list[str]:
    """`line: what is wrong` of everything that compares up to a tolerance nobody derives."""
    tree, found, lines = ast.parse(source), comments(source), source.splitlines()
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr):
            continue
        name = dotted(node.func)[-1:] if isinstance(node, ast.Call) else ()
        if name and name[0] in NEVER:
            wrong.append(f"{node.lineno}: {name[0]} has no tolerance that can be derived")
        elif name and name[0] in TOLERANT:
            assert isinstance(node, ast.Call)
            given = {keyword.arg: keyword for keyword in node.keywords}
            if missing := TOLERANT[name[0]] - given.keys():
                wrong.append(f"{node.lineno}: {name[0]} is not given {', '.join(sorted(missing))}")
            elif all(is_zero(x) for key, x in given.items() if key in ("rtol", "atol", "rel", "abs")):
                wrong.append(f"{node.lineno}: {name[0]} without tolerance is array_equal, or ==")
            elif not explained(smallest(tree, node), found, lines):
                wrong.append(f"{node.lineno}: {name[0]} without a comment `# Tolerance: why`")
        elif compares_difference(node) and not explained(smallest(tree, node), found, lines):
            wrong.append(f"{node.lineno}: a difference is compared without a comment `# Tolerance: why`")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_generator_is_shared_between_tests(path: Path) -> None:
    assert shared_generators(path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_tolerance_is_derived(path: Path) -> None:
    assert underived_tolerances(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("RNG = np.random.default_rng(0)", [1]),
        ("class A:\n    rng = default_rng()", [2]),
        ("KEY = jax.random.key(0)", [1]),
        ("KEYS = jax.random.split(jax.random.PRNGKey(0))", [1]),
        ("def f(rng=np.random.default_rng(0)): ...", [1]),
        ("@given(np.random.default_rng(0))\ndef f(): ...", [1]),
        ("@functools.cache\ndef f():\n    return np.random.default_rng(0)", [3]),
        ("@pytest.fixture(scope='module')\ndef f():\n    yield random.Random(0)", [3]),
        ("def f():\n    return np.random.normal(size=3)", [2]),
        ("def f():\n    random.shuffle(x)", [2]),
        ("def f():\n    return np.random.default_rng(0).normal(), jax.random.normal(jax.random.key(0))", []),
        ("@pytest.fixture\ndef f():\n    return np.random.default_rng(0)", []),
        ("f = lambda: np.random.default_rng(0)", []),
        ("@functools.cache\ndef f():\n    return np.random.default_rng(0).normal()", []),
        ("CACHE = cache.key(0)", []),
    ],
)
def test_shared_generators_are_found(source: str, lines: list[int]) -> None:
    assert shared_generators(source) == lines


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("np.testing.assert_allclose(x, y, atol=1e-5)", "not given rtol"),
        ("np.testing.assert_allclose(x, y, rtol=1e-5, atol=0)", "without a comment"),
        ("# a comment, not about it\nassert np.isclose(x, y, rtol=1e-5, atol=0)", "without a comment"),
        ("# Tolerance: of another line\n\nassert np.allclose(x, y, rtol=1e-5, atol=0)", "without a comment"),
        ("assert x == pytest.approx(1, rel=1e-3)", "not given abs"),
        ("assert x == pytest.approx(1)", "not given abs"),
        ("# Tolerance: none\nnp.testing.assert_allclose(x, y, rtol=0, atol=0)", "array_equal"),
        ("# Tolerance: none\nassert_almost_equal(x, y)", "can be derived"),
        ("check_grads(f, x, order=1)", "not given atol, rtol"),
        ("assert (np.abs(x - y).max() < 1e-5).all()", "a difference is compared"),
        ("assert abs(x.mean() - 1) <= 0.1", "a difference is compared"),
        ("np.testing.assert_allclose(x, y, rtol=2**-53, atol=0)  # Tolerance: one rounding", None),
        ("# Tolerance: two\n# roundings\nassert x == pytest.approx(\n    1, abs=2**-52\n)", None),
        ("for x in y:\n    # Tolerance: one rounding\n    assert abs(x - 1) < 2**-53", None),
        ("assert abs(x) < 3\nassert x - y < 3", None),
    ],
)
def test_underived_tolerances_are_found(source: str, complaint: str | None) -> None:
    found = underived_tolerances(source)
    assert len(found) == (complaint is not None)
    assert all(str(complaint) in wrong for wrong in found)
