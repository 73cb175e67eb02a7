"""Implementations are found by name, from the user's folder and from installed packages."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path

import jax
import pytest

from conformance.execution import implementation_registry
from conformance.execution.implementation_registry import ImplementationNotFound
from impls.catalogue import MODULES

KERNEL = "from beside import scale\ndef attention(q, k, v):\n    return scale * q\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_registered_name_is_found_under_its_own_name() -> None:
    assert [
        implementation_registry.find_implementation(name).name
        for name in implementation_registry.list_implementations()
    ] == implementation_registry.list_implementations()


def test_every_implementation_of_a_listed_module_is_listed() -> None:
    for module in dict.fromkeys(MODULES.values()):
        defined = [found.name for found in importlib.import_module(module).IMPLEMENTATIONS]
        assert defined == [name for name, where in MODULES.items() if where == module]


def test_a_file_finds_the_modules_beside_it(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "beside.py").write_text("scale = 2\n")
    (folder / "sub" / "own_kernel.py").write_text(KERNEL)
    assert implementation_registry.find_implementation("sub/own_kernel.py:attention").call(1, 2, 3) == 2


def test_a_module_is_found_from_the_current_folder(folder: Path) -> None:
    (folder / "own_package").mkdir()
    (folder / "own_package" / "flash.py").write_text("def attention(q, k, v):\n    return v\n")
    assert (
        implementation_registry.find_implementation("own_package.flash:attention").name == "own_package.flash:attention"
    )


def test_settings_of_jax_that_an_import_changes_are_conventions(folder: Path) -> None:
    settings = {"jax_default_matmul_precision": "highest", "jax_enable_x64": True, "jax_log_compiles": False}
    updates = "".join(f"jax.config.update({name!r}, {value!r})\n" for name, value in settings.items())
    (folder / "sets.py").write_text(f"import jax\n{updates}def attention(q, k, v):\n    return v\n")
    before = dict(jax.config.values)
    try:
        found = implementation_registry.find_implementation("sets.py:attention").conventions
    finally:
        for name in settings:
            jax.config.update(name, before[name])
    assert set(found) == {"jax_default_matmul_precision='highest'", "jax_enable_x64=True"}


def point(value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint("third_party", value, implementation_registry.ENTRY_POINT_GROUP)


def test_an_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point("tests.kernels.naive:attention")])
    assert "third_party" in implementation_registry.list_implementations()
    assert implementation_registry.find_implementation("third_party").name == "third_party"


def test_an_entry_point_that_does_not_load_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point("no_such_module:attention")])
    with pytest.raises(ImplementationNotFound, match="entry point third_party = no_such_module:attention") as caught:
        implementation_registry.find_implementation("third_party")
    assert "\n" not in str(caught.value)
