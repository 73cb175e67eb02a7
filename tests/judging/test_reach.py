"""Who could be asked about one block only is told so in the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from cases.case import Case
from conformance.calling import registry
from conformance.contract import Implementation
from conformance.judging import plan
from conformance.records import PASS, Record, RunInfo
from reports import summary, wording


def taking(lengths: Callable[[int, int], bool]) -> Implementation:
    found = registry.find("dot_product")

    def supports(case: Case) -> str | None:
        return None if lengths(case.q_length, case.kv_length) else "not this length"

    return dataclasses.replace(found, name="it", supports_case=supports)


def few(lengths: Callable[[int, int], bool], level: str = "quick") -> str:
    return plan.plan([taking(lengths)], level=level).few_blocks["it"]


@pytest.mark.parametrize("level", ["smoke", "quick"])
def test_one_length_is_one_block(level: str) -> None:
    found = few(lambda q, kv: (q, kv) == (128, 128), level)
    assert found == "one block of 128 queries and one block of 128 keys"


def test_keys_and_queries_are_counted_apart() -> None:
    assert few(lambda q, kv: kv == 1152) == "one block of 1152 keys"
    assert few(lambda q, kv: q in (1, 128)) == "one block of 128 queries"
    assert few(lambda q, kv: q == 1) == ""


@pytest.mark.parametrize("block", [1, 64, 128, 256, 512])
def test_whole_blocks_are_enough(block: int) -> None:
    assert few(lambda q, kv: (q == 1 or q % block == 0) and kv % block == 0) == ""


def test_the_verdict_says_so() -> None:
    passed = Record(implementation="it", platform="cpu", case="c", check="forward", observable="out", verdict=PASS)
    blocks = {"it": "one block of 128 queries"}
    run = RunInfo(command="", level="quick", environment={}, tolerances=[], few_blocks=blocks)
    said = wording.headline(summary.standings([passed]), run)
    assert said == "it (cpu) conforms, asked about one block of 128 queries only."
