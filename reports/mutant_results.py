"""Define what `mutants` found: which wrong functions a test suite catches. The file is JSON, one line for each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports import output_files
from reports.printable_text import make_all_printable

SCHEMA = "attention-conformance/mutants/1"
CAUGHT, PASSED, UNSEEN, NOT_RUN = "caught", "passed", "unseen", "not run"


@dataclasses.dataclass(frozen=True)
class MutantOutcome:
    """What became of one wrong function.

    Attributes:
      name: its name.
      family: the feature or code that it is wrong in.
      reference: the public report or change in which a real project had the bug.
      state: `caught`, `passed` (the suite is green with it), `unseen` (it gives what correct attention gives on all
        calls of the suite) or `not run`.
      detail: the first test that failed; or which input is lacking; or why it was not run.
      call: the sizes and options of the call that could see it; empty if none can.
      case: the id of the smallest case that catches it; empty if none was looked for or found.
      seconds: how long the suite ran with it.
      sentence: what it does wrong; the words of its name if none is given.
    """

    name: str
    family: str
    reference: str
    state: str
    detail: str = ""
    call: str = ""
    case: str = ""
    seconds: float = 0.0
    sentence: str = ""

    def __post_init__(self) -> None:
        if not self.sentence:
            object.__setattr__(self, "sentence", self.name.replace("-", " ").capitalize())


@dataclasses.dataclass(frozen=True)
class MutantResults:
    """What `mutants` found about one suite.

    Attributes:
      function: the function that was replaced, as `module:name`.
      command: the command of the suite.
      date: the day, as in ISO 8601.
      environment: versions, and the machine.
      calls: how many calls of the suite were recorded, and how many of them differ in kind.
      left: why calls were left as they are, with the number of tests that made such calls.
      outcomes: one for each wrong function that is about a feature of the function.
      interrupted: whether the run ended before all had been tried.
    """

    function: str
    command: str
    date: str
    environment: dict[str, str]
    calls: tuple[int, int]
    left: dict[str, int]
    outcomes: tuple[MutantOutcome, ...] = ()
    interrupted: bool = False

    def select(self, state: str) -> list[MutantOutcome]:
        """Return the outcomes with a state."""
        return [one for one in self.outcomes if one.state == state]

    @property
    def share(self) -> float | None:
        """The share of the wrong functions that the suite catches, of those that its inputs can see; None for none."""
        caught, passed = len(self.select(CAUGHT)), len(self.select(PASSED))
        return caught / (caught + passed) if caught + passed else None

    @property
    def families(self) -> list[tuple[str, int, int, int]]:
        """For each family: how many are caught, how many pass, and how many cannot be seen."""
        found = []
        for name in dict.fromkeys(one.family for one in self.outcomes):
            states = [one.state for one in self.outcomes if one.family == name]
            found.append((name, states.count(CAUGHT), states.count(PASSED), states.count(UNSEEN)))
        return found

    def __str__(self) -> str:
        """Say how many are caught, and which pass."""
        caught, passed = self.select(CAUGHT), self.select(PASSED)
        lines = [
            f"{self.command} catches {len(caught)} of {len(caught) + len(passed)} wrong versions of {self.function}"
        ]
        return "\n".join([*lines, *(f"  passes: {one.family}: {one.sentence}" for one in passed)])


def write_results(path: Path, results: MutantResults) -> None:
    """Write results: a line about the run, and one for each wrong function. Raises `OSError`."""
    head = {"schema": SCHEMA, **dataclasses.asdict(dataclasses.replace(results, outcomes=()))}
    lines = [head, *(dataclasses.asdict(one) for one in results.outcomes)]
    output_files.write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_results(path: Path) -> MutantResults:
    """Read a file of results. Raises `OSError`, and `ValueError` if it is no such file."""
    lines: list[dict[str, Any]] = [
        make_all_printable(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()
    ]
    if not lines or lines[0].pop("schema", "") != SCHEMA:
        raise ValueError(f"{path} is no file of `mutants`")
    head, *outcomes = lines
    try:
        found = tuple(MutantOutcome(**one) for one in outcomes)
        return MutantResults(**{**head, "outcomes": found, "calls": tuple(head["calls"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is no file of `mutants`: {error}") from error


def format_table(results: Sequence[MutantResults]) -> list[tuple[str, ...]]:
    """Return rows of a table: a suite, its share, and by family how many of those that it could see it caught."""
    families = list(dict.fromkeys(name for one in results for name, *_ in one.families))
    rows = [("suite", "caught", *families)]
    for one in results:
        found = {name: (caught, passed) for name, caught, passed, _ in one.families}
        share = "" if one.share is None else f"{one.share:.0%}"
        cells = (found.get(name, (0, 0)) for name in families)
        rows.append((one.function, share, *(f"{c} of {c + p}" if c + p else "" for c, p in cells)))
    return rows
