"""Write the records of a run to its files, job by job, so that the files are valid at any time.

The records of a job are whole lines, written in one call to the system. A process that is killed loses only the job
that it was judging. A write that fails, for example on a full disk, is undone, so the file always ends with a whole
line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from conformance import interrupts
from conformance.judging import provenance
from conformance.sandbox import loaded_files
from reports import output_files, records
from reports.output_files import OutputRefused
from reports.records import (
    DIGEST_OF,
    FAILED,
    End,
    Proposal,
    Record,
    RecordedRun,
    Run,
    list_differences,
    read_runs,
    serialize_end,
    serialize_job,
    serialize_probe,
    serialize_proposal,
    serialize_run,
)


class JournalWriteError(Exception):
    """A file of records cannot be written. The message names the file and the reason."""


class Journal:
    """The records of a run so far, in memory and in any number of files (also none)."""

    def __init__(
        self,
        paths: Iterable[Path],
        run: Run,
        kept: Mapping[int, tuple[Record, ...]] | None = None,
        *,
        started: float | None = None,
    ) -> None:
        """Open the files, and write the run and the jobs that are `kept` from an earlier part of it.

        Args:
          paths: the files of records; all get the same content.
          kept: records of finished jobs of a resumed run, by the job's number.
          started: the time of `time.perf_counter` when the run began; now if left out.

        Raises:
          JournalWriteError: if a file cannot be written, or another run is writing it. In the first case the other
            files are then empty, unless jobs are kept.
        """
        self._run = run
        self._started = time.perf_counter() if started is None else started
        self._recorded = RecordedRun(run=run, done=dict(kept or {}))
        self._done: dict[int, tuple[Record, ...]] = dict(kept or {})
        self._others: list[Record] = []
        self._probes: list[Record] = []
        self._proposals: list[Proposal] = []
        beginning = serialize_run(run) + "\n" + "".join(serialize_job(n, found) for n, found in self._done.items())
        self._files: list[_RecordFile] = []
        try:
            for path in dict.fromkeys(paths):
                self._files.append(_RecordFile(path))
            for file in self._files:
                file.start(beginning.encode(), replace=bool(kept))
        except JournalWriteError:
            self._close()
            raise

    @property
    def run(self) -> Run:
        """The run that the files contain."""
        return self._run

    @property
    def seconds(self) -> float:
        """The seconds since the run began."""
        return time.perf_counter() - self._started

    @property
    def recorded(self) -> RecordedRun:
        """The run, as reading its file returns it."""
        return dataclasses.replace(
            self._recorded,
            done=dict(self._done),
            others=tuple(self._others),
            probes=tuple(self._probes),
            proposals=tuple(self._proposals),
        )

    def add(self, number: int | None, found: Sequence[Record]) -> None:
        """Write the records of a job, or of a part of one, which has no number. Raises `JournalWriteError`."""
        if number is None:
            self.add_records(found)
        else:
            self.add_job(number, found)

    def add_job(self, number: int, found: Sequence[Record]) -> None:
        """Write the records of a finished job; earlier records of the job stay. Raises `JournalWriteError`."""
        with interrupts.delay_signals():
            self._done[number] = (*self._done.get(number, ()), *found)
            self._append_to_files(serialize_job(number, found))

    def add_records(self, found: Sequence[Record]) -> None:
        """Write records that belong to no job. Raises `JournalWriteError`."""
        with interrupts.delay_signals():
            self._others += found
            self._append_to_files("".join(records.serialize_record(record) + "\n" for record in found))

    def add_probes(self, found: Sequence[Record]) -> None:
        """Write records of probes, which confirm or refute a finding. Raises `JournalWriteError`."""
        with interrupts.delay_signals():
            self._probes += found
            self._append_to_files("".join(map(serialize_probe, found)))

    def add_proposal(self, proposal: Proposal) -> None:
        """Write the declarations that are proposed for an implementation. Raises `JournalWriteError`."""
        with interrupts.delay_signals():
            self._proposals.append(proposal)
            self._append_to_files(serialize_proposal(proposal))

    def end(self, how: str, *, reason: str = "") -> None:
        """Write how the run ended, and close the files. Raises `JournalWriteError`."""
        end = End(
            ended=provenance.format_current_time(),
            how=how,
            reason=reason,
            jobs=len(self._done),
            seconds=round(self.seconds, 1),
        )
        with interrupts.delay_signals():
            self._recorded = dataclasses.replace(self._recorded, end=end)
            self._append_to_files(serialize_end(end) + "\n")
        self._close()

    def abandon(self, reason: str) -> None:
        """End the run because its files cannot be written. All its records stay available in memory."""
        end = End(ended=provenance.format_current_time(), how=FAILED, reason=reason, jobs=len(self._done))
        self._recorded = dataclasses.replace(self._recorded, end=end)
        self._close()

    def _close(self) -> None:
        """Close and unlock the files, so that other runs may write them."""
        for file in self._files:
            file.close()
        self._files = []

    def _append_to_files(self, text: str) -> None:
        data = text.encode()
        for file in self._files:
            file.append(data)


class ResumeMismatchError(Exception):
    """A file cannot be resumed because another run wrote it. The message says how the runs differ."""


def load_resumed_run(path: Path, run: Run) -> tuple[Run, dict[int, tuple[Record, ...]]]:
    """Load the run that `--resume` continues, and the records of its finished jobs by the job's number.

    Unless the run is complete, the present time is added to it as a time of resumption.

    Args:
      run: the run as it would begin now; the run of the file must be the same.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if the file is no file of records.
      ResumeMismatchError: if the runs differ: in their plan, versions or kernels.
    """
    runs_found = read_runs(path)
    if not runs_found or runs_found[0].run is None:
        raise ResumeMismatchError(
            f"{path} has no run record (older versions wrote none), so nothing says which run wrote it"
        )
    if len(runs_found) > 1:
        raise ResumeMismatchError(f"{path} has {len(runs_found)} runs: only a file with one run can be resumed")
    (recorded,) = runs_found
    before = recorded.run
    assert before is not None
    later_files = [file for record in recorded.records for file in record.files.items()]
    if (difference := _find_difference(before, run, later_files)) is not None:
        raise ResumeMismatchError(f"{path} is from another run: {difference}")
    if recorded.is_complete and len(recorded.done) == len(run.jobs):
        return before, dict(recorded.done)
    return msgspec.structs.replace(before, resumed=(*before.resumed, provenance.format_current_time())), dict(
        recorded.done
    )


def describe_resumed_jobs(jobs: int) -> str:
    """Return the note of a report that some jobs come from the resumed file, whose content nothing authenticates."""
    return f"{jobs:,} jobs were taken from the resumed file and not judged again"


def _find_difference(before: Run, now: Run, later: Sequence[tuple[str, str]]) -> str | None:
    """Describe the first difference between the run of a file and the run that resumes it; None if there is none.

    Args:
      later: files that kernels read in the first run after they were loaded, with digests. These files must not have
        changed, but now a kernel may read them while it is loaded.
    """
    for name in ("level", "narrowed", "shard", "seeds"):
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            return f"{name} was {_format_value(old)} there and is {_format_value(new)} here"
    if list(before.kernels) != list(now.kernels):
        return f"it judges {', '.join(before.kernels)}, and not {', '.join(now.kernels)}"
    if changed := loaded_files.find_changed(later):
        return changed[0]
    for implementation in now.kernels:
        old_facts, new_facts = before.provenance(implementation), now.provenance(implementation)
        old_facts |= {name: new_facts[name] for file, _ in later if (name := f"{DIGEST_OF}{file}") in new_facts}
        # Report the digest of a single file before the digest of all sources, since it names the changed file.
        for name in sorted(list_differences(old_facts, new_facts), key=lambda name: not name.startswith(DIGEST_OF)):
            label = name if len(now.kernels) == 1 else f"{name} of {implementation}"
            old, new = old_facts.get(name), new_facts.get(name)
            return f"{label} was {_format_value(old)} there and is {_format_value(new)} here"
    return "its planned jobs are different" if [j.key for j in before.jobs] != [j.key for j in now.jobs] else None


def _format_value(value: object) -> str:
    text = str(value) if value not in ("", None, ()) else "nothing"
    return text if len(text) <= 60 else f"{text[:60]}..."


class _RecordFile:
    """An open, locked file of records. Its first `_good_bytes` bytes are whole lines."""

    def __init__(self, path: Path) -> None:
        """Open the file and lock it. Raises `JournalWriteError`."""
        self._path = path
        self._good_bytes = 0
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
            if self._regular:
                output_files.lock_file(self._descriptor, path)
        except OutputRefused as error:
            raise JournalWriteError(str(error)) from error
        except OSError as error:
            raise JournalWriteError(self._format_error(error)) from error

    def start(self, beginning: bytes, *, replace: bool) -> None:
        """Replace the content of the file by these whole lines. Raises `JournalWriteError`.

        With `replace`, the lines are written to another file that then takes this one's place.
        """
        try:
            if replace and self._regular:  # a crash must not lose the jobs that a resumed run keeps
                target = self._path.resolve()
                temporary = target.with_name(f".{target.name}.{os.getpid()}")
                temporary.write_bytes(beginning)
                descriptor = os.open(temporary, os.O_WRONLY | os.O_APPEND)
                output_files.lock_file(descriptor, temporary)
                temporary.replace(target)
                os.close(self._descriptor)
                self._descriptor, self._good_bytes = descriptor, len(beginning)
            elif self._regular:
                os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise JournalWriteError(self._format_error(error)) from error
        if not self._good_bytes:
            self.append(beginning)

    def append(self, data: bytes) -> None:
        """Append whole lines: all of them, or none if writing fails. Raises `JournalWriteError`."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            if self._regular:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._good_bytes)
            raise JournalWriteError(self._format_error(error)) from error
        self._good_bytes += len(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._regular:
                os.fsync(self._descriptor)
            os.close(self._descriptor)

    def _format_error(self, error: OSError) -> str:
        return f"{self._path} cannot be written: {error.strerror or error}"
