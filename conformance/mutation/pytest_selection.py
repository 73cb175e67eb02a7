"""A pytest plugin in the processes of a suite: runs the files with a test that called the function, callers first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of these files, and put the callers in front."""
    with open(os.environ["CONFORMANCE_MUTANTS"], encoding="utf-8") as file:
        callers = json.load(file).get("callers")
    if not callers:
        return
    files = {one.partition("::")[0] for one in callers}
    chosen = [item for item in items if item.nodeid.partition("::")[0] in files]
    if not chosen:  # ids are relative to a folder that differs between processes: run all
        return
    dropped = [item for item in items if item.nodeid.partition("::")[0] not in files]
    items[:] = sorted(chosen, key=lambda item: item.nodeid not in set(callers))
    config.hook.pytest_deselected(items=dropped)


def list_callers(folder: Path) -> list[str]:
    """List the tests that called the function, by the events of a run."""
    found = {event["test"] for event in read_events(folder) if event["test"]}
    return sorted(found)


def read_events(folder: Path) -> list[dict[str, str]]:
    """Read what the processes of a run wrote about their calls."""
    files = sorted(folder.glob("events-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
