"""Implement `adapt`: find out what a function computes, print the answers, and write an adapter."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import warnings
from pathlib import Path

from rich.console import Console

from conformance.adaptation.adapting import Adapted, adapt, write_adapter_file
from conformance.adaptation.modules import CannotAdapt
from conformance.adaptation.questions import Answer
from conformance.session.failures import CannotJudge

_QUESTION, _ANSWER = 24, 52  # widths of columns


def adapt_function(arguments: argparse.Namespace) -> int:
    """Print what was found out; return 0, or 1 if questions are open."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    path = None if arguments.write is None else Path(arguments.write)
    if path is not None and path.exists():
        raise CannotJudge(f"{path} exists already: delete it, or name another file")
    if path is not None and not path.parent.is_dir():
        raise CannotJudge(f"--write={path}: there is no folder {path.parent}")
    if path is not None and path.suffix != ".py":
        raise CannotJudge(f"--write={path}: the adapter is Python code, so the name must end in .py")
    console.print(f"{'question':{_QUESTION}}  {'answer':{_ANSWER}}  evidence", style="bold")
    bound = dict(_parse_value(text) for text in arguments.set)
    warnings.simplefilter("ignore")  # wrong guesses overflow, and libraries warn about them
    try:
        adapted = adapt(
            arguments.function, seconds=arguments.seconds, bound=bound, on_answer=lambda answer: _print(console, answer)
        )
    except CannotAdapt as error:
        raise CannotJudge(str(error)) from error
    _print_end(console, adapted, path, arguments.function)
    return 1 if adapted.open_questions else 0


def _parse_value(text: str) -> tuple[str, object]:
    """Parse `NAME=VALUE`, whose value is a Python literal or else text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise CannotJudge(f"--set={text}: write NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _print(console: Console, answer: Answer) -> None:
    line = f"{answer.question:{_QUESTION}}  {answer.answer:{_ANSWER}}  {answer.evidence}".rstrip()
    console.print(line, style="yellow" if answer.open else None)


def _print_end(console: Console, adapted: Adapted, path: Path | None, name: str) -> None:
    if adapted.open_questions:
        console.print()
        console.print("Open questions: a bug would explain these answers as well, or no answer is known.", style="bold")
        for number, question in enumerate(adapted.open_questions, 1):
            console.print(f"{number}. {question}")
    console.print()
    if path is None:
        console.print(adapted.source, end="")
        console.print(f"To judge it: python -m conformance run --impl={name} --adapt", style="bold")
        return
    write_adapter_file(adapted, path)
    console.print(f"Wrote {path}. To judge it: python -m conformance run --impl={path}:attention", style="bold")
    if adapted.open_questions:
        console.print("Delete a line of open_questions in it when its answer is yes.")


def write_adapter_for(name: str) -> str:
    """Write an adapter for a function into this folder, and return the name by which the adapter is judged.

    An adapter that is there already is judged as it is. The function is probed in a process of its own.
    """
    if ":" not in name or name.startswith("library:"):
        raise CannotJudge(f"--adapt: {name} needs no adapter; name a function as module:function or file.py:function")
    path = Path(f"{name.rpartition(':')[2].rpartition('.')[2].lower()}_adapter.py")
    if path.exists():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        if f"`{name}`" not in first:
            raise CannotJudge(f"--adapt: {path} exists already, and is no adapter of {name}: move it away")
        print(f"{path} exists already, and is judged as it is; delete it to probe again", file=sys.stderr)
        return f"{path}:attention"
    command = [sys.executable, "-m", "conformance", "adapt", f"--impl={name}", f"--write={path}"]
    code = subprocess.run(command, check=False).returncode
    if not path.exists():
        raise CannotJudge(f"no adapter was written for {name} (exit code {code}); the lines above say why")
    return f"{path}:attention"
