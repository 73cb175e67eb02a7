"""Implement `completion`: print a script by which a shell completes commands, options and names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import shtab

from cases.case import FEATURES
from cases.named_problems import PROBLEMS
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry

PROGRAM = "attention-conformance"
"""The command that is completed. Shells cannot complete `python -m conformance`, whose command is `python`."""


def print_completion(arguments: argparse.Namespace) -> int:
    """Print the completion script for a shell; the command line itself says how its parser is built."""
    parser = arguments.build_parser(PROGRAM)
    add_choices(parser)
    print(shtab.complete(parser, shell=arguments.shell))
    return 0


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the known names to all options that take one, and file completion to options that take a file."""
    names: Mapping[str, Sequence[str]] = {
        "impl": implementation_registry.list_implementations(),
        "check": list(CHECKS_BY_NAME),
        "problem": [problem.name for problem in PROBLEMS],
        "cases": [f"*/{feature}*" for feature in FEATURES if feature.isalnum()],
    }
    for command in list_commands(parser).values():
        for action in command._actions:
            if action.choices is None and action.dest in names and action.nargs != 0:
                action.choices = list(names[action.dest])
            elif action.metavar is not None and "FILE" in str(action.metavar):
                action.complete = shtab.FILE  # type: ignore[attr-defined] # shtab's way to mark an action


def list_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """List the sub-commands of a parser with theirs."""
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: command for group in groups for name, command in group.choices.items()}
