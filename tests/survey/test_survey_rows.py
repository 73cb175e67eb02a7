"""Test which rows of a survey the command line selects."""

from __future__ import annotations

import datetime

import pytest

from conformance.session.failures import CannotJudge
from conformance.survey.survey_rows import format_rows, select_rows, select_shard
from impls.libraries.library_specs import Library


def build_library(name: str, versions: tuple[str, ...], *functions: str) -> Library:
    return Library(
        name=name,
        package=name,
        imports=name,
        documentation="",
        python="3.12",
        resolved=datetime.date(2026, 1, 1),
        versions=versions,
        functions=dict.fromkeys(functions, "f"),
    )


LIBRARIES = {
    "flax": build_library("flax", ("3.0", "2.0"), "flax.linen", "flax.nnx", "flax.nnx.weights"),
    "keras": build_library("keras", ("1.0",), "keras.ops", "keras.layers.A", "keras.layers.B"),
}


@pytest.mark.parametrize(
    ("asked", "options", "expected"),
    [
        (["flax"], {}, ["flax-3.0"]),
        (["flax"], {"all_versions": True}, ["flax-3.0", "flax-2.0"]),
        (["flax==2.0"], {"all_versions": True}, ["flax-2.0"]),
        (["flax==1.9"], {}, ["flax-1.9"]),
        ([], {"everything": True}, ["flax-3.0", "keras-1.0"]),
        (["keras", "flax==2.0", "flax"], {}, ["flax-3.0", "flax-2.0", "keras-1.0"]),
    ],
)
def test_versions_of_libraries_are_selected(asked: list[str], options: dict[str, bool], expected: list[str]) -> None:
    assert [row.name for row in select_rows(LIBRARIES, asked, **options)] == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["flax"], ("library:flax.linen", "library:flax.nnx", "library:flax.nnx.weights")),
        (["flax.nnx"], ("library:flax.nnx",)),
        (["keras.layers"], ("library:keras.layers.A", "library:keras.layers.B")),
        (["library:flax.linen"], ("library:flax.linen",)),
        (["flax.linen", "flax.nnx.weights"], ("library:flax.linen", "library:flax.nnx.weights")),
    ],
)
def test_functions_of_a_library_are_selected(asked: list[str], expected: tuple[str, ...]) -> None:
    (row,) = select_rows(LIBRARIES, asked)
    assert row.functions == expected


@pytest.mark.parametrize(("asked", "about"), [(["flox"], "did you mean 'flax'"), ([], "--library")])
def test_what_selects_nothing_is_an_error(asked: list[str], about: str) -> None:
    with pytest.raises(CannotJudge, match=about):
        select_rows(LIBRARIES, asked)


def test_shards_share_out_all_rows() -> None:
    rows = select_rows(LIBRARIES, (), everything=True, all_versions=True)
    parts = [select_shard(rows, (number, 2)) for number in (1, 2)]
    assert sorted(row.name for part in parts for row in part) == sorted(row.name for row in rows)
    assert "flax==3.0" in format_rows(rows)
