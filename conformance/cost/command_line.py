"""Define the arguments and help texts of the commands `bench`, `tune` and `cycles`.

`conformance.cost.extension` passes these functions to the command line. The commands themselves are in
`conformance.cost.commands`.
"""

from __future__ import annotations

import argparse

from conformance.commands.command_errors import CommandParser
from conformance.commands.help_texts import format_sentence
from conformance.session.run_spec import add_option

_BENCH = """\
Time implementations side by side on the same operands: the forward call, and the call with its gradients. In each round
every implementation runs once, so that a drift of the machine affects all of them alike. Each is compared round by
round with the first implementation. Results are checked first: an implementation whose results differ from the float64
oracle is marked beside its speed.
"""

_BENCH_EXAMPLES = """\
examples:
  python -m conformance bench --impl=dot_product,block_flash
  python -m conformance bench --impl=jax_nn_cudnn,flash_gpu,jax_mha_gpu --report=speed.html
  python -m conformance bench --impl=kernel.py:attention,jax_nn_xla --cases='*/*.T4096.*' --phase=forward --runs=100
  python -m conformance bench --impl=block_flash --case=train/f32/B1.T1000.S1000.N4.K2.H64.V64/window-l127-r0/normal/s0

Programs are compiled with JAX's default flags, or with your XLA_FLAGS.
exit codes: 0 timed, and all results agree with the oracle, 1 a result differs or a call raised, 2 nothing was timed
"""

_TUNE_EXAMPLES = """\
examples:
  python -m conformance tune --impl=block_flash
  python -m conformance tune --impl=flash_gpu --seconds=300 --out=tuned.json --report=tuned.html
  python -m conformance tune --impl=splash_tpu --static --target=v6e

Candidates are timed side by side in stages. After each stage the slower half is dropped. The fastest of the last stage
replaces the setting in force only if it is faster by more than the spread of the comparison. Candidates that do not
compile, or whose results differ from the oracle, are shown and never chosen.
With --static nothing is timed: the cycles of each candidate's call are counted in the schedules of the TPU's compiler.
These cycles are deterministic, and no chip has confirmed them.
exit codes: 0 tuned, 2 could not be tuned (nothing to tune, or not on this machine)
"""

_CYCLES_EXAMPLES = """\
examples:
  python -m conformance cycles                                  # compare with the recorded figures
  python -m conformance cycles --impl=splash_tpu --target=v6e
  python -m conformance cycles --save                           # record new figures: after a change, for a new compiler
  python -m conformance cycles --target=h100 --target=a100 --target=b200 # GPU kernels
  python -m conformance cycles --impl=splash_tpu --impl=jax_splash_tpu --target=v6e \\
    --case=train/bf16/B1.T8192.S8192.N1.K1.H128.V128/causal/normal/s0    # side by side
  python -m conformance cycles --impl=flash_gpu --impl=jax_mha_gpu --target=a100 \\
    --case=train/bf16/B1.T4096.S4096.N1.K1.H64.V64/causal/normal/s0      # GPU kernels

Kernels are compiled for TPUs that this machine need not have. The cycles of a whole call are estimated from the
compiler's schedules; no chip has confirmed them. For GPU kernels (--target=h100) the instructions of their loops are
counted. They give a lower bound on the cycles in which a multiprocessor computes 1,000 pairs of a query and a key, for
the forward pass, and for the backward pass too in cases of training.
A kernel is too slow if its cycles are more than 5% above those recorded with the same compiler.
exit codes: 0 no kernel is slower, or figures recorded, 1 a kernel is slower, 2 could not run (no compiler, or nothing
recorded for it)
"""

Commands = argparse._SubParsersAction  # type of the object that sub-commands are added to; argparse has no public name


def add_bench(commands: Commands[CommandParser]) -> None:
    """Add the parser of the command `bench` to the command line."""
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
    what.add_argument("--cases", metavar="QUERY", help="only the default cases that match")
    what.add_argument(
        "--phase", choices=("forward", "backward", "both"), default="both", help="backward includes forward (both)"
    )
    add_option(what, "products")
    _add_limits(bench, runs=30, seconds=120.0)


def add_tune(commands: Commands[CommandParser]) -> None:
    """Add the parser of the command `tune` to the command line."""
    about = "choose an implementation's block sizes by timing them on this machine"
    tune = commands.add_parser("tune", help=about, description=format_sentence(about), epilog=_TUNE_EXAMPLES)
    what = tune.add_argument_group("what to tune")
    what.add_argument("--impl", required=True, metavar="NAME", help="a registered name (see `list`)")
    what.add_argument("--case", action="append", default=[], metavar="ID", help="on this case; may be repeated")
    _add_parameter(what, "only this tuning parameter, such as forward; may be repeated")
    what.add_argument("--static", action="store_true", help="for absent TPUs, by their compiler's schedules")
    what.add_argument(
        "--target", action="append", default=[], metavar="NAME", help="with --static: only for this TPU (v6e)"
    )
    what.add_argument("--out", metavar="FILE.json", help="write the table here (where the implementation reads it)")
    _add_limits(tune, runs=20, seconds=600.0)


def add_cycles(commands: Commands[CommandParser]) -> None:
    """Add the parser of the command `cycles` to the command line."""
    about = "compare the static cycles of our kernels with the recorded ones"
    cycles = commands.add_parser("cycles", help=about, description=format_sentence(about), epilog=_CYCLES_EXAMPLES)
    what = cycles.add_argument_group("what to count")
    what.add_argument("--impl", action="append", default=[], metavar="NAME", help="only this kernel; may be repeated")
    what.add_argument("--target", action="append", default=[], metavar="NAME", help="only for this generation (v6e)")
    about = "show implementations side by side on this case, each at its best block sizes; may be repeated"
    what.add_argument("--case", action="append", default=[], metavar="ID", help=about)
    _add_parameter(what, "with --case: the kernels of this tuning parameter (forward); may be repeated")
    output = cycles.add_argument_group("output")
    output.add_argument("--save", action="store_true", help="record these cycles as new baselines")


def _add_parameter(group: argparse._ArgumentGroup, about: str) -> None:
    # `--knob` is the old name.
    group.add_argument("--parameter", "--knob", action="append", default=[], metavar="NAME", help=about)


def _add_limits(command: CommandParser, *, runs: int, seconds: float) -> None:
    """Add the options that limit the time of measuring (with these defaults), and those that name output files."""
    limits = command.add_argument_group("how long")
    limits.add_argument("--runs", type=int, default=runs, metavar="N", help=f"most rounds of a comparison ({runs})")
    limits.add_argument(
        "--seconds", type=float, default=seconds, metavar="N", help=f"for all timing, without compiling ({seconds:g})"
    )
    output = command.add_argument_group("output")
    add_option(output, "report", help="write the page here, and its data beside it (.jsonl)")
    add_option(output, "json", help="write the measurements here, one JSON object a line")
