"""Show each option of the Python calls in their reference: the calls take `**options` and list them at run time."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe

_KINDS: dict[Any, griffe.ParameterKind] = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}


class OptionSignatures(griffe.Extension):
    """Replace signature and docstring of functions that `list_options` decorates by those of the imported function."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace them, unless the function is another's."""
        if not any("list_options" in str(decorator.value) for decorator in func.decorators):
            return
        found = getattr(importlib.import_module(func.module.path), func.name)
        func.parameters = griffe.Parameters(*map(_convert_parameter, inspect.signature(found).parameters.values()))
        func.docstring = griffe.Docstring(inspect.getdoc(found) or "", parent=func)


def _convert_parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    default = None if parameter.default is inspect.Parameter.empty else repr(parameter.default)
    return griffe.Parameter(
        parameter.name, annotation=str(parameter.annotation), kind=_KINDS[parameter.kind], default=default
    )
