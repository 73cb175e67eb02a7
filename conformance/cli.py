"""Define the command line: parse its arguments, prepare the process, and run the command that they name.

The commands themselves are in `conformance.commands`. This module does not import JAX: XLA's flags must be set before
JAX is imported, and `--help` should be quick.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import logging as python_logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, logging

from conformance import environment, interrupts, packages
from conformance.commands import command_errors, help_texts, standard_streams
from conformance.commands.command_errors import CommandParser, Parser
from conformance.extensions import load_attribute, load_extensions
from conformance.fork_server import forked_process
from conformance.judging.run_levels import GRID_LEVELS
from conformance.session.failures import CannotJudge
from conformance.session.process_setup import prepare_process, start_fork_server_for
from conformance.session.run_spec import DECLARED, WHERE, add_option, add_options

_JUDGING_COMMANDS = frozenset({"run", "explore"})
# Arguments that make a repeated option one that is given once.
_SINGLE: Mapping[str, Any] = {"action": "store", "default": None}
_ONE_SEED: Mapping[str, Any] = {**_SINGLE, "type": int, "metavar": "N", "help": "base seed of the grid (0)"}
_COMMAND_PLACES = {
    "run": "run:run",
    "adapt": "adapt:adapt_function",
    "completion": "completion:print_completion",
    "explore": "explore:explore",
    "list": "listing:list_entries",
    "explain": "listing:explain",
    "report": "report:render_report",
    "compare": "compare:compare",
    "expect": "expect:expect",
    "calibrate": "calibrate:calibrate",
    "serve": "serve:serve",
}


def build_parser(program: str = "python -m conformance") -> argparse.ArgumentParser:
    """Build the argument parser with its sub-commands; `program` is what help calls the program."""
    top = Parser(  # type: ignore[no-untyped-call] # absl has no annotations
        prog=program,
        description=help_texts.DESCRIPTION,
        epilog=help_texts.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action=_PrintVersions, help="print the versions of this project and what it runs on")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    _add_run(commands)
    _add_adapt(commands)
    _add_explore(commands)
    _add_list(commands)
    _add_explain(commands)
    _add_report(commands)
    about = "report what changed between two runs, or two sets of shards"
    compare = commands.add_parser(
        "compare", help=about, description=help_texts.format_sentence(about), epilog=help_texts.COMPARE_EXAMPLES
    )
    what = compare.add_argument_group("what to compare")
    what.add_argument("old", metavar="OLD.jsonl[,...]", help="before: a file of records, or shards of one run")
    what.add_argument("new", metavar="NEW.jsonl[,...]", help="after")
    output = compare.add_argument_group("output")
    add_option(output, "report", help="write the page here")
    add_option(output, "markdown")
    output.add_argument("--all", action="store_true", help="print every judgement that changed, not only the causes")
    about = "print entries of expected failures for what fails now"
    expect = commands.add_parser(
        "expect", help=about, description=help_texts.format_sentence(about), epilog=help_texts.EXPECT_EXAMPLES
    )
    what = expect.add_argument_group("which failures")
    what.add_argument("records", nargs="+", metavar="FILE.jsonl", help="what `run` or the pytest gate wrote")
    what.add_argument(
        "--impl", action="append", default=[], metavar="NAME", help="only for this implementation; may be repeated"
    )
    output = expect.add_argument_group("output")
    output.add_argument(
        "--all", action="store_true", help="an entry for each set of failing cases, narrower than one for each finding"
    )
    _add_calibrate(commands)
    for extension in load_extensions():
        for command in extension.commands:
            command.add_parser(commands)
    about = "keep a process with JAX loaded, so that `run` and `explore` start at once"
    commands.add_parser("serve", help=about, description=help_texts.SERVE, epilog=help_texts.SERVE_EXAMPLES)
    _add_completion(commands)
    return top


class _PrintVersions(argparse.Action):
    """Print versions, and end the process."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=options.get("help"))

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        """Print a line for each version; JAX is not loaded for it."""
        for name in ("attention-conformance", "jax", "jaxlib", "numpy"):
            try:
                print(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                print(f"{name} is not installed")
        print(f"python {platform.python_version()}\nplatform {platform.platform()}")
        parser.exit()


def _add_adapt(commands: argparse._SubParsersAction[CommandParser]) -> None:
    about = "find out what an attention function computes, and write an adapter for it"
    adapt = commands.add_parser("adapt", help=about, description=help_texts.ADAPT, epilog=help_texts.ADAPT_EXAMPLES)
    what = adapt.add_argument_group("what to adapt")
    about = "module:function or file.py:function"
    what.add_argument("--impl", dest="function", required=True, metavar="NAME", help=about)
    what.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="pass this value to a parameter in each call; may be repeated",
    )
    how = adapt.add_argument_group("how to run")
    how.add_argument("--seconds", type=float, default=120.0, metavar="S", help="ask no question after this time (120)")
    output = adapt.add_argument_group("output")
    output.add_argument("--write", metavar="FILE.py", help="write the adapter here; without it, it is printed")


def _add_completion(commands: argparse._SubParsersAction[CommandParser]) -> None:
    about = "print a script that completes commands, options and names in your shell"
    completion = commands.add_parser(
        "completion", help=about, description=help_texts.format_sentence(about), epilog=help_texts.COMPLETION_EXAMPLES
    )
    completion.set_defaults(build_parser=build_parser)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script")


def _add_report(commands: argparse._SubParsersAction[CommandParser]) -> None:
    about = "merge records of earlier runs, print the verdict, and write one HTML page"
    report = commands.add_parser(
        "report", help=about, description=help_texts.format_sentence(about), epilog=help_texts.REPORT_EXAMPLES
    )
    what = report.add_argument_group("what to merge")
    what.add_argument("records", nargs="+", metavar="FILE.jsonl", help="what `run`, `bench` or the pytest gate wrote")
    output = report.add_argument_group("output")
    add_option(output, "report", help="write the page here")
    add_option(output, "markdown")
    output.add_argument("--json", metavar="FILE.json", help="write verdicts and findings here, as one JSON object")
    output.add_argument(
        "--gate", action="store_true", help="exit with 1 if anything is red, with 2 if a shard or a verdict is missing"
    )


def _add_calibrate(commands: argparse._SubParsersAction[CommandParser]) -> None:
    about = "tabulate what correct implementations reach: the limits follow from it"
    adding = commands.add_parser(
        "calibrate", help=about, description=help_texts.format_sentence(about), epilog=help_texts.CALIBRATE_EXAMPLES
    )
    what = adding.add_argument_group("what is known to be correct")
    what.add_argument("records", nargs="*", metavar="FILE.jsonl", help="records of correct implementations")
    add_option(what, "implementations", help="judge this one; may be repeated")
    add_option(what, "level", choices=GRID_LEVELS, help="the level of the grid (standard), or of the records")
    add_option(what, "seeds", type=int, metavar="N")
    how = adding.add_argument_group("how to run")
    add_option(how, "jobs")
    output = adding.add_argument_group("output")
    output.add_argument("--out", metavar="FILE.json", help="write the table here (where the limits are read from)")
    output.add_argument("--add", action="store_true", help="merge with the saved table: the larger of each two numbers")


def _needs_default_flags(arguments: argparse.Namespace) -> bool:
    """Check whether the command must run under JAX's default flags, for example because it times programs."""
    commands = [command for extension in load_extensions() for command in extension.commands]
    return any(command.needs_default_flags(arguments) for command in commands if command.name == arguments.command)


def _load_command(name: str) -> Callable[[argparse.Namespace], int]:
    """Load the function of a command alone, since importing all of them takes half a second."""
    places = {name: f"conformance.commands.{place}" for name, place in _COMMAND_PLACES.items()}
    places |= {command.name: command.function for extension in load_extensions() for command in extension.commands}
    found: Callable[[argparse.Namespace], int] = load_attribute(places[name])
    return found


def _keeps_environment(arguments: argparse.Namespace) -> bool:
    """Check whether the command starts processes that have other versions of JAX, and needs none itself."""
    commands = [command for extension in load_extensions() for command in extension.commands]
    return any(command.keeps_environment for command in commands if command.name == arguments.command)


def _add_run(commands: argparse._SubParsersAction[CommandParser]) -> None:
    run = commands.add_parser(
        "run", help="judge implementations", description=help_texts.DESCRIPTION, epilog=help_texts.EXAMPLES
    )
    add_options(run, seeds={"metavar": "N|random"})
    about = "find out first what each function computes (see `adapt`), and judge the adapter, which is written here"
    run.add_argument("--adapt", action="store_true", help=about)


def _add_explore(commands: argparse._SubParsersAction[CommandParser]) -> None:
    about = "search for a wrong case beyond the grid, and shrink it"
    explore = commands.add_parser(
        "explore", help=about, description=help_texts.EXPLORE, epilog=help_texts.EXPLORE_EXAMPLES
    )
    what = explore.add_argument_group("what to judge")
    about = "a registered name (see `list`), module:attribute or file.py:attribute"
    add_option(what, "implementations", **_SINGLE, required=True, help=about)
    add_option(what, "cases", help="draw only cases whose id matches")
    add_options(explore, (DECLARED, WHERE))
    limits = explore.add_argument_group("how far to go")
    limits.add_argument("--profile", choices=("explore", "ci"), default="explore", help="see below (explore)")
    limits.add_argument("--seconds", type=float, metavar="N", help="time for drawing cases (explore: 60, ci: no limit)")
    limits.add_argument("--examples", type=int, metavar="N", help="most cases to judge (explore: no limit, ci: 50)")
    about = "seed for drawing cases (explore: random, ci: 0)"
    add_option(limits, "seeds", **{**_ONE_SEED, "help": about})
    add_option(limits, "cluster")
    output = explore.add_argument_group("output")
    add_option(output, "report")
    add_option(output, "json")


def _add_explain(commands: argparse._SubParsersAction[CommandParser]) -> None:
    about = "describe a case, and the tolerances that judge it"
    explain = commands.add_parser(
        "explain", help=about, description=help_texts.format_sentence(about), epilog=help_texts.EXPLAIN_EXAMPLES
    )
    what = explain.add_argument_group("what to explain")
    what.add_argument("case", metavar="CASE_ID", help="as in a report, a pytest id, or `list cases`")
    about = "print the terms of the bound where this implementation is furthest off, and which its error resembles"
    add_option(what, "implementations", **_SINGLE, help=about)
    add_options(explain, (DECLARED, WHERE))


def _add_list(commands: argparse._SubParsersAction[CommandParser]) -> None:
    about = "list implementations, cases, checks, features, regressions or named problems"
    listing = commands.add_parser(
        "list", help=about, description=help_texts.format_sentence(about), epilog=help_texts.LIST_EXAMPLES
    )
    what = listing.add_argument_group("what to list")
    what.add_argument(
        "what",
        nargs="?",
        default="implementations",
        choices=("implementations", "cases", "checks", "features", "regressions", "problems"),
        help="what to list (implementations)",
    )
    which = listing.add_argument_group("which cases, with `list cases`")
    add_option(which, "implementations", **_SINGLE, help="only those that this implementation is judged by")
    add_option(which, "level", help="of this level (quick); smoke chooses them by the implementation (dot_product)")
    add_option(which, "cases")
    add_option(which, "seeds", **_ONE_SEED)


def _uses_workers(arguments: argparse.Namespace) -> bool:
    """Predict from its arguments whether the command will start worker processes."""
    if getattr(arguments, "cluster", None) is not None:
        return False
    return getattr(arguments, "jobs", 1) != 1 and getattr(arguments, "case", None) is None


def main(arguments: argparse.Namespace, *, last: bool = False) -> int:
    """Run a parsed command, and return its exit code.

    Args:
      last: whether the process ends after this command.
    """
    with interrupts.record_signals():
        code = _execute(arguments, last=last)
        return interrupts.resolve_exit_code(code)


def _execute(arguments: argparse.Namespace, *, last: bool) -> int:
    """Load the command and run it. An error is printed as one line and gives exit code 2."""
    try:
        _reject_missing_folder()
        if last:
            # JAX takes seconds to load, and an exception in the middle could get lost. So a signal ends the process.
            interrupts.set_early_exit(_report_early_signal)
        if _keeps_environment(arguments):
            packages.claim_names(alone=last)
        else:
            judging = arguments.command in _JUDGING_COMMANDS
            prepare_process(timing=_needs_default_flags(arguments), judging=judging, alone=last)
            start_fork_server_for(
                getattr(arguments, "impl", None) or (),
                in_process=getattr(arguments, "in_process", False),
                workers=_uses_workers(arguments),
            )
        carry_out = _load_command(arguments.command)
        if last:
            environment.collect_garbage_rarely()
        interrupts.set_early_exit(None)
        with interrupts.raise_on_signal():
            interrupts.raise_if_stopped()
            return carry_out(arguments)
    except KeyboardInterrupt:
        stopped = interrupts.describe_signal() if interrupts.get_received_signal() else "interrupted"
        standard_streams.print_error(f"error: {stopped} before anything was judged")
        return 2
    except Exception as error:
        standard_streams.print_error(f"error: {command_errors.describe_error(error)}")
        return 2
    finally:
        if (kernels := sys.modules.get("conformance.sandbox.kernel_process")) is not None:
            kernels.end_all_processes()


def _report_early_signal() -> None:
    """Print that a signal ended the command, and end the fork server that was started for it."""
    os.write(2, f"error: {interrupts.describe_signal()} before anything was judged\n".encode())
    forked_process.end_server()


def _reject_missing_folder() -> None:
    """Raise `CannotJudge` if the current folder was deleted."""
    try:
        os.getcwd()
    except OSError as error:
        raise CannotJudge(f"the current folder is not there any more: {error.strerror}") from error


def run_main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, run the command, and end the process with its exit code."""
    try:
        standard_streams.open_closed_streams()
        standard_streams.guard_streams()
        code = _parse_and_execute(argv)
        sys.stdout.flush()
    except standard_streams.OutputFailed as error:
        standard_streams.print_error(f"error: {error}")
        code = 2
    except Exception as error:
        standard_streams.print_error(f"error: {command_errors.describe_error(error)}")
        code = 2
    code = interrupts.resolve_exit_code(code)
    interrupts.ignore_signals()
    sys.exit(code)


def _parse_and_execute(argv: Sequence[str] | None) -> int:
    """Parse the command line, run the command, and return its exit code; catch `SystemExit` of argparse and absl."""
    logging.set_verbosity(logging.WARNING)
    logging.use_absl_handler()
    python_logging.getLogger("jax").setLevel(python_logging.ERROR)

    def parse(args: Sequence[str]) -> argparse.Namespace:
        return build_parser().parse_args(list(args)[1:])

    try:
        app.run(functools.partial(main, last=True), argv=list(argv) if argv is not None else None, flags_parser=parse)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else (0 if end.code is None else 2)
