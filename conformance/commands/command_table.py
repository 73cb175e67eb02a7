"""The sub-commands, by name: each is loaded when it is asked for, since loading all of them takes half a second."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

_COMMAND_PLACES = {
    "run": "run:run",
    "explore": "explore:explore",
    "list": "listing:list_things",
    "explain": "listing:explain",
    "report": "report:render_report",
    "compare": "compare:compare",
    "history": "history:history",
    "expect": "expect:expect",
    "sensitivity": "bank.sensitivity:sensitivity",
    "calibrate": "calibrate:calibrate",
    "bench": "bench:bench",
    "tune": "tune:tune",
    "cycles": "cycles:cycles",
}


def load_command(name: str) -> Callable[[argparse.Namespace], int]:
    """What does the command `name`."""
    module, _, function = _COMMAND_PLACES[name].partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(
        importlib.import_module(f"conformance.commands.{module}"), function
    )
    return found
