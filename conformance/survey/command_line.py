"""Define the arguments and the help text of the command `survey`."""

from __future__ import annotations

import argparse

from conformance.commands.command_errors import CommandParser
from conformance.judging.run_levels import LEVELS

DEFAULT_FOLDER = "survey"

_SURVEY = """\
Judge the attention functions of published libraries. Each version of a library gets a Python environment of its own,
which uv creates from the file impls/libraries/NAME.toml. The functions are judged there by the adapters of
impls/libraries/NAME.py. Known failures are counted with their findings. Any other failure is new.
"""

_EXAMPLES = """\
examples:
  python -m conformance survey --list
  python -m conformance survey --library=flax.nnx                # one function, the newest version
  python -m conformance survey --library=flax==0.11.2            # all functions of a library, one version
  python -m conformance survey --library=keras --versions=all
  python -m conformance survey --all --versions=all --shard=1/4 --out=night

Everything is written to one folder. For each version of a library it has a folder with the environment, the records,
the page and the log. The same command continues a survey that was stopped, and judges nothing twice.
uv must be installed (pip install "attention-conformance[survey]"), and so must the Python versions that the libraries
need, unless uv may download them.
exit codes: 0 no failure is new, 1 at least one is, 2 nothing could be judged, 130 and 143 stopped by a signal
"""


def add_survey(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of the command `survey`."""
    adding = commands.add_parser(
        "survey",
        help="judge published libraries, each in an environment of its own",
        description=_SURVEY,
        epilog=_EXAMPLES,
    )
    what = adding.add_argument_group("what to judge")
    what.add_argument(
        "--library",
        action="append",
        default=[],
        metavar="NAME[==VERSION]",
        help="a library such as `flax`, or one of its functions such as `flax.nnx`; may be repeated",
    )
    what.add_argument("--all", action="store_true", help="every library")
    what.add_argument(
        "--versions",
        choices=("newest", "all"),
        default="newest",
        help="judge the newest listed version of each library, or all that its file lists (newest)",
    )
    what.add_argument("--level", choices=LEVELS, default="quick", help="the level of the grid (quick)")
    what.add_argument("--list", action="store_true", help="print what would be judged, and judge nothing")
    how = adding.add_argument_group("how to run")
    how.add_argument("--shard", metavar="K/N", help="judge the Kth of N parts; all parts may share one folder")
    how.add_argument("--jobs", type=int, metavar="N", help="worker processes (one a core)")
    how.add_argument("--bench", action="store_true", help="time each function too, beside block_flash of this project")
    how.add_argument("--retry", action="store_true", help="try libraries again that could not be installed or judged")
    output = adding.add_argument_group("output")
    output.add_argument("--out", metavar="FOLDER", default=DEFAULT_FOLDER, help=f"the folder ({DEFAULT_FOLDER})")
    output.add_argument(
        "--from",
        dest="results",
        metavar="FILE",
        help="judge nothing, and show the results of a file that --json wrote",
    )
    output.add_argument(
        "--report", metavar="FILE.html", help="write the table of all rows of the folder here, as a page"
    )
    output.add_argument("--json", metavar="FILE", help="write the results of all rows of the folder here")
