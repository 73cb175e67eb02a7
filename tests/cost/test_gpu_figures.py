"""Figures of GPU programs, read from the output of compiler and assembler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conformance.accelerators.compilation import _capture_output
from conformance.accelerators.gpus import GPUS
from conformance.cost.gpu import gpu_figures
from conformance.cost.gpu.gpu_figures import NvidiaTools

MOSAIC = """ptxas info    : Compiling entry function 'dq' for 'sm_90a'
    392 bytes stack frame, 408 bytes spill stores, 388 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 392 bytes cumulative stack size, 1 bytes smem"""
TRITON = """    48 bytes stack frame, 56 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size, 408 bytes cmem[0]"""
WRITES = 'for each; do case $each in --output-file=*) cp "$(dirname "$0")/code" "${each#*=}";; esac; done'
HOPPER = next(gpu for gpu in GPUS if gpu.name == "h100")
LAUNCHED = "kKernel fusion.1, shared_memory: 49152 bytes\nkKernel fusion.2, shared_memory: 128 bytes"


@pytest.fixture
def assembler(tmp_path: Path) -> Path:
    """Says of the kernels in a file what is written there, as `ptxas` does: on standard error."""
    program = tmp_path / "ptxas"
    program.write_text('#!/bin/sh\nfor last; do :; done\ncat "$last" >&2\n')
    program.chmod(0o755)
    return program


def programs(ptxas: Path, nvdisasm: Path | None = None) -> NvidiaTools:
    return NvidiaTools(ptxas, nvdisasm)


def test_the_largest_of_all_kernels_is_told(tmp_path: Path, assembler: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "f.ptx").write_text(TRITON)
    (folder / "f.thunk_sequence.txt").write_text(LAUNCHED)
    shared = {"dq": 133184, "dkv": 1024}
    found = gpu_figures.compute_gpu_figures(folder, MOSAIC.splitlines(), shared, programs(assembler), HOPPER, None)
    assert found == {"shared_bytes": 133184, "registers": 255, "spilled_bytes": 408}
    found = gpu_figures.compute_gpu_figures(folder, [], {}, programs(assembler), HOPPER, None)
    assert found == {"shared_bytes": 49152, "registers": 255, "spilled_bytes": 56}


def test_what_is_not_told_is_no_figure(tmp_path: Path, assembler: Path) -> None:
    said = ["ptxas info    : 0 bytes gmem"]
    assert gpu_figures.compute_gpu_figures(tmp_path, said, {}, programs(assembler), HOPPER, None) == {}


# As the fake assembler sees it, what it is to say stands in the assembler text.
KERNEL = """.version 9.0
.visible .entry dq_mosaic_gpu_kernel(
	.param .u64 .ptr .align 256 dq_param_0
)
.maxntid 384, 1, 1
.minnctapersm 1
{ mma.sync; }
ptxas info    : Compiling entry function 'dq_mosaic_gpu_kernel' for 'sm_90a'
    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers"""
CODE = """	.section	.text.dq_mosaic_gpu_kernel,"ax",@progbits
.L_x_0:
        /*0000*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0010*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0020*/              @P0 BRA `(.L_x_0) ;
        /*0030*/                   EXIT ;
"""


def test_kernels_are_told_by_name_with_what_they_hold(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "f.ptx").write_text(KERNEL)
    tools = {
        "ptxas": f'#!/bin/sh\n{WRITES}\nfor last; do :; done\ncat "$last" >&2\n',
        "nvdisasm": "#!/bin/sh\ncat $2\n",
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "code").write_text(CODE)
    found = gpu_figures.compute_gpu_figures(
        folder, [], {"dq": 70_000}, programs(tmp_path / "ptxas", tmp_path / "nvdisasm"), HOPPER, (64, 64)
    )
    assert found["dq.registers"] == 168
    assert found["dq.spilled_bytes"] == 8
    assert found["dq.shared_bytes"] == 70_000
    # 65,536 registers hold 12 warps of 168 twice over, and not a third time.
    assert found["dq.occupancy"] == 12 / 64
    # It has no exponential, so nobody knows its pairs.
    assert "dq.pair_cycles" not in found
    without = gpu_figures.compute_gpu_figures(
        folder, [], {"dq": 70_000}, programs(tmp_path / "ptxas"), HOPPER, (64, 64)
    )
    assert not any(name.startswith("dq.") for name in without)


def test_kernels_that_differ_have_names_that_differ() -> None:
    told = [("k", {"registers": 1.0}), ("k", {"registers": 2.0}), ("k", {"registers": 1.0}), ("j", {"registers": 1.0})]
    assert [name for name, _ in gpu_figures._number_names(told)] == ["k", "k_2", "j"]


def test_printed_assembler_text_is_told_from_what_is_said_of_it(tmp_path: Path) -> None:
    said = ["//", ".version 9.0", "a", "}", "ptxas info : 0 bytes", "else", ".version 9.0", "b"]
    (one, other) = gpu_figures.list_ptx_files(tmp_path, said)
    assert (one.read_text(), other.read_text()) == (".version 9.0\na\n}\n", ".version 9.0\nb\n")


def test_libraries_are_heard_on_both_streams(capfd: pytest.CaptureFixture[str]) -> None:
    with _capture_output() as said:
        os.write(1, b"one\n")
        os.write(2, b"two\n")
    assert said == ["one", "two"]
    os.write(1, b"three\n")
    assert capfd.readouterr().out == "three\n"
