"""The command line: arguments, and which command they mean.

Nothing here imports JAX: flags must be set before that, and `--help` should be quick.
"""

from __future__ import annotations

import argparse
import logging as python_logging
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import app, logging
from absl.flags import argparse_flags

from conformance import environment, packages
from conformance.commands.errors import CannotJudge
from conformance.judging import interrupts
from conformance.judging.levels import GRID_LEVELS, LEVELS

_DESCRIPTION = """\
Is an attention implementation right? Judge its forward pass, its residuals and every gradient against a float64 oracle,
element by element, within rounding-error bounds derived for the arithmetic it declares.
"""

_EXAMPLES = """\
examples:
  python -m conformance run --impl=my_kernels.flash:attention --report=report.html
  python -m conformance run --impl=kernel.py:attention --cases='train/bf16/*/causal' --level=standard
  python -m conformance run --impl=block_flash --case=train/f32/B1.T128.S128.N2.K2.H64.V64/causal/normal/s0
  python -m conformance explore --impl=my_kernels.flash:attention --seconds=300
  python -m conformance list cases --cases='*/softcap*'
  python -m conformance explain train/bf16/B2.T128.S128.N4.K2.H64.V64/causal/seg/softcap30/sinks/normal/s7

exit codes: 0 conforms, 1 does not, 2 could not be judged (bad arguments, import failure, nothing supported)
"""

_EXPLORE = """\
Draw cases beyond the grid (any lengths, depths, head counts, combinations of masks and operands), judge each, and
shrink the first that is wrong to the smallest case that is wrong in the same way. The find is replayed by its id alone.
"""

_EXPLORE_EXAMPLES = """\
examples:
  python -m conformance explore --impl=my_kernels.flash:attention
  python -m conformance explore --impl=kernel.py:attention --seconds=600 --report=explored.html
  python -m conformance explore --impl=kernel.py:attention --cases='train/bf16/*/causal'
  python -m conformance explore --impl=kernel.py:attention --profile=ci      # the same cases every time

profiles:
  explore   until a case is wrong or the time is up, from a seed that is drawn and printed
  ci        a fixed number of cases from seed 0, however long they take

exit codes: 0 nothing wrong was found, 1 a wrong case was found, 2 could not be judged
"""

_LIST_EXAMPLES = """\
examples:
  python -m conformance list                                     # implementations
  python -m conformance list checks
  python -m conformance list cases --cases='train/bf16/*/causal' --level=standard
  python -m conformance list cases --impl=my_kernels.flash:attention

exit codes: 0 listed, 2 bad arguments or nothing matches
"""

_EXPLAIN_EXAMPLES = """\
example:
  python -m conformance explain train/bf16/B2.T128.S128.N4.K2.H64.V64/causal/seg/softcap30/sinks/normal/s7

exit codes: 0 explained, 2 not a case id
"""

_REPORT_EXAMPLES = """\
example:
  python -m conformance report cpu.jsonl gpu.jsonl --report=all.html

Where two files answer the same question, the later file counts.
exit codes: 0 written, 2 a file cannot be read or written
"""


_SENSITIVITY_EXAMPLES = """\
examples:
  python -m conformance sensitivity --report=sensitivity.html
  python -m conformance sensitivity --bank=my_tests.planted:BANK
  python -m conformance sensitivity --bug=returns-zeros --level=standard
  python -m conformance sensitivity --new --save                # bugs added since the figures were kept

A bank is a sequence of conformance.sensitivity.PlantedBug. Each bug is judged until two checks have seen it,
beginning with the cases nearest to its trigger, and on the whole grid if none has.
exit codes: 0 every bug is seen and every check is needed, 1 not so, 2 could not be measured
"""

_CALIBRATE_EXAMPLES = """\
examples:
  python -m conformance calibrate --impl=block_flash --impl=dot_product --level=standard --seed=0 --seed=1 --seed=2
  python -m conformance calibrate block_flash.jsonl dot_product.jsonl

Limits are 1.5 times the largest ratio that a correct implementation reached, rounded up
(conformance/truth/tolerances.py).
exit codes: 0 written, 2 an implementation fails (so it is not correct), or a file cannot be read or written
"""


_BENCH = """\
Time implementations side by side on the same operands: the call, and the call with its gradients. They take turns, so
that whatever drifts hits all of them alike, and are compared round by round with the first one. What a timed program
returns is looked at first: a result that differs from the float64 oracle is shown as such beside its speed.
"""

_BENCH_EXAMPLES = """\
examples:
  python -m conformance bench --impl=dot_product,block_flash
  python -m conformance bench --impl=jax_nn_cudnn,flash_gpu,jax_mha_gpu --report=speed.html
  python -m conformance bench --impl=kernel.py:attention,jax_nn_xla --cases='*/*.T4096.*' --phase=forward --runs=100
  python -m conformance bench --impl=block_flash --case=train/f32/B1.T1000.S1000.N4.K2.H64.V64/window-l127-r0/normal/s0

Programs are compiled with the flags that JAX has by default, or with your XLA_FLAGS.
exit codes: 0 timed, and all that was timed agrees with the oracle, 1 something differs or raised, 2 nothing was timed
"""

_TUNE_EXAMPLES = """\
examples:
  python -m conformance tune --impl=block_flash
  python -m conformance tune --impl=flash_gpu --seconds=300 --out=tuned.json --report=tuned.html

Every candidate is timed side by side with the others in rounds from which the slower half drops out; the last one left
is compared with the setting in force, and replaces it only if it is faster beyond the spread of that comparison.
Candidates that do not compile, or whose results differ from the oracle, are shown and never chosen.
exit codes: 0 tuned, 2 could not be tuned (nothing to tune, or not on this machine)
"""

# Commands that time programs: they run under JAX's default flags, as everybody's programs do.
_TIMING = frozenset({"bench", "tune"})


class _Parser(argparse_flags.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _refuse(self, message)


class _CommandParser(argparse.ArgumentParser):
    """Parser of a sub-command. An abbreviated option is refused: what is misspelt must not weaken the gate."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        _refuse(self, message)


def _refuse(refusing: argparse.ArgumentParser, message: str) -> NoReturn:
    refusing.exit(2, f"error: {message} (see {refusing.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The argument parser with its sub-commands."""
    top = _Parser(  # type: ignore[no-untyped-call] # absl has no annotations
        prog="python -m conformance",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    _add_run(commands)
    _add_explore(commands)
    _add_list(commands)
    about = "say what a case is, and which tolerances judge it and why"
    explain = commands.add_parser("explain", help=about, description=_sentence(about), epilog=_EXPLAIN_EXAMPLES)
    explain.add_argument("case", metavar="CASE_ID", help="as in a report, a pytest id, or `list cases`")
    about = "render records and measurements of earlier runs, merged, as one HTML page"
    report = commands.add_parser("report", help=about, description=_sentence(about), epilog=_REPORT_EXAMPLES)
    report.add_argument("records", nargs="+", metavar="FILE.jsonl", help="what `run`, `bench` or the pytest gate wrote")
    report.add_argument("--report", required=True, metavar="FILE.html", help="write the page here")
    _add_sensitivity(commands)
    _add_calibrate(commands)
    _add_bench(commands)
    _add_tune(commands)
    return top


def _add_bench(commands: argparse._SubParsersAction[_CommandParser]) -> None:
    about = "time implementations side by side, and say what memory they take"
    bench = commands.add_parser("bench", help=about, description=_BENCH, epilog=_BENCH_EXAMPLES)
    what = bench.add_argument_group("what to time")
    what.add_argument(
        "--impl",
        action="append",
        default=[],
        metavar="NAME[,NAME...]",
        help="as for `run`, groups too; the first is the baseline",
    )
    what.add_argument("--case", action="append", default=[], metavar="ID", help="this case; may be repeated")
    what.add_argument("--cases", metavar="QUERY", help="only those of the default cases that match")
    what.add_argument(
        "--phase", choices=("forward", "backward", "both"), default="both", help="backward is with its forward (both)"
    )
    what.add_argument(
        "--products", choices=("exact", "tf32", "bf16"), help="how a plain function multiplies f32 operands (exact)"
    )
    _add_limits(bench, runs=30, seconds=120.0)


def _add_tune(commands: argparse._SubParsersAction[_CommandParser]) -> None:
    about = "choose an implementation's block sizes by timing them on this machine"
    tune = commands.add_parser("tune", help=about, description=_sentence(about), epilog=_TUNE_EXAMPLES)
    what = tune.add_argument_group("what to tune")
    what.add_argument("--impl", required=True, metavar="NAME", help="a registered name (see `list`)")
    what.add_argument("--case", action="append", default=[], metavar="ID", help="on this case; may be repeated")
    what.add_argument("--knob", action="append", default=[], metavar="NAME", help="only this; may be repeated")
    what.add_argument("--out", metavar="FILE.json", help="write the table here (where the implementation reads it)")
    _add_limits(tune, runs=20, seconds=600.0)


def _add_limits(adding: _CommandParser, *, runs: int, seconds: float) -> None:
    limits = adding.add_argument_group("how long")
    limits.add_argument("--runs", type=int, default=runs, metavar="N", help=f"most rounds of a comparison ({runs})")
    limits.add_argument(
        "--seconds", type=float, default=seconds, metavar="N", help=f"for all timing, without compiling ({seconds:g})"
    )
    output = adding.add_argument_group("output")
    output.add_argument("--report", metavar="FILE.html", help="write the page here, and its data beside it (.jsonl)")
    output.add_argument("--json", metavar="FILE", help="write the measurements here, one JSON object a line")


def _add_sensitivity(commands: argparse._SubParsersAction[_CommandParser]) -> None:
    about = "measure what the gate catches of a bank of planted bugs, and the smallest error that it sees"
    adding = commands.add_parser("sensitivity", help=about, description=_sentence(about), epilog=_SENSITIVITY_EXAMPLES)
    adding.add_argument("--bank", metavar="MODULE:ATTRIBUTE", help="the bank (the one in pyproject.toml)")
    adding.add_argument("--bug", action="append", default=[], metavar="NAME", help="only this bug; may be repeated")
    adding.add_argument("--new", action="store_true", help="only bugs with no kept figures of what is asked today")
    adding.add_argument("--level", choices=LEVELS, help="what is asked of each bug (quick)")
    adding.add_argument("--jobs", type=int, metavar="N", help="worker processes (one a core)")
    adding.add_argument("--report", metavar="FILE.html", help="write the page here")
    adding.add_argument("--save", action="store_true", help="keep the figures: reports of every later run show them")


def _add_calibrate(commands: argparse._SubParsersAction[_CommandParser]) -> None:
    about = "tabulate what correct implementations reach: the limits follow from it"
    adding = commands.add_parser("calibrate", help=about, description=_sentence(about), epilog=_CALIBRATE_EXAMPLES)
    adding.add_argument("records", nargs="*", metavar="FILE.jsonl", help="records of correct implementations")
    adding.add_argument("--impl", action="append", default=[], metavar="NAME", help="judge this one; may be repeated")
    adding.add_argument(
        "--level",
        choices=GRID_LEVELS,
        help="of the grid (standard), or of the records",
    )
    adding.add_argument("--seed", action="append", default=[], type=int, metavar="N", help="base seed; may be repeated")
    adding.add_argument("--jobs", type=int, metavar="N", help="worker processes (one a core)")
    adding.add_argument("--out", metavar="FILE.json", help="write the table here (where the limits are read from)")
    adding.add_argument("--add", action="store_true", help="keep the larger of each figure and of the one kept so far")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _add_run(commands: argparse._SubParsersAction[_CommandParser]) -> None:
    run = commands.add_parser("run", help="judge implementations", description=_DESCRIPTION, epilog=_EXAMPLES)
    what = run.add_argument_group("what to judge")
    what.add_argument(
        "--impl",
        action="append",
        default=[],
        metavar="NAME",
        help="a registered name (see `list`), module:attribute, file.py:attribute or a group; may be repeated",
    )
    what.add_argument("--all", action="store_true", help="every registered implementation")
    what.add_argument(
        "--level",
        choices=LEVELS,
        help="every pair (quick), triple or quadruple of levels; smoke: ten seconds of quick, which say most",
    )
    what.add_argument("--case", metavar="ID", help="one case by its id")
    what.add_argument(
        "--cases", metavar="QUERY", help="only cases that match: a prefix of whole parts, * is a wildcard"
    )
    what.add_argument(
        "--regressions", action="store_true", help="the named regressions instead of the grid (see `list regressions`)"
    )
    what.add_argument("--check", action="append", default=[], metavar="NAME", help="only this check; may be repeated")
    what.add_argument(
        "--seed", action="append", default=[], type=int, metavar="N", help="base seed of the grid (0); may be repeated"
    )
    declared = run.add_argument_group("what a plain function declares")
    declared.add_argument(
        "--products", choices=("exact", "tf32", "bf16"), help="how it multiplies f32 operands (exact)"
    )
    output = run.add_argument_group("output")
    output.add_argument("--report", metavar="FILE.html", help="write the page here, and its records beside it (.jsonl)")
    output.add_argument("--json", metavar="FILE", help="write the records here, one JSON object a line")
    output.add_argument("--markdown", metavar="FILE", help="write a short summary for CI here")
    how = run.add_argument_group("how")
    how.add_argument("--jobs", type=int, metavar="N", help="worker processes (one a core on CPU, one on accelerators)")
    how.add_argument("--fail-fast", action="store_true", help="stop at the first failure; cheap cases come first")
    how.add_argument(
        "--require-platform", choices=("cpu", "gpu", "tpu"), help="exit with 1 if nothing was judged on this platform"
    )


def _add_explore(commands: argparse._SubParsersAction[_CommandParser]) -> None:
    about = "look for a wrong case beyond the grid, and shrink it"
    explore = commands.add_parser("explore", help=about, description=_EXPLORE, epilog=_EXPLORE_EXAMPLES)
    what = explore.add_argument_group("what to judge")
    what.add_argument(
        "--impl",
        required=True,
        metavar="NAME",
        help="a registered name (see `list`), module:attribute or file.py:attribute",
    )
    what.add_argument("--cases", metavar="QUERY", help="draw only cases that match")
    what.add_argument(
        "--products", choices=("exact", "tf32", "bf16"), help="how a plain function multiplies f32 operands (exact)"
    )
    limits = explore.add_argument_group("how far to go")
    limits.add_argument("--profile", choices=("explore", "ci"), default="explore", help="see below (explore)")
    limits.add_argument("--seconds", type=float, metavar="N", help="for drawing (explore: 60, ci: no limit)")
    limits.add_argument("--examples", type=int, metavar="N", help="most cases to judge (explore: no limit, ci: 50)")
    limits.add_argument("--seed", type=int, metavar="N", help="where drawing starts (explore: drawn, ci: 0)")
    output = explore.add_argument_group("output")
    output.add_argument("--report", metavar="FILE.html", help="write the page here, and its records beside it (.jsonl)")
    output.add_argument("--json", metavar="FILE", help="write the records here, one JSON object a line")


def _add_list(commands: argparse._SubParsersAction[_CommandParser]) -> None:
    about = "list implementations, cases, checks, features or regressions"
    listing = commands.add_parser("list", help=about, description=_sentence(about), epilog=_LIST_EXAMPLES)
    listing.add_argument(
        "what",
        nargs="?",
        default="implementations",
        choices=("implementations", "cases", "checks", "features", "regressions"),
        help="what to list (implementations)",
    )
    listing.add_argument("--impl", metavar="NAME", help="cases: only those that this implementation is judged by")
    listing.add_argument("--level", choices=GRID_LEVELS, help="cases: of this grid (quick)")
    listing.add_argument("--cases", metavar="QUERY", help="cases: only those that match")
    listing.add_argument("--seed", type=int, metavar="N", help="cases: with this base seed (0)")


def main(arguments: argparse.Namespace) -> int:
    """Carry out a parsed command; returns the exit code."""
    environment.prepare(timing=arguments.command in _TIMING)
    try:
        packages.claim()
        from conformance.commands.table import COMMANDS  # imported late: it loads JAX

        with interrupts.remembered():
            return COMMANDS[arguments.command](arguments)
    except (CannotJudge, packages.NameTaken) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted before anything was judged", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 2


def run_main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `python -m conformance` and of the console script."""
    logging.set_verbosity(logging.WARNING)
    logging.use_absl_handler()
    python_logging.getLogger("jax").setLevel(python_logging.ERROR)

    def parse(args: Sequence[str]) -> argparse.Namespace:
        return parser().parse_args(list(args)[1:])

    app.run(main, argv=list(argv) if argv is not None else None, flags_parser=parse)
