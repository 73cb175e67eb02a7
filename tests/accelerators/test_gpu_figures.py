"""What the kernels of a GPU program take, out of what compiler and assembler write and print."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conformance.accelerators import gpu_figures
from conformance.accelerators.compilation import _printed

MOSAIC = """ptxas info    : Compiling entry function 'dq' for 'sm_90a'
    392 bytes stack frame, 408 bytes spill stores, 388 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 392 bytes cumulative stack size, 1 bytes smem"""
TRITON = """    48 bytes stack frame, 56 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size, 408 bytes cmem[0]"""
LAUNCHED = "kKernel fusion.1, shared_memory: 49152 bytes\nkKernel fusion.2, shared_memory: 128 bytes"


@pytest.fixture
def assembler(tmp_path: Path) -> Path:
    """Says of the kernels in a file what is written there, as `ptxas` does: on standard error."""
    program = tmp_path / "ptxas"
    program.write_text('#!/bin/sh\nfor last; do :; done\ncat "$last" >&2\n')
    program.chmod(0o755)
    return program


def test_the_largest_of_all_kernels_is_told(tmp_path: Path, assembler: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "f.ptx").write_text(TRITON)
    (folder / "f.thunk_sequence.txt").write_text(LAUNCHED)
    found = gpu_figures.figures(folder, MOSAIC.splitlines(), [133184, 1024], assembler, "sm_90a")
    assert found == {"shared_bytes": 133184, "registers": 255, "spilled_bytes": 408}
    found = gpu_figures.figures(folder, [], [], assembler, "sm_90a")
    assert found == {"shared_bytes": 49152, "registers": 255, "spilled_bytes": 56}


def test_what_is_not_told_is_no_figure(tmp_path: Path, assembler: Path) -> None:
    assert gpu_figures.figures(tmp_path, ["ptxas info    : 0 bytes gmem"], [], assembler, "sm_80") == {}


def test_libraries_are_heard_on_both_streams(capfd: pytest.CaptureFixture[str]) -> None:
    with _printed() as said:
        os.write(1, b"one\n")
        os.write(2, b"two\n")
    assert said == ["one", "two"]
    os.write(1, b"three\n")
    assert capfd.readouterr().out == "three\n"
