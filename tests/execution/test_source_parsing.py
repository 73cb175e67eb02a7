"""Test that sources are read also while something else parses, which CPython 3.11 cannot before 3.11.8."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.checks import CHECKS
from conformance.execution.source_digests import parse_source

SOURCE = Path(ast.__file__).read_text()


@pytest.fixture(autouse=True)
def parsing_collector() -> Iterator[None]:
    """Let each collection of garbage parse, as another thread would, and collect often."""

    def parse(phase: str, info: dict[str, int]) -> None:
        ast.parse("1")

    threshold = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(100)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(parse)


@pytest.mark.parametrize("read", [lambda: parse_source(SOURCE), lambda: [check.about for check in CHECKS]])
def test_sources_are_read_while_another_parses(read: Callable[[], object]) -> None:
    for check in CHECKS:
        check.__dict__.pop("about", None)
    assert read()
    assert gc.isenabled()


@pytest.mark.skipif(sys.version_info >= (3, 11, 8), reason="CPython does it right from 3.11.8 on")
def test_the_parser_alone_fails() -> None:
    with pytest.raises(SystemError, match="recursion depth"):
        ast.parse(SOURCE)
