"""Conformance and gradient testing for attention in JAX.

Importing this package is cheap: what needs JAX is loaded when it is first asked for.
"""

from __future__ import annotations

import sys

# `python -m conformance` has the current folder first on the path, where a user's `numpy.py` or `rich.py` would be
# taken for the library in the process that judges. Kernels have it on theirs.
if sys.argv[:1] == ["-m"] and "m conformance " in f"{' '.join(sys.orig_argv)} " and not sys.flags.safe_path:
    del sys.path[0]

import importlib
from typing import TYPE_CHECKING, Any

from conformance import packages

if TYPE_CHECKING:
    from conformance.contract import Accelerator as Accelerator
    from conformance.contract import Arithmetic as Arithmetic
    from conformance.contract import Implementation as Implementation
    from conformance.execution.plain_functions import declare as declare
    from conformance.reference.attention import reference_attention as reference_attention

_PUBLIC = {
    "Accelerator": "conformance.contract",
    "Arithmetic": "conformance.contract",
    "Implementation": "conformance.contract",
    "declare": "conformance.execution.plain_functions",
    "reference_attention": "conformance.reference.attention",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        packages.claim_names()
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(packages.format_missing_attribute("conformance", name))
