"""Show the progress of a run to a Python caller: in a terminal, in a notebook, or as lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from conformance.commands.progress_display import RunProgress
from conformance.session.job_judging import Say, ShowProgress, say_nothing, show_no_progress
from reports.records import RED, Record

_REFRESH_SECONDS = 0.5


def choose_display(is_wanted: bool) -> tuple[ShowProgress, Say]:
    """Return what shows progress here, and what prints a line; both do nothing where none is wanted."""
    if not is_wanted:
        return show_no_progress, say_nothing
    console = Console(stderr=True, force_jupyter=False)

    def say(line: str) -> None:
        console.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)

    if _is_notebook():
        return _NotebookProgress, say
    return lambda total, finished: RunProgress(total, console, finished), say


def _is_notebook() -> bool:
    """Return whether a Jupyter kernel runs this process, whose output can be changed in place."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class _NotebookProgress:
    """One line of output of a notebook cell, which is replaced as the run goes on."""

    def __init__(self, total: int, finished: Sequence[Sequence[Record]]) -> None:
        self._total, self._done, self._red = total, len(finished), 0
        self._started = time.monotonic()
        self._shown = 0.0
        self._handle: Any = None

    def __enter__(self) -> Self:
        from IPython.display import display  # there, since a notebook runs this

        self._handle = display({"text/plain": self._format()}, raw=True, display_id=True)
        return self

    def advance(self, judged: Sequence[Record]) -> None:
        """Count one more job, which has these records."""
        self._done += 1
        self._red += sum(record.verdict in RED for record in judged)
        if time.monotonic() - self._shown >= _REFRESH_SECONDS:
            self._shown = time.monotonic()
            self._update()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._update()

    def _update(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": self._format()}, raw=True)

    def _format(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self._done} of {self._total} jobs judged, {self._red} red records, {seconds:.0f} s"
