"""`conformance.check(..., sandbox=True)`: how a function reaches a process of its own."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import conformance
from tests.api import kernels
from tests.api.kernels import PLAIN

SANDBOXED: dict[str, Any] = {"case": PLAIN, "checks": "forward", "progress": False, "sandbox": True}


def scaled(factor: float) -> Callable[..., Any]:
    def closure(q: Any, k: Any, v: Any) -> Any:
        return factor * kernels.attention(q, k, v)

    return closure


def test_a_function_of_a_module_is_imported_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_kernel.py").write_text(
        "import os\nimport jax\n\ndef attention(q, k, v):\n    return (2 - (os.getpid() == PID)) * "
        "jax.nn.dot_product_attention(q, k, v)\n\nPID = 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = importlib.import_module("my_kernel")
    module.PID = 1  # only in this process
    try:
        report = conformance.check(module.attention, **SANDBOXED)
    finally:
        del sys.modules["my_kernel"]
    assert "2 times" in report.findings[0].pattern
    assert "sandbox=True" in report.findings[0].code


def test_a_closure_is_sent_by_value() -> None:
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    assert conformance.check(scaled(1.0), logits="input", **SANDBOXED).conforms
    assert "2 times" in conformance.check(scaled(2.0), **SANDBOXED).findings[0].pattern


def test_what_cannot_be_pickled_is_named() -> None:
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    lock = threading.Lock()

    def closure(q: Any, k: Any, v: Any) -> Any:
        with lock:
            return kernels.attention(q, k, v)

    with pytest.raises(TypeError, match="closure variable 'lock'"):
        conformance.check(closure, **SANDBOXED)


def test_without_cloudpickle_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        conformance.check(scaled(1.0), **SANDBOXED)


def test_an_implementation_is_given_by_name() -> None:
    mine = conformance.Implementation(name="mine", call=conformance.reference_attention)
    with pytest.raises(TypeError, match="name"):
        conformance.check(mine, **SANDBOXED)
