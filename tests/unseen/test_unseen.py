"""Test that kernels of authors who did not know the checks are judged rightly, and that findings name their faults."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, Literal

import pytest

import conformance
from tests.unseen.kernels import FOLDER, NO, PARTLY, RIGHT, UnseenKernel, load_kernels

KERNELS = load_kernels()
WRONG = [kernel for kernel in KERNELS.values() if kernel.folder == "wrong"]
SEEN_AT_SMOKE = [kernel for kernel in WRONG if kernel.level == "smoke"]
_SAMPLE = random.Random(44)
WRONG_SAMPLE = _SAMPLE.sample(SEEN_AT_SMOKE, 12)
CORRECT_SAMPLE = _SAMPLE.sample([kernel for kernel in KERNELS.values() if kernel.is_correct], 5)


def test_every_kernel_is_listed_once_and_was_read() -> None:
    files = sorted(path.stem for kind in ("wrong", "correct") for path in (FOLDER / kind).glob("*.py"))
    assert sorted(KERNELS) == files
    for kernel in WRONG:
        assert (kernel.named in (RIGHT, PARTLY, NO)) is (kernel.level == "smoke")
        assert bool(kernel.words) is (kernel.named == RIGHT)


def test_the_document_has_the_figures_of_the_kernels() -> None:
    text = " ".join((FOLDER.parents[1] / "docs" / "sensitivity.md").read_text(encoding="utf-8").split())
    named = {how: sum(kernel.named == how for kernel in WRONG) for how in (RIGHT, PARTLY)}
    assert f"Now `smoke` sees {len(SEEN_AT_SMOKE)}," in text
    assert f"names the cause of {named[RIGHT]}, and a part of it of {named[PARTLY]}," in text
    assert sum(kernel.level is None for kernel in WRONG) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", WRONG_SAMPLE, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_is_seen_and_its_fault_is_named_as_it_was(kernel: UnseenKernel, tmp_path: Path) -> None:
    # No time limits the probes, so that a slow machine finds the same.
    report = judge(kernel, tmp_path, "smoke", confirm_seconds=math.inf, diagnose_seconds=0)
    assert not report.conforms
    said = "\n".join([report.findings[0].cause, *report.findings[0].facts])
    assert [words for words in kernel.words if words not in said] == []


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", CORRECT_SAMPLE, ids=lambda kernel: kernel.name)
def test_a_correct_kernel_is_not_accused(kernel: UnseenKernel, tmp_path: Path) -> None:
    report = judge(kernel, tmp_path, "quick")
    assert [finding.cause for finding in report.findings] == []
    assert report.conforms


def judge(kernel: UnseenKernel, folder: Path, level: Literal["smoke", "quick"], **options: Any) -> conformance.Report:
    path = folder / f"{kernel.name}.py"
    path.write_text(kernel.source, encoding="utf-8")
    return conformance.check(f"{path}:attention", level=level, sandbox=True, progress=False, **options)
