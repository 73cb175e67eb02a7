"""The function is replaced wherever its module holds it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.mutation.substitution import replace_function


def attend(q: Any, k: Any, v: Any) -> Any:
    """Be the function that is replaced."""


def test_the_default_of_a_parameter_is_replaced(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Layer:
        function: Callable[..., Any] = attend

    def apply(x: Any, *, function: Callable[..., Any] = attend) -> Any:
        return function

    module = types.ModuleType("layers")
    vars(module).update(attend=attend, Layer=Layer, apply=apply)
    replace_function(module, {"replace": "layers:attend", "mode": "true", "folder": str(tmp_path)})
    assert module.attend is not attend
    assert Layer().function is apply(0) is module.attend
