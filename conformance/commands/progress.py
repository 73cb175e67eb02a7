"""Progress of a long run: how much is done, how many failures so far, how long it will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from conformance.records import RED, Record

_PLAIN_EVERY = 15.0  # seconds between lines where there is no terminal
_NAMED = 5  # red cases named while the run goes on; the summary lists more


class Progress:
    """A bar in a terminal, a line every quarter of a minute elsewhere."""

    def __init__(self, total: int, console: Console) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._red = 0
        self._named = 0
        self._started = self._last = time.monotonic()
        columns = (
            TextColumn("judging"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[red]} red"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("judging", total=total, red=0)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, judged: Sequence[Record]) -> None:
        """One more job is done."""
        self._done += 1
        red = [record for record in judged if record.verdict in RED]
        self._say(red)
        self._red += len(red)
        self._bar.update(self._task, advance=1, red=self._red)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last > _PLAIN_EVERY:
            self._last = now
            left = (now - self._started) * (self._total - self._done) / self._done
            self._console.print(
                f"{self._done} of {self._total} done, {self._red} red, about {left:.0f} s left", highlight=False
            )

    def _say(self, red: Sequence[Record]) -> None:
        """Name the first red cases as they happen: nobody should wait for the end to learn of them."""
        if red and self._named < _NAMED:
            self._named += 1
            first = red[0]
            self._console.print(
                f"{first.verdict} {first.implementation} {first.check} {first.observable}: {first.case}",
                highlight=False,
                soft_wrap=True,
            )


class Exploring:
    """Progress of an exploration, whose end is a time: a status line in a terminal, a line now and then elsewhere."""

    def __init__(self, seconds: float | None, console: Console) -> None:
        self._console = console
        self._seconds = seconds
        self._done = self._smaller = 0
        self._started = self._last = time.monotonic()
        self._status = console.status("exploring")

    def __enter__(self) -> Exploring:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def advance(self, judged: Sequence[Record], *, shrinking: bool) -> None:
        """One more case is judged."""
        if shrinking:
            self._smaller += 1
        else:
            self._done += 1
            self._say(judged)
        now = time.monotonic()
        text = f"{self._done} cases judged"
        if self._smaller:
            text += f", one is wrong, {self._smaller} smaller ones tried"
        elif self._seconds is not None:
            text += f", {max(0.0, self._seconds - (now - self._started)):.0f} s left"
        self._status.update(text)
        if not self._console.is_terminal and now - self._last > _PLAIN_EVERY:
            self._last = now
            self._console.print(text, highlight=False)

    def _say(self, judged: Sequence[Record]) -> None:
        red = [record for record in judged if record.verdict in RED]
        if red:
            text = f"{red[0].verdict} {red[0].implementation} {red[0].check} {red[0].observable}: {red[0].case}"
            self._console.print(text, highlight=False, soft_wrap=True)
            self._console.print("shrinking it; Ctrl-C stops with the smallest case so far", highlight=False)


class Steps:
    """Progress of something that says what it does: a status line in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()
        self._status = console.status("starting")

    def __enter__(self) -> Steps:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def say(self, text: str) -> None:
        """What happens now."""
        self._status.update(text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last > _PLAIN_EVERY:
            self._last = now
            self._console.print(text, highlight=False, soft_wrap=True)
