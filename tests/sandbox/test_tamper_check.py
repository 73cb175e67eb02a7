"""Test that replaced parts of functions are found, and that ordinary changes are not reported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cases.case_id import parse_case_id
from conformance.execution import kernel_constants
from conformance.sandbox import tamper_check
from impls.contract.implementation import validate_operands
from reports.output_files import write_text

FUNCTIONS = [
    value for value in vars(kernel_constants).values() if getattr(value, "__module__", "") == kernel_constants.__name__
]
FUNCTION: Any = next(value for value in FUNCTIONS if hasattr(value, "__code__"))
NAME = f"{kernel_constants.__name__}.{FUNCTION.__name__}.__code__"


@pytest.fixture
def restored() -> Iterator[None]:
    before = FUNCTION.__code__, FUNCTION.__defaults__, FUNCTION.__kwdefaults__
    yield
    FUNCTION.__code__, FUNCTION.__defaults__, FUNCTION.__kwdefaults__ = before
    vars(FUNCTION).pop("note", None)


@pytest.mark.parametrize(
    "replace",
    [
        lambda: setattr(FUNCTION, "__code__", FUNCTION.__code__.replace(co_name="other")),
        lambda: setattr(FUNCTION, "__defaults__", (1, 2)),
        lambda: setattr(FUNCTION, "__kwdefaults__", {"x": 1}),
    ],
    ids=["code", "defaults", "defaults by name"],
)
@pytest.mark.usefixtures("restored")
def test_what_is_replaced_in_a_function_is_found_each_time(replace: Callable[[], None]) -> None:
    before = tamper_check.take_snapshot()
    FUNCTION.note = "an attribute, which makes no difference"
    assert tamper_check.find_replaced(before) == []
    assert tamper_check.find_replaced(before) == []
    replace()
    assert NAME in tamper_check.find_replaced(before)
    assert NAME in tamper_check.find_replaced(before)


@pytest.mark.parametrize("function", [parse_case_id, validate_operands, write_text], ids=lambda one: one.__module__)
def test_every_package_of_ours_is_checked(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = tamper_check.take_snapshot()
    monkeypatch.setitem(vars(sys.modules[function.__module__]), function.__name__, lambda *arguments: None)
    assert f"{function.__module__}.{function.__name__}" in tamper_check.find_replaced(before)
