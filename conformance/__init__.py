"""Conformance and gradient testing for attention in JAX.

Importing this package is cheap: a public name, and with it JAX, is loaded when the name is first used. Type checkers
read the public names from `__init__.pyi`.
"""

from __future__ import annotations

import sys

# `python -m conformance` has the current folder first on the path, so a user's `numpy.py` or `rich.py` would replace
# the library in the judge's process. Kernels still find theirs: the path of their processes keeps that folder.
if sys.argv[:1] == ["-m"] and "m conformance " in f"{' '.join(sys.orig_argv)} " and not sys.flags.safe_path:
    del sys.path[0]

import importlib
from typing import Any

from conformance import packages

_PUBLIC = {
    "Adapted": "conformance.adaptation.adapting",
    "Accelerator": "impls.contract.implementation",
    "Arithmetic": "impls.contract.declarations",
    "CaseData": "conformance.api.case_data",
    "CheckInterrupted": "conformance.api.check_function",
    "Finding": "conformance.api.findings",
    "Implementation": "impls.contract.implementation",
    "NotJudgedError": "conformance.api.check_function",
    "Report": "conformance.api.report",
    "adapt": "conformance.adaptation.adapting",
    "assert_conforms": "conformance.api.check_function",
    "case": "conformance.api.case_data",
    "cases": "conformance.api.case_data",
    "check": "conformance.api.check_function",
    "declare": "impls.contract.declarations",
    "initialize_identity": "impls.libraries.identity_projections",
    "identity_projection": "conformance.execution.module_adapters",
    "mutants": "conformance.mutation.measuring",
    "name_axes": "conformance.execution.module_adapters",
    "reference_attention": "conformance.reference.attention",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        packages.claim_names()
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(packages.format_missing_attribute("conformance", name))
