"""Explain errors of a kernel that the sandbox caused, and name the command-line option that permits the access."""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import PathFinder
from pathlib import Path

from conformance import packages
from conformance.sandbox import policy
from reports.printable_text import make_printable

UNCONFINED = "--in-process runs the kernel without a sandbox"


def explain_denial(missing: str, *, is_permission_error: bool) -> str:
    """Return the explanation to append to the message of an error; empty if the sandbox did not cause the error.

    Args:
      missing: the file or module that the error names, as the kernel's process reports it; empty if it names none.
      is_permission_error: whether the kernel raised a `PermissionError`.
    """
    if missing.startswith("/") and is_permission_error:
        return _explain_file(missing)
    if missing and not is_permission_error:
        return _explain_module(missing)
    if is_permission_error:
        return f"; a sandboxed kernel writes to its scratch folder alone, and has no network: {UNCONFINED}"
    return ""


def _explain_file(name: str) -> str:
    if not os.access(name, os.R_OK):
        return f"; a sandboxed kernel writes to its scratch folder alone: {UNCONFINED}"
    is_named = os.path.isdir(name) or policy.is_unreadable(os.path.basename(name))  # naming its folder does not help
    place = make_printable(name if is_named else os.path.dirname(name))
    return (
        f"; a sandboxed kernel reads its own source tree and writes to its scratch folder alone: "
        f"--sandbox-read={place} lets it read that {'folder' if os.path.isdir(place) else 'file'}"
    )


def _explain_module(name: str) -> str:
    """Explain why the kernel's process cannot import a module; empty if the judge cannot find the module either.

    Only the top-level package is looked up, since looking up a submodule would import its parent.
    """
    top = name.partition(".")[0]
    if top in packages.NAMES:
        return ""
    try:
        here = PathFinder.find_spec(top, [os.getcwd()])
        spec = here or (importlib.util.find_spec(top) if top.isidentifier() else None)
    except (ImportError, ValueError):
        return ""
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    if not places or not os.path.exists(places[0]):
        return ""
    folder = make_printable(str(Path(places[0]).parent))
    return f"; the sandbox does not let a kernel read {folder}, where {top} lies: --sandbox-read={folder} allows it"
