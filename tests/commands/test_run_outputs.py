"""Outputs are written at the end of a command, whatever happens then."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from conformance import cli
from conformance.session import run_outputs
from tests.process_helpers import restore_signal_handlers


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("run", ["--case=train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0", "--check=forward"]),
        pytest.param("explore", ["--examples=1", "--seed=1"], marks=pytest.mark.long),
    ],
    ids=["run", "explore"],
)
def test_a_signal_while_the_page_is_written_does_not_cost_the_page(
    command: str, what: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write = run_outputs.Outputs.write

    def signalled(*arguments: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        write(*arguments)

    monkeypatch.setattr(run_outputs.Outputs, "write", signalled)
    arguments = [command, "--impl=dot_product", *what, "--report=page.html"]
    with restore_signal_handlers():
        assert cli.main(cli.build_parser().parse_args(arguments)) == 130  # as the first of them has it
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert (tmp_path / "page.html").exists()
