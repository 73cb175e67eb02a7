"""The journal of a run: records go to their files as they come, and what is there stays valid whatever happens.

Each job is one write of whole lines, handed to the system at once. A process that is killed loses the job that it was
at, and nothing else. A write that fails, as on a full disk, is taken back, so that the file ends with a whole line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from conformance import interrupts, output_files, records, runs
from conformance.judging import provenance
from conformance.output_files import OutputRefused
from conformance.records import Record
from conformance.runs import End, RecordedRun, Run
from conformance.sandbox import loaded_files


class JournalWriteError(Exception):
    """A file of records cannot be written; the message names it and says why."""


class Journal:
    """What a run has written so far; to no file at all if there is none to write."""

    def __init__(self, paths: Iterable[Path], run: Run, kept: Mapping[int, tuple[Record, ...]] | None = None) -> None:
        """Begin files with the run and the jobs that are `kept` from an earlier part of it.

        Raises:
          CannotWrite: if one cannot be written, or is written by another run. What was in the others is then gone if
            nothing is kept, but in the latter case.
        """
        self._run = run
        self._recorded = RecordedRun(run=run, done=dict(kept or {}))
        self._done: dict[int, tuple[Record, ...]] = dict(kept or {})
        self._others: list[Record] = []
        self._probes: list[Record] = []
        beginning = (
            runs.serialize_run(run) + "\n" + "".join(runs.serialize_job(n, found) for n, found in self._done.items())
        )
        self._files: list[_RecordFile] = []
        try:
            for path in dict.fromkeys(paths):
                self._files.append(_RecordFile(path))
            for file in self._files:
                file.begin(beginning.encode(), replace=bool(kept))
        except JournalWriteError:
            self._close()
            raise

    @property
    def run(self) -> Run:
        """The run that the files are of."""
        return self._run

    @property
    def recorded(self) -> RecordedRun:
        """The run as a reader of its file would have it."""
        others, probes = tuple(self._others), tuple(self._probes)
        return dataclasses.replace(self._recorded, done=dict(self._done), others=others, probes=probes)

    def job(self, number: int, found: Sequence[Record]) -> None:
        """A job is done, once more perhaps: then it has both answers. Raises `CannotWrite`."""
        with interrupts.delay_signals():
            self._done[number] = (*self._done.get(number, ()), *found)
            self._put(runs.serialize_job(number, found))

    def add(self, found: Sequence[Record]) -> None:
        """Records of no job. Raises `CannotWrite`."""
        with interrupts.delay_signals():
            self._others += found
            self._put("".join(records.serialize_record(record) + "\n" for record in found))

    def probe(self, found: Sequence[Record]) -> None:
        """What was judged to confirm a finding. Raises `CannotWrite`."""
        with interrupts.delay_signals():
            self._probes += found
            self._put("".join(map(runs.serialize_probe, found)))

    def end(self, how: str, *, reason: str = "", seconds: float = 0.0) -> None:
        """The run is over, as it says. Raises `CannotWrite`."""
        end = End(
            ended=provenance.format_current_time(),
            how=how,
            reason=reason,
            jobs=len(self._done),
            seconds=round(seconds, 1),
        )
        with interrupts.delay_signals():
            self._recorded = dataclasses.replace(self._recorded, end=end)
            self._put(runs.serialize_end(end) + "\n")
        self._close()

    def abandon(self, reason: str) -> None:
        """The run ends since its files cannot be written; what is in memory is all that can be told of it."""
        end = End(ended=provenance.format_current_time(), how=runs.FAILED, reason=reason, jobs=len(self._done))
        self._recorded = dataclasses.replace(self._recorded, end=end)
        self._close()

    def _close(self) -> None:
        """Close the files, so that others may write them."""
        for file in self._files:
            file.close()
        self._files = []

    def _put(self, text: str) -> None:
        data = text.encode()
        for file in self._files:
            file.append(data)


class ResumeMismatchError(Exception):
    """A file cannot be gone on with: it is of another run. The message says what differs."""


def load_resumed_run(path: Path, run: Run) -> tuple[Run, dict[int, tuple[Record, ...]]]:
    """The run of a file with the present time noted, and the records of the jobs that are done.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it is no file of records.
      Unlike: if it is not of this run: another question, another version, another kernel.
    """
    found = runs.read_runs(path)
    if not found or found[0].run is None:
        raise ResumeMismatchError(f"{path} has no run record, as before there were any: nothing says what it is of")
    if len(found) > 1:
        raise ResumeMismatchError(f"{path} has {len(found)} runs: one can be gone on with")
    (recorded,) = found
    before = recorded.run
    assert before is not None
    later = [file for record in recorded.records for file in record.files.items()]
    if (difference := _find_difference(before, run, later)) is not None:
        raise ResumeMismatchError(f"{path} is of another run: {difference}")
    if recorded.is_complete and len(recorded.done) == len(run.jobs):
        return before, dict(recorded.done)
    return dataclasses.replace(before, resumed=(*before.resumed, provenance.format_current_time())), dict(recorded.done)


def describe_resumed_jobs(jobs: int) -> str:
    """What to say of jobs that were taken from the file which is gone on with: nobody has signed it."""
    return f"of the jobs, {jobs:,} are as the file has them that is gone on with, and were not judged again"


def _find_difference(before: Run, now: Run, later: Sequence[tuple[str, str]]) -> str | None:
    """What differs between two runs that should be one, in words.

    `later` are files that kernels of the first read after they were loaded, with their digests. They must be as they
    were, and a kernel may read them sooner.
    """
    for name in ("level", "narrowed", "shard", "seeds"):
        if getattr(before, name) != getattr(now, name):
            return f"{name} was {_format_value(getattr(before, name))} there and is {_format_value(getattr(now, name))} here"
    if list(before.kernels) != list(now.kernels):
        return f"it judges {', '.join(before.kernels)}, and not {', '.join(now.kernels)}"
    if changed := loaded_files.find_changed(later):
        return changed[0]
    for implementation in now.kernels:
        there, here = before.provenance(implementation), now.provenance(implementation)
        there |= {name: here[name] for file, _ in later if (name := f"{runs.DIGEST_OF}{file}") in here}
        # A digest of a file says more than that of all sources: it names the file.
        for name in sorted(runs.list_differences(there, here), key=lambda name: not name.startswith(runs.DIGEST_OF)):
            what = name if len(now.kernels) == 1 else f"{name} of {implementation}"
            return f"{what} was {_format_value(there.get(name))} there and is {_format_value(here.get(name))} here"
    return "other jobs are planned" if [j.key for j in before.jobs] != [j.key for j in now.jobs] else None


def _format_value(value: object) -> str:
    text = str(value) if value not in ("", None, ()) else "nothing"
    return text if len(text) <= 60 else f"{text[:60]}..."


class _RecordFile:
    """A file of which the first `_good` bytes are whole lines."""

    def __init__(self, path: Path) -> None:
        """Open the file and lock it. Raises `CannotWrite`."""
        self._path = path
        self._good = 0
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
            if self._regular:
                output_files.lock_file(self._descriptor, path)
        except OutputRefused as error:
            raise JournalWriteError(str(error)) from error
        except OSError as error:
            raise JournalWriteError(self._format_error(error)) from error

    def begin(self, beginning: bytes, *, replace: bool) -> None:
        """Put these whole lines in place of what is there. Raises `CannotWrite`."""
        try:
            if replace and self._regular:  # never a moment without what is kept
                place = self._path.resolve()
                beside = place.with_name(f".{place.name}.{os.getpid()}")
                beside.write_bytes(beginning)
                descriptor = os.open(beside, os.O_WRONLY | os.O_APPEND)
                output_files.lock_file(descriptor, beside)
                beside.replace(place)
                os.close(self._descriptor)
                self._descriptor, self._good = descriptor, len(beginning)
            elif self._regular:
                os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise JournalWriteError(self._format_error(error)) from error
        if not self._good:
            self.append(beginning)

    def append(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            if self._regular:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._good)
            raise JournalWriteError(self._format_error(error)) from error
        self._good += len(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._regular:
                os.fsync(self._descriptor)
            os.close(self._descriptor)

    def _format_error(self, error: OSError) -> str:
        return f"{self._path} cannot be written: {error.strerror or error}"
