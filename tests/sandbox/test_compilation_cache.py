"""Test the cache of compiled programs: what a kernel's process finds there, and what it may leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from cases.case import Case
from cases.operand_values import draw_problem
from conformance import program_cache, served_run
from conformance.sandbox import compilation_cache, sandboxed_executor
from conformance.sandbox.kernel_process import Limits
from conformance.truth import disk_cache

CASE = Case(q_length=16, kv_length=16, head_dim=16, v_head_dim=16)
KERNEL = "import jax.numpy as jnp\ndef attention(q, k, v):\n    return {}\n"
PROGRAM = f"jit_call-{'0' * 64}-cache"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a cache folder of the test, in which new files count as complete."""
    monkeypatch.setenv(disk_cache.CACHE_VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(compilation_cache, "_SETTLE_SECONDS", -60.0)
    return tmp_path


def run_and_list_programs(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, list[str]]:
    """Run a kernel in a process; return its result and the programs that it had to compile."""
    compiled: list[str] = []

    def keep(place: Path | None, scratch: str) -> None:
        compiled.extend(one.name for one in os.scandir(Path(scratch, "programs")) if not one.is_symlink())
        really(place, scratch)

    really = compilation_cache.store_programs
    with monkeypatch.context() as patched:
        patched.setattr(compilation_cache, "store_programs", keep)
        found = sandboxed_executor.load_sandboxed(f"{kernel}:attention", None, Limits(timeout=60.0, memory=4 * 2**30))
        out = sandboxed_executor.create_executor(found).forward(draw_problem(CASE)).values["out"]
        sandboxed_executor.end_process(found)
    return out, compiled


def set_run_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(served_run.START_VARIABLE, repr(time.time() + 60))


def test_a_later_run_compiles_nothing_again_and_returns_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = home / "kernel.py"
    kernel.write_text(KERNEL.format("jnp.tanh(q) + 1"))
    first, compiled = run_and_list_programs(kernel, monkeypatch)
    assert compiled
    set_run_start(monkeypatch)
    again, compiled = run_and_list_programs(kernel, monkeypatch)
    assert compiled == []
    np.testing.assert_array_equal(again, first)


def test_no_process_finds_what_another_of_its_run_has_left(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = home / "kernel.py"
    kernel.write_text(KERNEL.format("jnp.tanh(q) + 2"))
    _, compiled = run_and_list_programs(kernel, monkeypatch)
    assert compiled == run_and_list_programs(kernel, monkeypatch)[1] != []


def test_another_source_has_another_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = home / "kernel.py"
    kernel.write_text(KERNEL.format("jnp.tanh(q) + 3"))
    before = compilation_cache.find_cache_folder(f"{kernel}:attention")
    run_and_list_programs(kernel, monkeypatch)
    set_run_start(monkeypatch)
    kernel.write_text(KERNEL.format("jnp.tanh(q) + 3 # once more"))
    assert compilation_cache.find_cache_folder(f"{kernel}:attention") != before
    assert run_and_list_programs(kernel, monkeypatch)[1] != []


def test_a_program_that_cannot_be_read_is_compiled_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = home / "kernel.py"
    kernel.write_text(KERNEL.format("jnp.tanh(q) + 4"))
    first, _ = run_and_list_programs(kernel, monkeypatch)
    place = compilation_cache.find_cache_folder(f"{kernel}:attention")
    assert place is not None
    for program in place.iterdir():
        program.write_bytes(program.read_bytes()[:40])
    set_run_start(monkeypatch)
    np.testing.assert_array_equal(run_and_list_programs(kernel, monkeypatch)[0], first)


def test_another_machine_has_another_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = home / "kernel.py"
    kernel.write_text(KERNEL.format("q"))
    before = compilation_cache.find_cache_folder(f"{kernel}:attention")
    monkeypatch.setattr(compilation_cache, "_describe_machine", lambda: "a machine with half as wide vectors")
    assert compilation_cache.find_cache_folder(f"{kernel}:attention") != before


@pytest.mark.parametrize("name", ["block_flash", "no_such_kernel"])
def test_ours_have_none_and_what_has_no_source_neither(home: Path, name: str) -> None:
    assert compilation_cache.find_cache_folder(name) is None


def test_nothing_is_kept_where_nothing_is_to_be(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk_cache.CACHE_VARIABLE, "")
    assert compilation_cache.find_cache_folder("kernel.py:attention") is None


def test_only_files_that_are_called_like_programs_are_kept(home: Path) -> None:
    left, place, scratch = home / "scratch" / "programs", home / "shelf" / "one", str(home / "scratch")
    left.mkdir(parents=True)
    (left / PROGRAM).write_bytes(b"a program")
    (left / "notes.txt").write_text("a word for the next run")
    (home / "secret").write_text("not the kernel's")
    (left / PROGRAM.replace("0", "1")).symlink_to(home / "secret")
    (left / PROGRAM.replace("0", "2")).mkdir()
    os.mkfifo(left / PROGRAM.replace("0", "3"))
    compilation_cache.store_programs(place, scratch)
    assert [program.name for program in place.iterdir()] == [PROGRAM]
    assert (place / PROGRAM).read_bytes() == b"a program"


def test_a_folder_that_was_made_a_link_is_not_followed(home: Path) -> None:
    elsewhere, place = home / "elsewhere", home / "shelf" / "one"
    for folder in (elsewhere, home / "scratch"):
        folder.mkdir()
    (elsewhere / PROGRAM).write_bytes(b"not the kernel's")
    (home / "scratch" / "programs").symlink_to(elsewhere)
    compilation_cache.store_programs(place, str(home / "scratch"))
    assert not place.exists()


def test_what_may_be_half_a_program_is_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation_cache, "_SETTLE_SECONDS", 30.0)
    left, place = home / "scratch" / "programs", home / "shelf" / "one"
    left.mkdir(parents=True)
    for number, age in enumerate((60.0, 0.0)):
        (left / PROGRAM.replace("0", str(number))).write_bytes(b"a program")
        os.utime(left / PROGRAM.replace("0", str(number)), (time.time() - age,) * 2)
    compilation_cache.store_programs(place, str(home / "scratch"))
    assert [program.name for program in place.iterdir()] == [PROGRAM]


def test_the_oldest_make_room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation_cache, "MAX_KERNELS", 2)
    left = home / "scratch" / "programs"
    left.mkdir(parents=True)
    (left / PROGRAM).write_bytes(b"a program")
    for number in range(4):
        place = home / "shelf" / str(number)
        compilation_cache.store_programs(place, str(home / "scratch"))
        os.utime(place, (number + 1.0,) * 2)
    assert len(list((home / "shelf").iterdir())) <= 3
    assert (home / "shelf" / "3" / PROGRAM).exists()


def count_stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_a_kernel_cannot_fill_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation_cache, "MAX_KERNEL_BYTES", 10_000)
    left, place = home / "scratch" / "programs", home / "shelf" / "one"
    left.mkdir(parents=True)
    for number in range(1000):
        (left / f"jit_call-{number:064x}-cache").write_bytes(bytes(100))
    (left / f"jit_huge-{'f' * 64}-cache").write_bytes(bytes(20_000))
    for _ in range(2):
        compilation_cache.store_programs(place, str(home / "scratch"))
        assert 9_000 < count_stored_bytes(place) <= 10_000
    assert not list(place.glob("jit_huge*"))


def test_the_oldest_programs_make_room_for_new_ones(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation_cache, "MAX_KERNEL_BYTES", 1_000)
    left, place = home / "scratch" / "programs", home / "shelf" / "one"
    left.mkdir(parents=True)
    place.mkdir(parents=True)
    old = place / f"jit_old-{'0' * 64}-cache"
    old.write_bytes(bytes(800))
    os.utime(old, (1.0, 1.0))
    (left / PROGRAM).write_bytes(bytes(800))
    compilation_cache.store_programs(place, str(home / "scratch"))
    assert [program.name for program in place.iterdir()] == [PROGRAM]


def test_all_kernels_together_cannot_fill_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation_cache, "MAX_KERNEL_BYTES", 1_000)
    monkeypatch.setattr(compilation_cache, "MAX_ALL_BYTES", 3_000)
    left = home / "scratch" / "programs"
    left.mkdir(parents=True)
    (left / PROGRAM).write_bytes(bytes(900))
    for number in range(6):
        compilation_cache.store_programs(home / "shelf" / str(number), str(home / "scratch"))
        os.utime(home / "shelf" / str(number), (number + 1.0,) * 2)
        assert count_stored_bytes(home / "shelf") <= 3_000
    assert (home / "shelf" / "5" / PROGRAM).exists()


def test_who_asks_what_compiling_costs_compiles(home: Path) -> None:
    asked: list[str] = []

    def hear(event: str, **_: str | int) -> None:
        asked.append(event)

    def compile_it() -> None:
        jax.jit(lambda x: x * 3 + 1).lower(np.ones(3, np.float32)).compile()

    before = jax.config.values["jax_compilation_cache_dir"]
    monitoring.register_event_listener(hear)
    try:
        (home / "programs").mkdir()
        program_cache.use_cache_folder(home / "programs")
        compile_it()
        with program_cache.bypass_cache():
            asked.clear()
            compile_it()
            assert "/jax/compilation_cache/compile_requests_use_cache" not in asked
        compile_it()
        assert "/jax/compilation_cache/cache_hits" in asked
    finally:
        monitoring.clear_event_listeners()
        jax.config.update("jax_compilation_cache_dir", before)
        jax_cache.reset_cache()
