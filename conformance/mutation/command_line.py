"""Define the arguments and the help text of the command `mutants`."""

from __future__ import annotations

import argparse

from conformance.commands.command_errors import CommandParser

_MUTANTS = """\
Measure which wrong kernels your own tests let through. In the processes of your test command, the function is replaced
by correct attention, which must pass. Then it is replaced by one wrong function after another, each with a fault that a
real project had. A wrong function that gives the right results on every call of your tests is not run: the report says
which input is lacking. For each one that passes, it names the smallest case that catches it.
"""

_EXAMPLES = """\
examples:
  python -m conformance mutants --replace=my_pkg.flash:attention -- pytest test_flash.py
  python -m conformance mutants --replace=my_pkg.flash:attention --family=sinks --family=windows -- pytest tests
  python -m conformance mutants --replace=my_pkg.flash:attention --write-tests=tests/test_missed.py -- pytest tests
  python -m conformance mutants --replace=my_pkg.flash:attention --save=mutants.jsonl --fail-under=90 -- pytest tests
  python -m conformance mutants --replace=my_pkg:make_kernel --through=through.py:call -- python run_tests.py

Name the function where the tests look it up: the module from which they import it. Its calls are read by the names of
its parameters, and each reading is compared with what the function returns. For other functions, --through names a
function of yours, call(attention, true, *arguments), which calls `attention` with the parameters of docs/contract.md.
The same command with --save continues a run that was stopped.
exit codes: 0 measured, 1 less is caught than --fail-under, 2 could not be measured, 130 and 143 stopped by a signal
"""


def add_mutants(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of the command `mutants`."""
    adding = commands.add_parser(
        "mutants", help="measure which wrong kernels your own tests let through", description=_MUTANTS, epilog=_EXAMPLES
    )
    what = adding.add_argument_group("what to measure")
    what.add_argument(
        "--replace", metavar="NAME", help="module:function, where the tests look it up; also module:Class.method"
    )
    what.add_argument("--through", metavar="FILE.py:NAME", help="a function that turns calls into ours")
    what.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="NAME",
        help="only this family; may be repeated",
    )
    what.add_argument("--every", action="store_true", help="try every wrong function, and not one of each kind")
    what.add_argument("--sample", type=int, metavar="N", help="try N kinds of each family, always the same ones")
    what.add_argument("--list", action="store_true", help="print the wrong functions, and run nothing")
    what.add_argument("suite", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command that runs your tests")
    how = adding.add_argument_group("how to run")
    how.add_argument("--jobs", type=int, default=1, metavar="N", help="how many suites run at once (1)")
    how.add_argument("--seconds", type=float, metavar="S", help="try no further wrong function after this time")
    how.add_argument(
        "--inputs-seconds", type=float, default=60.0, metavar="S", help="look this long for what the inputs lack (60)"
    )
    output = adding.add_argument_group("output")
    output.add_argument("--fail-under", type=float, metavar="PERCENT", help="exit with 1 if less is caught")
    output.add_argument("--save", metavar="FILE.jsonl", help="write the results here; continues what is there")
    output.add_argument("--report", metavar="FILE.html", help="write the page here")
    output.add_argument(
        "--write-tests", metavar="FILE.py", help="write tests with the cases that catch what passed, and an adapter"
    )
