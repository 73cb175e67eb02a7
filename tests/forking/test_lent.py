"""An origin that is lent: who may ask it, and who may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.forking import forked, lent
from conformance.forking.forked import Forked
from tests.forking.test_forked import sleeps
from tests.processes import PATIENCE

BORROWS = """
import sys
from conformance.forking import forked, lent
from conformance.forking.forked import Forked
from tests.forking.test_forked import sleeps
lent.borrow(sys.argv[1])
had = forked.is_ready()
process = Forked(sleeps)
print(had, open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[1])
process.let_go()
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells who asks")


def parent(process: Forked) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]


def said(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return done.stdout.split()


def test_a_process_that_this_one_starts_asks_the_same_origin() -> None:
    ours = Forked(sleeps)
    address = lent.lend()
    for _ in range(2):
        assert said(sys.executable, "-c", BORROWS, address) == ["True", parent(ours)]
    ours.let_go()


def test_nobody_else_is_answered() -> None:
    """A kernel's process is not one that the judge has started itself."""
    ours = Forked(sleeps)
    had, other = said("sh", "-c", '"$0" "$@"; exit $?', sys.executable, "-c", BORROWS, lent.lend())
    assert had == "False"
    assert other != parent(ours)
    ours.let_go()


def test_nothing_is_lent_where_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_origin", None)
    assert lent.lend() == ""


def test_an_address_that_nobody_has_any_more_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_origin", None)
    lent.borrow(f"conformance-origin-{os.getpid()}")
    assert not forked.is_ready()
