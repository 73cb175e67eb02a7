"""Format the conventions of attention functions of other libraries, and what an adapter writes for each.

`foreign_conventions.toml` has the facts. `docs/how-to/other-layout.md` shows these tables, and
`tests/docs/test_foreign_conventions.py` asks each function that runs on a CPU.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from cases.parameter_names import list_other_names


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer to a question about conventions.

    Attributes:
      question: the question.
      answer: the answer, in words.
      write: what an adapter writes or declares for it.
      functions: the short names of the functions of which it is true, and which the tests ask.
      unasked: functions for GPUs, of which it is true by their documentation.
    """

    question: str
    answer: str
    write: str
    functions: tuple[str, ...]
    unasked: tuple[str, ...] = ()


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FUNCTIONS: Mapping[str, str] = {one["short"]: one["name"] for one in _DATA["function"]}
"""The functions that the tests ask, by their short names."""
PARAMETERS: Mapping[str, Mapping[str, str]] = {one["short"]: one["parameters"] for one in _DATA["function"]}
"""The parameters of each function, by the contract's names."""
ANSWERS = tuple(Answer(**one) for one in _DATA["answer"])
"""The answers, in the order of the table."""


def list_claims() -> Iterator[tuple[str, str, str]]:
    """Yield each claim that the tests ask: the function, the question and the answer."""
    return ((function, one.question, one.answer) for one in ANSWERS for function in one.functions)


def format_names() -> str:
    """Format the names of parameters elsewhere, by the contract's names."""
    lines = ["| here | in these functions | elsewhere |", "| --- | --- | --- |"]
    for ours, others in list_other_names().items():
        used: dict[str, list[str]] = {}
        for function, parameters in PARAMETERS.items():
            if ours in parameters:
                used.setdefault(parameters[ours], []).append(function)
        named = "; ".join(f"`{name}` ({', '.join(functions)})" for name, functions in used.items())
        lines.append(f"| `{ours}` | {named} | {', '.join(f'`{name}`' for name in others if name not in used)} |")
    return "\n".join(lines)


def format_answers() -> str:
    """Format the conventions, and what an adapter writes for each. Functions that no test asks are in italics."""
    lines = ["| question | answer | functions | in the adapter |", "| --- | --- | --- | --- |"]
    before = ""
    for one in ANSWERS:
        functions = ", ".join([*one.functions, *(f"*{name}*" for name in one.unasked)])
        question = "" if one.question == before else one.question
        lines.append(f"| {question} | {one.answer} | {functions} | {one.write} |")
        before = one.question
    names = "; ".join(f"{short}: `{name}`" for short, name in FUNCTIONS.items())
    return "\n".join(lines) + f"\n\nThe functions are {names}."
