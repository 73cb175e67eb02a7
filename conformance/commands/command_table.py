"""Load the function of a sub-command by its name.

Only the module of that command is imported, since importing all of them takes half a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from conformance.extensions import load_attribute, load_extensions

_COMMAND_PLACES = {
    "run": "run:run",
    "completion": "completion:print_completion",
    "explore": "explore:explore",
    "list": "listing:list_entries",
    "explain": "listing:explain",
    "report": "report:render_report",
    "compare": "compare:compare",
    "expect": "expect:expect",
    "calibrate": "calibrate:calibrate",
    "serve": "serve:serve",
}


def load_command(name: str) -> Callable[[argparse.Namespace], int]:
    """Load the function of a command, which takes the parsed arguments and returns the exit code."""
    places = {name: f"conformance.commands.{place}" for name, place in _COMMAND_PLACES.items()}
    places |= {command.name: command.function for extension in load_extensions() for command in extension.commands}
    found: Callable[[argparse.Namespace], int] = load_attribute(places[name])
    return found
