"""Adapt a function: ask what it computes, and return or write its adapter."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.adaptation.modules import CannotAdapt
from conformance.adaptation.probing import Prober
from conformance.adaptation.questions import Answer, Interview
from conformance.adaptation.recipe import load_adapter, write_adapter
from conformance.adaptation.target import Target, build_target, load_target
from conformance.execution.implementation_registry import ImplementationNotFound, load_attribute
from impls.contract.declarations import Declaration, declare, get_declaration

SECONDS = 120.0
"""The seconds for which questions are asked, unless the caller says otherwise."""


@dataclasses.dataclass(frozen=True)
class Adapted:
    """An attention function with the contract's signature, and how it was found out what it computes.

    Attributes:
      function: the adapter: a plain function, which calls the adapted one.
      declaration: what it declares.
      evidence: the answers to all questions, in the order in which they were asked.
      source: the Python code of the adapter.
      folder: the folder of the adapted function's file, from which the code imports it; empty for a module.
    """

    function: Callable[..., Any]
    declaration: Declaration
    evidence: tuple[Answer, ...]
    source: str
    folder: str = ""

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Call the adapter, as docs/contract.md says."""
        return self.function(*operands, **options)

    @property
    def open_questions(self) -> tuple[str, ...]:
        """The questions that have to be answered with yes before the declarations count as meant."""
        return list_open_questions(self.evidence)

    def __str__(self) -> str:
        """Return the answers as a table."""
        rows = [("question", "answer", "evidence"), *((a.question, a.answer, a.evidence) for a in self.evidence)]
        widths = [max(len(row[n]) for row in rows) for n in (0, 1)]
        return "\n".join(f"{q:{widths[0]}}  {a:{widths[1]}}  {e}".rstrip() for q, a, e in rows)


def adapt(
    function: Callable[..., Any] | str,
    *,
    seconds: float = SECONDS,
    bound: Mapping[str, Any] | None = None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Adapted:
    """Find out what an attention function computes, and return an adapter with the contract's signature.

    The function may have other names of parameters, another order of axes and other conventions. It is called on small
    operands, one question at a time, and each result is compared with every reading that a library has. What cannot be
    told, or what a bug would explain as well, is an open question: the adapter declares it as `open_questions`.

    Examples:
      >>> import jax
      >>> import conformance
      >>> adapted = conformance.adapt(jax.nn.dot_product_attention)
      >>> adapted.declaration.behind_mask
      'finite'

    Args:
      function: the function, or its name as `--impl` takes it.
      seconds: the time after which no further question is asked.
      bound: values of parameters that each call passes, such as `{"implementation": "xla"}`.
      on_answer: is called with each answer when it is known.

    Raises:
      CannotAdapt: if it is no function of queries, keys and values, or if no call of it returned an attention's result.
    """
    given = {name: repr(value) for name, value in (bound or {}).items()}
    for name, code in given.items():
        if not isinstance((bound or {})[name], bool | int | float | str | tuple | None):
            raise CannotAdapt(f"bound: {name}={code} cannot be written as code; bind it by functools.partial")
    target = load_target(function, given) if isinstance(function, str) else _find_target(function, given)
    interview = Interview(target, Prober(seconds), on_answer)
    interview.ask_all()
    questions = list_open_questions(interview.answers)
    adapter = load_adapter(interview.recipe)
    declaration = dataclasses.replace(get_declaration(adapter), open_questions=questions)
    declare(**{field.name: getattr(declaration, field.name) for field in dataclasses.fields(declaration)})(adapter)
    return Adapted(
        adapter, declaration, tuple(interview.answers), write_adapter(interview.recipe, questions), target.folder
    )


def list_open_questions(answers: Any) -> tuple[str, ...]:
    """List what is open in answers, each once."""
    return tuple(dict.fromkeys(answer.open for answer in answers if answer.open))


def _find_target(function: Callable[..., Any], bound: Mapping[str, str]) -> Target:
    """Describe a function that Python has; the adapter's code imports it, if its module can be imported."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module and module != "__main__" and name and not inspect.ismethod(function):
        # A decorator may have taken over the name of the function that it wraps.
        with contextlib.suppress(ImplementationNotFound):
            if load_attribute(f"{module}:{name}") is function:
                return load_target(f"{module}:{name}", bound)
    label = name.rpartition(".")[2] if isinstance(name, str) else ""
    label = f"adapted_{label}" if label.isidentifier() else "adapted_function"
    return build_target(function, label, (f"# {label} is the function that was adapted",), label, bound)


def write_adapter_file(adapted: Adapted, path: Path) -> None:
    """Write the adapter's code. Raises `FileExistsError` if there is a file already."""
    source = adapted.source
    if adapted.folder and Path(adapted.folder) != path.resolve().parent:
        source = source.replace("\n\n", f"\n\nimport sys\n\nsys.path.insert(0, {adapted.folder!r})\n", 1)
    with path.open("x", encoding="utf-8") as file:
        file.write(source)
