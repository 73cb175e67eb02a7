"""Test that kernels of authors who did not know the checks are judged rightly, and that findings name their faults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest

import conformance
from tests.unseen.kernels import FOLDER, UnseenKernel, load_kernels

KERNELS = load_kernels()
WRONG = [kernel for kernel in KERNELS.values() if kernel.folder == "wrong"]
CORRECT = [kernel for kernel in KERNELS.values() if kernel.folder == "correct"]


def test_every_kernel_is_listed() -> None:
    files = sorted(path.stem for kind in ("wrong", "correct") for path in (FOLDER / kind).glob("*.py"))
    assert sorted(KERNELS) == files


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", WRONG, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_is_seen_and_its_fault_is_named_as_it_was(kernel: UnseenKernel, tmp_path: Path) -> None:
    # No time limits the probes, so that a slow machine finds the same.
    report = judge(kernel, tmp_path, "smoke", confirm_seconds=math.inf, diagnose_seconds=0)
    assert not report.conforms
    said = "\n".join([report.findings[0].cause, *report.findings[0].facts])
    assert [words for words in kernel.words if words not in said] == []


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", CORRECT, ids=lambda kernel: kernel.name)
def test_a_correct_kernel_is_not_accused(kernel: UnseenKernel, tmp_path: Path) -> None:
    report = judge(kernel, tmp_path, "quick")
    assert [finding.cause for finding in report.findings] == []
    assert report.conforms


def judge(kernel: UnseenKernel, folder: Path, level: Literal["smoke", "quick"], **options: Any) -> conformance.Report:
    path = folder / f"{kernel.name}.py"
    path.write_text(kernel.source, encoding="utf-8")
    return conformance.check(f"{path}:attention", level=level, sandbox=True, progress=False, **options)
