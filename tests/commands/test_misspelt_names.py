"""Misspelt command lines are refused with one line that names the error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.kernel_folder import CASE, fill, run_cli


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    return tmp_path


def at_case(case: str) -> list[str]:
    return ["run", "--impl=dot_product", f"--case={case}"]


def at_impl(name: str) -> list[str]:
    return ["run", f"--impl={name}", f"--case={CASE}"]


SHAPE = "B1.T16.S16.N2.K2.H16.V16"
RUN = ["run", "--impl=dot_product"]
REFUSED = [
    ([], "COMMAND"),
    (["frobnicate"], "invalid choice: 'frobnicate'"),
    (["run"], "nothing to judge: give --impl=NAME"),
    (at_case(""), "--case must not be empty"),
    (at_case("train/f32"), "it has 2 components, at least 6"),
    (at_case(f"trian/f32/{SHAPE}/causal/normal/s0"), "phase 'trian' is none of train"),
    (at_case(f"train/f64/{SHAPE}/causal/normal/s0"), "dtype 'f64' is none of f32"),
    (at_case("train/f32/B1.T16/causal/normal/s0"), "'B1.T16' in"),
    (at_case("train/f32/B1.T16.S16.N3.K2.H16.V16/causal/normal/s0"), "N=3 must be a multiple of K=2"),
    (at_case("train/f32/B0.T16.S16.N2.K2.H16.V16/causal/normal/s0"), "every size must be at least 1"),
    (at_case(f"train/f32/{SHAPE}/cuasal/normal/s0"), "'cuasal' is not a mask"),
    (at_case(f"train/f32/{SHAPE}/causal/softcap0/normal/s0"), "soft cap must be positive"),
    (at_case(f"train/f32/{SHAPE}/causal/bogus/normal/s0"), "'bogus' in"),
    (at_case(f"train/f32/{SHAPE}/causal/sinks/sinks/normal/s0"), "sets sinks a second time"),
    (at_case(f"train/f32/{SHAPE}/causal/weird/s0"), "distribution 'weird' is none of"),
    (at_case(f"train/f32/{SHAPE}/causal/normal/7"), "'7' in"),
    (at_impl("kernels.py:"), "is incomplete"),
    (at_impl("kernels.py:number"), "is a int, not a function"),
    (at_impl("kernels.py:few"), "does not take q, k, v"),
    (at_impl("kernels.py:mystery"), "needs the argument 'mystery'"),
    ([*at_case(CASE), "--sandbox-env=A=B"], "--sandbox-env=A=B: expected the name"),
    ([*at_case(CASE), "--sandbox-read=absent"], "--sandbox-read=absent: there is no such"),
    ([*at_case(CASE), "--report=x.jsonl"], "--report=x.jsonl is the file of records beside the page"),
    ([*RUN, "--all"], "--all and --impl contradict each other"),
    ([*at_case(CASE), "--level=quick"], "cannot be combined with --cases, --level or --seed"),
    ([*at_case(CASE), "--cases=train"], "cannot be combined with --cases, --level or --seed"),
    ([*at_case(CASE), "--seed=0"], "cannot be combined with --cases, --level or --seed"),
    ([*RUN, "--check=forwrd"], "unknown check 'forwrd': known are forward"),
    ([*RUN, "--check=forward,gradients"], "'forward,gradients' is several names: give --check once for each"),
    ([*at_case(CASE), "--check=refusals"], "no case asks for refusals"),
    ([*RUN, "--seed=x"], "must be a whole number or random, got 'x' (see python -m conformance run --help)"),
    ([*RUN, "--require-platfrom=tpu"], "unrecognized arguments"),
    (["run", "kernel.py:attention"], "a kernel is named by --impl=kernel.py:attention"),
    (["run", "--impl=kernels.py:right", "--cases=*/seg/sinks*"], "right supports no case that --cases='*/seg/sinks*'"),
    (["list", "bogus"], "invalid choice: 'bogus'"),
    (["list", "--impl=dot_product"], "--impl goes with `list cases`"),
    (["explore", "--impl=jax_nn_cudnn"], "jax_nn_cudnn cannot run here: cuDNN attention needs an NVIDIA GPU"),
    (["explain", "foo"], "'foo' is not a case id"),
    (["report", "empty.jsonl", "--report=empty.jsonl"], "is one of the files to be read"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_done_is_one_clear_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.iterdir())
    assert run_cli(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
    assert message in said.err
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["rnu"], "'run'"),
        ([*RUN, "--repotr=x.html"], "'--report'"),
        ([*RUN, "--level=smoek"], "'smoke'"),
        ([*RUN, "--check=forwrd"], "'forward'"),
        ([*RUN, "--cases=train/*/cuasal"], "'train/*/causal'"),
        (["list", "cases", "--cases=trian/bf16"], "'train/bf16'"),
        (["run", "--impl=dot_prodcut"], "'dot_product'"),
        (["run", "--impl=kernels.py:rihgt"], "'right'"),
        (["run", "--impl=dot_product", "--problem=paged_atention"], "'paged_attention'"),
        (["explain", f"trian/f32/{SHAPE}/causal/normal/s0"], "'train'"),
    ],
)
def test_the_closest_name_is_suggested(arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*arguments) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_command_that_moved_names_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("sensitivity", "--bug=returns-zeros") == 2
    assert "python -m tests.bank" in capsys.readouterr().err
