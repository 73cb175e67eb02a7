"""Load banks of planted bugs.

A bank is a sequence of planted bugs. `python -m tests.bank` judges each kernel of a bank, to measure what the checks
detect.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.mutation.planted_bug import PlantedBug


class BankError(Exception):
    """The bank cannot be loaded; the message is the one line that the user sees."""


def load_bank(name: str) -> tuple[PlantedBug, ...]:
    """Load the bank that is named as `module:attribute`; the module may be in the current folder.

    Raises:
      BankError: if the name is incomplete, the import fails, or the attribute is no bank with unique names.
    """
    source, _, attribute = name.partition(":")
    if not source or not attribute:
        raise BankError(f"bank {name!r} is incomplete: write module:attribute")
    if (current_folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, current_folder)
    try:
        bugs = getattr(importlib.import_module(source), attribute)
    except (Exception, SystemExit) as error:  # the import may raise any type; the user sees it as one line
        raise BankError(f"bank {name}: {type(error).__name__}: {error}".split("\n")[0]) from error
    if not (isinstance(bugs, Sequence) and bugs and all(isinstance(bug, PlantedBug) for bug in bugs)):
        raise BankError(f"bank {name} must be a sequence of PlantedBug, and not empty")
    names = [bug.name for bug in bugs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise BankError(f"bank {name}: names must be unique, {', '.join(repeated)} occurs twice")
    return tuple(bugs)
