"""Measure what the gate catches of a bank of planted bugs, and the smallest error that it sees."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from conformance import interrupts
from conformance.commands import command_errors
from conformance.commands.command_errors import CommandParser
from conformance.session.process_setup import prepare_process, start_fork_server_for
from conformance.session.run_spec import add_option

_EXAMPLES = """\
examples:
  python -m tests.bank --report=bank.html
  python -m tests.bank --bug=returns-zeros --level=standard
  python -m tests.bank --new --save                # only bugs without a saved, valid measurement
  python -m tests.bank --bank=my_tests.planted:BANK

A bank is a sequence of tests.bank.PlantedBug. Each bug is judged until two checks have detected it, beginning with the
cases nearest to its trigger. If no check detects it, it is judged on the whole grid.
exit codes: 0 every bug is detected and every check is needed, 1 otherwise, 2 could not be measured
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = CommandParser(prog="python -m tests.bank", description=__doc__, epilog=_EXAMPLES)
    bugs = parser.add_argument_group("which bugs")
    bugs.add_argument(
        "--bank",
        default="tests.planted.bank:BANK",
        metavar="MODULE:ATTRIBUTE",
        help="the bank (tests.planted.bank:BANK)",
    )
    bugs.add_argument("--bug", action="append", default=[], metavar="NAME", help="only this bug; may be repeated")
    bugs.add_argument("--new", action="store_true", help="only bugs without a saved, up-to-date measurement")
    what = parser.add_argument_group("what to measure")
    add_option(what, "level", help="the level at which each bug is judged (quick)")
    about = "measure how wrong each bug is on the cases of a diagnosis; continues where it was stopped"
    what.add_argument("--profiles", action="store_true", help=about)
    how = parser.add_argument_group("how to run")
    add_option(how, "jobs")
    add_option(how, "cluster")
    output = parser.add_argument_group("output")
    add_option(output, "report", help="write the page here")
    output.add_argument("--save", action="store_true", help="save the measurements: later reports show them")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, measure, and return the exit code. An error is printed as one line and gives 2."""
    arguments = build_parser().parse_args(argv)
    with interrupts.record_signals():
        try:
            prepare_process(judging=False)
            start_fork_server_for((), in_process=False, workers=arguments.jobs != 1 and arguments.cluster is None)
            from tests.bank.sensitivity_command import measure_sensitivity  # imported late: it loads JAX

            with interrupts.raise_on_signal():
                code = measure_sensitivity(arguments)
        except KeyboardInterrupt:
            print("error: interrupted before anything was measured", file=sys.stderr)
            code = 2
        except Exception as error:
            print(f"error: {command_errors.describe_error(error)}", file=sys.stderr)
            code = 2
        return interrupts.resolve_exit_code(code)


if __name__ == "__main__":
    sys.exit(main())
