"""The sub-commands, by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from conformance.commands import bench, calibrate, explore, listing, report, run, sensitivity, tune

COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run.run,
    "explore": explore.explore,
    "list": listing.list_things,
    "explain": listing.explain,
    "report": report.render_report,
    "sensitivity": sensitivity.sensitivity,
    "calibrate": calibrate.calibrate,
    "bench": bench.bench,
    "tune": tune.tune,
}
