"""Build records and runs for tests of reports, and render them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from cases.operand_registry import OBSERVABLES
from reports import html_page, markdown_summary, terminal
from reports.page_model import build_page, build_summary
from reports.records import ERROR, FAIL, PASS, UNSUPPORTED, VERDICTS, Record, RunInfo, Worst
from reports.records.measurement import Measurement

HOSTILE = '<script>alert("x")</script><img src=https://evil.example/x.png> `</code>` | $\\frac{'


def make_record(**changes: Any) -> Record:
    """Make a record that passes, but for what is changed."""
    values: dict[str, Any] = {
        "implementation": "block_flash",
        "platform": "cpu",
        "case": "train/f32/B1.T8.S8.N2.K2.H16.V16/causal/normal/s1",
        "check": "forward",
        "observable": "out",
        "verdict": PASS,
        "dtype": "f32",
        "features": ("causal",),
        "ratio": 0.5,
        "limit": 4.0,
        "margin": 1e3,
        "reproduce": "python -m conformance run --case=train/f32/B1.T8.S8.N2.K2.H16.V16/causal/normal/s1",
        "seconds": 0.25,
    }
    return Record(**values | changes)


def make_failure(**changes: Any) -> Record:
    """Make a record that fails by a factor of three, but for what is changed."""
    worst = Worst(index=(0, 3, 1), got=1.25, expected=1.0, bound=0.0208)
    return make_record(**{"verdict": FAIL, "ratio": 12.0, "worst": worst} | changes)


def make_run_info(**changes: Any) -> RunInfo:
    """Make the facts of a short, complete run."""
    values: dict[str, Any] = {
        "command": "python -m conformance run --impl=block_flash",
        "level": "quick",
        "environment": {"jax": "0.10.2"},
        "tolerances": [{"dtype": "f32", "observable": "out", "limit": 4.0, "rms_limit": None, "source": "calibrated"}],
        "coverage": [{"implementation": "block_flash", "strength": 2, "axes": ["dtype", "mask"], "covered": 9}],
        "seconds": 12.5,
    }
    return RunInfo(**values | changes)


def make_one_of_each() -> list[Record]:
    """Make one record of every verdict, of two implementations."""
    return [
        make_record(implementation=name, verdict=verdict, case=f"case/{verdict}", reason=f"reason of {verdict}")
        for name in ("one", "two")
        for verdict in VERDICTS
    ]


def make_many(count: int) -> list[Record]:
    """Make records like those of a long run: mostly passes, with every kind of trouble among them."""
    records = []
    for i in range(count):
        verdict = FAIL if i % 7 == 0 else (UNSUPPORTED if i % 5 == 0 else (ERROR if i % 31 == 0 else PASS))
        records.append(
            make_record(
                implementation=f"kernel_{i % 6}",
                case=f"train/bf16/B2.T{i}.S128.N4.K2.H64.V64/causal/seg/cap30/sinks/normal/s{i}",
                check=("forward", "gradients", "poison", "transforms")[i % 4],
                observable=OBSERVABLES[i % 9],
                dtype=("f32", "bf16", "f16")[i % 3],
                features=("causal", f"feature-{i % 17}"),
                verdict=verdict,
                ratio=None if verdict in (UNSUPPORTED, ERROR) else 0.001 * (i % 3000) + (100 if verdict == FAIL else 0),
                reason=f"reason {i}: " + "word " * 400 if verdict != PASS else "",
            )
        )
    return records


def render_html(records: Sequence[Record], run: RunInfo, measurements: Sequence[Measurement] = ()) -> str:
    """Render the HTML page of a run."""
    return html_page.render_page(build_page(build_summary(records, run), measurements))


def render_markdown(records: Sequence[Record], run: RunInfo) -> str:
    """Format the Markdown summary of a run."""
    return markdown_summary.format_markdown(build_summary(records, run))


def render_terminal(records: Sequence[Record], run: RunInfo, *, width: int = 60) -> str:
    """Return what a narrow terminal shows of a run."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    terminal.print_summary(build_summary(records, run), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
