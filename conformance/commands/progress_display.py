"""Show the progress of a long command: how much is done, how many failures there are, how long it will take.

In a terminal, a display is a moving bar or status line. Elsewhere, it prints a line every 15 seconds, also while a
single step takes longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from reports.records import RED, Record

_LINE_INTERVAL_SECONDS = 15.0  # seconds between printed lines if there is no terminal
_MAX_NAMED_RED = 5  # red cases named while the run goes on; the summary lists more


class _LiveDisplay(Protocol):
    """The interface of a bar or status line of rich, which moves in a terminal."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class _Display:
    """Base of the displays: shows a bar or status line in a terminal, and elsewhere prints a line from time to time."""

    def __init__(self, console: Console, moving: _LiveDisplay) -> None:
        self._console = console
        self._moving = moving
        self._started = self._last = time.monotonic()
        self._text = ""
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._repeating = threading.Thread(target=self._repeat_text, daemon=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._moving.start()
        else:
            self._repeating.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._moving.stop()
        if self._repeating.ident is not None:
            self._repeating.join()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _show(self, text: str) -> None:
        """Print a line if there is no terminal and the last line was printed at least 15 seconds ago."""
        self._text = text
        self._print_if_due(text)

    def _repeat_text(self) -> None:
        """Print the last text again, with the time that has passed, whenever no line was printed for 15 seconds."""
        while not self._is_over.wait(max(0.1, self._last + _LINE_INTERVAL_SECONDS - time.monotonic())):
            if self._text:
                self._print_if_due(f"{self._text}; still working, {self._elapsed:.0f} s since the start")

    def _print_if_due(self, text: str) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._console.is_terminal and now - self._last >= _LINE_INTERVAL_SECONDS:
                self._last = now
                self._print(text)

    def _print_red_case(self, red: Record) -> None:
        """Print a red case at once, so that the user learns of it before the run ends."""
        self._print(f"{red.verdict} {red.implementation} {red.check} {red.observable}: {red.case}")

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)  # a plain Text, since names may look like rich's markup


class RunProgress(_Display):
    """Progress bar of a run with a known number of jobs."""

    def __init__(self, total: int, console: Console, before: Sequence[Sequence[Record]] = ()) -> None:
        """Show the progress of `total` jobs. `before` has the records of each job that a continued run has judged."""
        columns = (
            TextColumn("judging"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("jobs, {task.fields[red]} red records"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._total = total
        self._before = self._done = len(before)
        self._red = {record.key for judged in before for record in judged if record.verdict in RED}
        self._named = 0
        self._task = self._bar.add_task("judging", total=total, completed=self._done, red=len(self._red))
        super().__init__(console, self._bar)
        self._text = self._describe()

    def advance(self, judged: Sequence[Record]) -> None:
        """Count one more job, which has these records."""
        self._done += 1
        red = [record for record in judged if record.verdict in RED]
        if red and self._named < _MAX_NAMED_RED:
            self._named += 1
            self._print_red_case(red[0])
        self._red |= {record.key for record in red}  # a set of keys, since the summary counts a repeated judgement once
        self._bar.update(self._task, advance=1, red=len(self._red))
        left = self._elapsed * (self._total - self._done) / (self._done - self._before)
        self._show(f"{self._describe()}, about {left:.0f} s left")
        self._text = self._describe()

    def _describe(self) -> str:
        records = "record" if len(self._red) == 1 else "records"
        return f"{self._done} of {self._total} jobs done, {len(self._red)} red {records}"


class ExplorationProgress(_Display):
    """Status line of an exploration, which runs for a given time."""

    def __init__(self, seconds: float | None, console: Console) -> None:
        self._status = console.status("exploring")
        self._seconds = seconds
        self._done = self._smaller = 0
        super().__init__(console, self._status)

    def advance(self, judged: Sequence[Record], *, shrinking: bool) -> None:
        """Count one more judged case with its records; `shrinking` marks a smaller variant of a wrong case."""
        if shrinking:
            self._smaller += 1
        else:
            self._done += 1
            self._report_if_red(judged)
        text = f"{self._done} cases judged"
        if self._smaller:
            text += f", one is wrong, {self._smaller} smaller ones tried"
        elif self._seconds is not None:
            text += f", {max(0.0, self._seconds - self._elapsed):.0f} s left"
        self._status.update(Text(text))
        self._show(text)

    def _report_if_red(self, judged: Sequence[Record]) -> None:
        red = [record for record in judged if record.verdict in RED]
        if red:
            self._print_red_case(red[0])
            self._print("shrinking it; Ctrl-C stops with the smallest case so far")


class StepProgress(_Display):
    """Status line of work that proceeds in named steps."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("starting")
        super().__init__(console, self._status)

    def say(self, text: str) -> None:
        """Show the name of the current step."""
        self._status.update(Text(text))
        self._show(text)
