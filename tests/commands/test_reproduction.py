"""The command printed with a failure finds the same failure again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from reports.records import Record
from tests.commands.reproduction import (
    ALWAYS,
    AT_NIGHT,
    Found,
    again,
    by_itself,
    differences,
    failures,
    folder_with_kernels,
    here,
)

Drawn = Callable[[Found], list[Record]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def drawn(folder: Path) -> Drawn:
    """Return the failures of a run, which runs once."""
    return functools.cache(functools.partial(failures, folder=folder, run=by_itself))


# Each takes seconds; a plain run of the tests asks the two that are judged soonest.
_SOON = ("raises", "hangs")


@pytest.mark.parametrize(
    "found",
    [pytest.param(each, id=each.name, marks=() if each.name in _SOON else pytest.mark.long) for each in ALWAYS],
)
def test_a_command_repeats_turn_options_and_name(found: Found, folder: Path) -> None:
    (record,) = failures(found, folder, here)
    assert not differences(record, again(record, folder, here)), record.reproduce


def test_fifty_are_drawn() -> None:
    assert sum(found.count for found in AT_NIGHT) == 50


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("found", "number"),
    [pytest.param(found, n, id=f"{found.name}-{n}") for found in AT_NIGHT for n in range(found.count)],
)
def test_a_failure_is_found_again_by_its_command(found: Found, number: int, drawn: Drawn, folder: Path) -> None:
    record = drawn(found)[number]
    assert not differences(record, again(record, folder, by_itself)), record.reproduce
