"""Wrong arguments of the Python calls: each is refused in one line that names the argument and the value."""

from __future__ import annotations

import functools
import inspect
import json
import math
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from beartype import BeartypeConf
from beartype.door import is_bearable

import conformance
from conformance.api.argument_checks import SuiteArguments
from conformance.api.report import Report
from conformance.gate.kernel_suite import find_suite
from conformance.testing import conformance_tests
from impls.contract.argument_validation import validate_arguments
from impls.contract.declarations import Formulas
from tests.api import kernels
from tests.api.kernels import PLAIN

KERNEL = kernels.attention
Q = np.zeros((1, 4, 2, 8), np.float32)
FORWARD: dict[str, Any] = {"checks": "forward", "progress": False}
ENTRIES: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    "check": (conformance.check, {"function": KERNEL, **FORWARD}),
    "assert_conforms": (conformance.assert_conforms, {"function": KERNEL, **FORWARD}),
    "conformance_tests": (conformance_tests, {"kernel": KERNEL}),
    "case": (conformance.case, {"case_id": PLAIN}),
    "cases": (conformance.cases, {}),
    "CaseData.arguments": (conformance.case(PLAIN).arguments, {"function": KERNEL}),
    "CaseData.run": (conformance.case(PLAIN).run, {"function": KERNEL}),
    "Report.save": (Report("x", "", "", (), (), None).save, {}),  # type: ignore[arg-type] # without a session
    "declare": (conformance.declare, {}),
    "declared": (conformance.declare(), {}),
    "Implementation": (conformance.Implementation, {"name": "x", "call": KERNEL}),
    "Arithmetic": (conformance.Arithmetic, {}),
    "Formulas": (Formulas, {}),
    "Accelerator": (conformance.Accelerator, {}),
    "name_axes": (conformance.name_axes, {"operand": "q", "names": {name: name for name in "BTNH"}}),
    "identity_projection": (conformance.identity_projection, {"num_heads": 2, "depth": 2}),
    "reference_attention": (conformance.reference_attention, {"q": Q, "k": Q, "v": Q}),
}


def refuse(entry: str, argument: str, value: Any, **others: Any) -> str:
    """Return the line by which an entry refuses a value."""
    function, right = ENTRIES[entry]
    with pytest.raises((TypeError, ValueError)) as raised:
        function(**{**right, **others, argument: value})
    message = str(raised.value)
    assert "\n" not in message
    assert argument in message
    return message


# An entry, an argument and a value, and how the message shows the value where it does so otherwise than `repr`.
WRONG: list[tuple[Any, ...]] = [
    ("check", "function", 3),
    ("check", "level", 3),
    ("check", "level", "smok"),
    ("check", "case", PLAIN.encode()[:8]),
    ("check", "case", ""),
    ("check", "cases", 3),
    ("check", "cases", ""),
    ("check", "checks", None),
    ("check", "checks", [3]),
    ("check", "checks", ["forwrd"], "'forwrd'"),
    ("check", "checks", {"forward": 1}),
    ("check", "seeds", 1.5),
    ("check", "seeds", True),
    ("check", "seeds", [0, True]),
    ("check", "seeds", "1"),
    ("check", "seeds", -1),
    ("check", "seeds", np.int64(-2), "got -2"),
    ("check", "pullback", "x"),
    ("check", "name", 3),
    ("check", "name", ""),
    ("check", "name", "a\nb"),
    ("check", "sandbox", "no"),
    ("check", "sandbox", 1),
    ("check", "fail_fast", "no"),
    ("check", "progress", 0),
    ("check", "timeout", "3"),
    ("check", "timeout", True),
    ("check", "confirm_seconds", math.nan),
    ("check", "confirm_seconds", -1),
    ("check", "diagnose_seconds", "3"),
    ("check", "report", 3),
    ("check", "json", b"x"),
    ("check", "products", np.zeros(3)),
    ("check", "residuals", 3),
    ("check", "unsupported", {"bias": 3}),
    ("assert_conforms", "cases", 3),
    ("assert_conforms", "gradients", 3),
    ("conformance_tests", "kernel", 3),
    ("conformance_tests", "level", "smok"),
    ("conformance_tests", "cases", 3),
    ("conformance_tests", "checks", [3]),
    ("conformance_tests", "seeds", 1.5),
    ("conformance_tests", "seeds", -1),
    ("conformance_tests", "name", 3),
    ("conformance_tests", "sandbox", "no"),
    ("conformance_tests", "unsupported", {"bias": 3}),
    ("case", "case_id", 3),
    ("case", "products", "fp8"),
    ("cases", "query", 3),
    ("cases", "function", "kernel.py:attention"),
    ("cases", "level", "smoke"),
    ("cases", "seed", 1.5),
    ("cases", "seed", True),
    ("cases", "seed", -1),
    ("CaseData.arguments", "function", 3),
    ("CaseData.run", "function", "x"),
    ("Report.save", "path", b"x.html"),
    ("declare", "products", np.zeros(3)),
    ("declare", "gradients", 3),
    ("declare", "gradients", "qkv"),
    ("declare", "unordered_sums", "dq"),
    ("declare", "tangents", "out"),
    ("declare", "residuals", 3),
    ("declare", "scaled_q", 1),
    ("declare", "block_sums", 1.5),
    ("declare", "block_sums", 0),
    ("declare", "logsumexp_sink", "no"),
    ("declare", "open_sides", -1.0),
    ("declare", "unsupported", ["bias"]),
    ("declared", "function", 3),
    ("declared", "function", np.zeros(3)),
    ("declared", "function", max),
    ("declared", "function", [].append, "functools.partial"),
    ("Implementation", "name", ""),
    ("Implementation", "call", 3),
    ("Implementation", "unsupported", {"bias": 3}),
    ("Implementation", "offers", "moba"),
    ("Implementation", "arithmetic", "exact"),
    ("Implementation", "variants", {"x": 3}),
    ("Implementation", "checkpoint_names", "x"),
    ("Implementation", "devices", 0),
    ("Implementation", "devices", True),
    ("Accelerator", "platform", "xpu"),
    ("name_axes", "names", 3),
    ("name_axes", "names", {"B": 3}),
    ("identity_projection", "num_heads", 2.5),
    ("identity_projection", "depth", -1),
    ("reference_attention", "mask", 3),
    ("reference_attention", "mask", np.ones(2, bool)),
    ("reference_attention", "mask_mod", 3),
    ("reference_attention", "save_residuals", "no"),
    ("reference_attention", "backward", 3),
]


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{row[0]}-{row[1]}-{n}" for n, row in enumerate(WRONG)])
def test_a_wrong_argument_is_one_line(wrong: tuple[Any, ...]) -> None:
    entry, argument, value, *shown = wrong
    text, *_ = shown or [" ".join(repr(value).split())]
    assert text in refuse(entry, argument, value)


@pytest.mark.parametrize("value", [math.nan, -1, 0, math.inf])
@pytest.mark.parametrize("argument", ["timeout", "max_gib"])
def test_a_limit_that_limits_nothing_is_refused_by_its_name(argument: str, value: float) -> None:
    assert f"{value:g}" in refuse("check", argument, value, sandbox=True)


def test_a_misspelt_name_is_one_line_with_the_right_one() -> None:
    assert "'logits'" in refuse("check", "logit", "input")
    assert "'checks'" in refuse("assert_conforms", "check", "forward")
    assert "'level'" in refuse("cases", "levl", "quick")
    assert "'smoke'" in refuse("check", "level", "smok")


KINDS: tuple[Any, ...] = (
    *(None, 3, 1.5, "x", b"x", [3], ["x"], ("x",), {"bias": 3}, {3: "x"}, object(), np.zeros(3), Path("x"), len),
    iter("x"),
)


def read_annotations(function: Callable[..., Any]) -> dict[str, Any]:
    names = {"Implementation": conformance.Implementation, "SuiteArguments": SuiteArguments}
    hints = get_type_hints(inspect.unwrap(function), localns=names)
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        found |= get_type_hints(get_args(hint)[0]) if get_origin(hint) is Unpack else {name: hint}
    return {name: hint for name, hint in found.items() if name != "return"}


@pytest.mark.parametrize("entry", sorted(ENTRIES.keys() - {"declared", "reference_attention"}))
def test_every_argument_of_a_kind_that_its_annotation_excludes_is_refused(entry: str) -> None:
    """Use beartype to decide which values an annotation excludes."""
    count = 0
    for argument, hint in read_annotations(ENTRIES[entry][0]).items():
        for value in KINDS:
            as_written = tuple(value) if isinstance(value, list) else value  # a list is taken for a tuple
            if not any(is_bearable(x, hint, conf=BeartypeConf(is_pep484_tower=True)) for x in (value, as_written)):
                refuse(entry, argument, value)
                count += 1
    assert count > 10


def test_numpy_numbers_are_numbers() -> None:
    number: Any = np.uint8(2)
    block_sums = conformance.Arithmetic(block_sums=number).block_sums
    assert (block_sums, type(block_sums)) == (2, int)
    assert conformance.cases(seed=number) == conformance.cases(seed=2)
    assert conformance.check(KERNEL, case=PLAIN, confirm_seconds=number, block_sums=number, **FORWARD).conforms
    for seeds in (number, [number], (2,), range(2, 3)):
        suite = find_suite(conformance_tests(KERNEL, seeds=seeds, block_sums=number))
        assert suite is not None
        assert suite.options.seeds == (2,)
        assert json.dumps([suite.options.seeds, suite.declarations]) == '[[2], {"block_sums": 2}]'


def test_sets_lists_and_paths_are_taken(tmp_path: Path) -> None:
    names: Any = {"moba"}
    assert conformance.Implementation(name="x", call=KERNEL, offers=names).offers == {"moba"}
    tags: Any = ["out"]
    assert list(conformance.Implementation(name="x", call=KERNEL, checkpoint_names=tags).checkpoint_names) == tags
    with os.scandir(Path(__file__).parent) as entries:
        path: Any = next(iter(entries))  # a path that is no `Path`
    with pytest.raises(ValueError, match="json"):
        conformance.check(KERNEL, case=PLAIN, json=path, **FORWARD)
    gradients = {"q", "k", "v"}
    found = conformance.check(KERNEL, case=PLAIN, checks={"forward"}, gradients=gradients, progress=False)
    assert found.conforms


def test_empty_texts_are_refused() -> None:
    assert "name" in refuse("conformance_tests", "name", "")
    assert "query" in refuse("cases", "query", "")
    assert "self" in refuse("check", "self", 3)


def test_arguments_arrive_as_they_are() -> None:
    @validate_arguments
    def take(number: float, function: Callable[..., Any], *, anything: Any, names: Mapping[str, str]) -> list[Any]:
        return [number, function, anything, names]

    number, function, anything, names = 3, functools.partial(KERNEL), np.float32(3), {"q": "k"}
    found = take(number, function, anything=anything, names=names)
    assert all(map(operator.is_, found, (number, function, anything, names)))
