"""Kernels that take more than they may. Each returns the right result if nothing stops it."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from conformance.sandbox import protocol
from tests.kernels.naive import attention as right
from tests.sandbox.misbehaving_kernels import answers

PIECE = 2**27
PATIENCE = 120.0  # seconds that the measurement gets


def _wait_for_the_end(q: Any, k: Any, v: Any) -> Any:
    time.sleep(PATIENCE)
    return right(q, k, v)


def holds_memory_files(q: Any, k: Any, v: Any) -> Any:
    for number in range(12):
        os.write(os.memfd_create(str(number)), bytes(PIECE))
    return _wait_for_the_end(q, k, v)


def holds_shared_memory(q: Any, k: Any, v: Any) -> Any:
    held = []
    for _ in range(12):
        held.append(mmap.mmap(-1, PIECE))
        held[-1].write(bytes(PIECE))
        held[-1].madvise(mmap.MADV_DONTNEED)
    return _wait_for_the_end(q, k, v)


def shares_memory_with_children(q: Any, k: Any, v: Any) -> Any:
    """Hold little memory: the children share nearly all of it."""
    held = np.ones(PIECE // 8)
    for _ in range(8):
        if os.fork() == 0:
            time.sleep(PATIENCE)
            os._exit(int(held[0]))
    time.sleep(3)
    return right(q, k, v)


def holds_memory_in_children(q: Any, k: Any, v: Any) -> Any:
    for _ in range(12):
        if os.fork() == 0:
            held = np.ones(PIECE // 8)
            time.sleep(PATIENCE)
            os._exit(int(held[0]))
    return _wait_for_the_end(q, k, v)


def fills_its_folder(q: Any, k: Any, v: Any) -> Any:
    for number in range(12):
        Path(os.environ["TMPDIR"], str(number)).write_bytes(bytes(PIECE))
    return _wait_for_the_end(q, k, v)


def writes_a_large_file(q: Any, k: Any, v: Any) -> Any:
    with Path(os.environ["TMPDIR"], "large").open("wb") as file:
        file.truncate(PIECE * 12)
    return right(q, k, v)


def makes_a_sparse_file(q: Any, k: Any, v: Any) -> Any:
    with Path(os.environ["TMPDIR"], "sparse").open("wb") as file:
        file.truncate(PIECE * 6)
    time.sleep(3)
    return right(q, k, v)


def returns_much(q: Any, k: Any, v: Any) -> Any:
    return np.zeros(2**25, np.uint8)


def _answer(text: bytes, rest: int) -> None:
    os.write(answers(), protocol.LENGTHS.pack(len(text), rest) + text)


def announces_3_gib(q: Any, k: Any, v: Any) -> Any:
    _answer(b"null", 3 * 2**30)
    return _wait_for_the_end(q, k, v)


def answers_with_a_huge_shape(q: Any, k: Any, v: Any) -> Any:
    digits = b"9" * 500
    _answer(b'{"array": "float32", "shape": [' + b", ".join([digits] * 500) + b"]}", 0)
    return _wait_for_the_end(q, k, v)


def answers_deeply(q: Any, k: Any, v: Any) -> Any:
    _answer(b'{"list": [' * 20_000 + b"null" + b"]}" * 20_000, 0)
    return _wait_for_the_end(q, k, v)


def locks_its_folder(q: Any, k: Any, v: Any) -> Any:
    """Leave folders that only their modes keep from being removed, and names that are no valid text."""
    folder = os.path.join(os.environ["TMPDIR"], "locked")
    os.mkdir(folder)
    os.mkdir(os.path.join(folder, "inner"), 0)
    with contextlib.suppress(PermissionError):  # root can
        os.mkdir(os.path.join(folder, "inner", "innermost"), 0)
    for name in (b"\xff\xfe", b"line\nbreak", b"-rf"):
        os.mkdir(os.path.join(os.fsencode(folder), name))
    return right(q, k, v)


def waits_with_files(q: Any, k: Any, v: Any) -> Any:
    Path(os.environ["TMPDIR"], "waits").touch()
    return _wait_for_the_end(q, k, v)
