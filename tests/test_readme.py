"""The README and its pages are true: commands parse, examples print what is shown, tables are complete."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cases import mask_spec
from cases.case import FEATURES, OPT_IN, parse_case_id
from conformance import Implementation, cli
from conformance.check_api.scopes import SCOPES
from conformance.checks import CHECKS
from conformance.execution import implementation_registry
from conformance.judging import run_plan, settings
from conformance.judging.runner import Runner
from conformance.records import FAIL, PASS, RED, VERDICTS
from impls.catalogue import MODULES
from tests.kernels import naive

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted((ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")))
}


def blocks(page: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in one of the languages, with continued lines joined."""
    fenced = re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [text.replace("\\\n", " ") for language, text in fenced if language in languages]


def rows(page: str, *header: str) -> list[list[str]]:
    """Return the cells of the tables with this header."""
    found, inside = [], False
    for line in PAGES[page].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if inside and line.startswith("|"):
            found.append(cells)
        else:
            inside = line.startswith("|") and cells == list(header)
    return [cells for cells in found if not set(cells[0]) <= set("-:")]


def names(text: str) -> list[str]:
    """Return the texts in backticks outside of fenced blocks."""
    prose = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(name.split()) for name in re.findall(r"`([^`]+)`", prose)]


def test_the_readme_example_fails_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = re.search(r"```python\n(# kernel\.py\n.*?)```", README, re.DOTALL)
    console = re.search(r"```console\n\$ python -m conformance (.*?)\n(.*?)```", README, re.DOTALL)
    assert kernel is not None
    assert console is not None
    (tmp_path / "kernel.py").write_text(kernel[1])
    monkeypatch.chdir(tmp_path)
    arguments = cli.build_parser().parse_args(console[1].split())
    assert cli.main(arguments) == 1
    assert rounded(console[2].strip()) in rounded(capsys.readouterr().out)


def rounded(text: str) -> str:
    """Round the numbers in a text to three digits, since last digits differ between machines."""
    return re.sub(r"-?\d+\.?\d*(e[+-]?\d+)?(?= |,|$|\n)", lambda number: f"{float(number[0]):.3g}", text)


def test_a_kernel_wrapped_as_the_readme_says_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(text for text in blocks(README, "python") if text.startswith("# flash.py"))
    (tmp_path / "flash.py").write_text(source)
    kernels = ModuleType("my_kernels")

    def flash_attention(q: Any, k: Any, v: Any, *, causal: bool, cap: float | None) -> Any:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        out, saved = naive.attention(q, k, v, causal=causal, soft_cap=cap, save_residuals=True)
        return out.transpose(0, 2, 1, 3), saved["logsumexp"]

    monkeypatch.setattr(kernels, "flash_attention", flash_attention, raising=False)
    monkeypatch.setitem(sys.modules, "my_kernels", kernels)
    attention = implementation_registry.find_implementation(f"{tmp_path}/flash.py:attention")
    case = parse_case_id("train/f32/B1.T16.S16.N4.K2.H16.V16/causal/softcap30/normal/s0")
    found = Runner(settings.Settings()).run(run_plan.plan_case(attention, case).jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert {"out", "logsumexp"} <= {record.observable for record in found if record.verdict == PASS}
    assert "sinks" in attention.unsupported


def test_the_kernel_of_functions_in_the_contract_conforms(tmp_path: Path) -> None:
    source = next(text for text in blocks(PAGES["docs/contract.md"], "python") if text.startswith("# functions.py"))
    (tmp_path / "functions.py").write_text(source)
    attention = implementation_registry.find_implementation(f"{tmp_path}/functions.py:attention")
    for options in ("lengths-7-16/score-cap", "causal/softcap2/score-rows"):
        case = parse_case_id(f"train/f32/B2.T12.S16.N4.K2.H16.V8/{options}/normal/s0")
        checks = [check for check in CHECKS if check.name in ("forward", "gradients", "arguments", "poison")]
        found = Runner(settings.Settings()).run(run_plan.plan_case(attention, case, checks).jobs)
        assert [record for record in found if record.verdict in RED] == []
        assert {"out", "dq", "dk", "dv"} <= {record.observable for record in found if record.verdict == PASS}
    assert "segment_ids" in attention.unsupported


# As the README has it: the order of bias, soft cap and mask, and what lies behind the mask.
@pytest.mark.parametrize("wrong", ["cap before bias", "mask before cap", "reads behind the mask"])
def test_what_the_readme_warns_of_fails(wrong: str, tmp_path: Path) -> None:
    mask_first = "x = jnp.where(mask, x, -1e4)" if wrong == "mask before cap" else ""
    biased = "cap(x) + bias" if wrong == "cap before bias" else "cap(x + bias)"
    values = (
        "v" if wrong == "reads behind the mask" else "jnp.where(jnp.any(mask, axis=(0, 1, 2))[:, None, None], v, 0)"
    )
    (tmp_path / "own.py").write_text(
        f"""
import jax.numpy as jnp
from jax.nn import softmax


def attention(q, k, v, *, mask, soft_cap, bias):
    cap = lambda x: soft_cap * jnp.tanh(x / soft_cap)
    x = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    {mask_first}
    x = {biased}
    x = {"x" if mask_first else "jnp.where(mask, x, -jnp.inf)"}
    return jnp.einsum("bnts,bsnh->btnh", softmax(x), {values})
"""
    )
    attention = implementation_registry.find_implementation(f"{tmp_path}/own.py:attention")
    case = parse_case_id("prefill/f32/B1.T8.S16.N2.K2.H16.V16/lengths-12/softcap2/biashead/large/s0")
    found = Runner(settings.Settings()).run(run_plan.plan_case(attention, case).jobs)
    failed = {record.check for record in found if record.verdict == FAIL}
    assert failed == {"poison"} if wrong == "reads behind the mask" else "forward" in failed


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one(page: str) -> None:
    text = "\n".join((*blocks(PAGES[page], "sh", "console", "yaml"), *names(PAGES[page])))
    for command in re.findall(r"(?<!-m )python -m conformance ([a-z].*)", text):
        cli.build_parser().parse_args(shlex.split(command, comments=True))


def test_the_pages_have_commands() -> None:
    text = "\n".join(text for page in PAGES.values() for text in blocks(page, "sh", "console"))
    assert len(re.findall(r"python -m conformance ([a-z].*)", text)) > 35


@pytest.mark.parametrize("page", PAGES)
def test_every_pytest_command_is_one(page: str, pytestconfig: pytest.Config) -> None:
    known = {name for option in pytestconfig._parser._anonymous.options for name in option.names()}
    known |= {name for group in pytestconfig._parser._groups for option in group.options for name in option.names()}
    text = "\n".join((*blocks(PAGES[page], "sh", "console", "yaml"), *names(PAGES[page])))
    for command in re.findall(r"(?:^|/|run: | )pytest ((?:-|conformance|tests).*)", text, re.MULTILINE):
        words = shlex.split(command, comments=True)
        assert {word.split("=")[0] for word in words if word.startswith("-")} <= known, command
        for word in words:
            if word.startswith("tests/"):
                assert (ROOT / word.split("::")[0]).exists(), command


@pytest.mark.parametrize("page", PAGES)
def test_every_example_in_python_is_python(page: str) -> None:
    for text in blocks(PAGES[page], "python"):
        ast.parse(text)


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_is_one(page: str, tmp_path: Path) -> None:
    for text in blocks(PAGES[page], "toml"):
        (tmp_path / "pyproject.toml").write_text(text)
        settings.load_settings(tmp_path)


def test_the_implementation_of_the_docs_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(text for text in blocks(PAGES["docs/declarations.md"], "python") if "Implementation(" in text)
    kernels = ModuleType("my_kernels")
    for name in ("attention", "attention_256"):
        monkeypatch.setattr(naive, name, naive.attention, raising=False)
    monkeypatch.setattr(kernels, "block_sparse", naive, raising=False)
    monkeypatch.setitem(sys.modules, "my_kernels", kernels)
    scope: dict[str, Any] = {}
    exec(source, scope)  # what a reader would paste
    assert isinstance(scope["SPARSE"], Implementation)


def test_the_commands_to_set_up_are_these_two() -> None:
    commands = [text.strip() for text in blocks(README.partition("## Set up")[2].partition("\n## ")[0], "sh")]
    assert [command.partition("pip install -q ")[2] for command in commands] == [
        ". && .venv/bin/python -m conformance run --impl=dot_product --impl=block_flash --report=report.html",
        '-e ".[dev]" && .venv/bin/pytest -n auto --conformance-level=smoke',
    ]


def test_the_readme_names_no_check_that_is_none() -> None:
    named = [name for _, checks in rows("README.md", "question", "checks") for name in names(checks)]
    assert len(named) > 20
    assert set(named) <= {check.name for check in CHECKS}


def test_every_scope_is_described() -> None:
    described = [name for name, _ in rows("docs/checks.md", "scope", "cases")]
    assert sorted(described) == sorted(scope.name for scope in SCOPES)


def test_every_feature_is_described() -> None:
    mark = " (*opt-in*)"
    described = {names(name)[0]: text for name, text in rows("docs/features.md", "feature", "is")}
    others = {name: text for name, text in FEATURES.items() if name not in kinds_of_masks()}
    assert described == {name: text + mark * (name in OPT_IN) for name, text in others.items()}


def test_every_kind_of_mask_has_its_feature_in_the_contract() -> None:
    header = ("mask", "query `i` may attend to key `j` where", "in a case id", "feature")
    cells = [row[-1] for row in rows("docs/contract.md", *header)]
    assert sorted(name for cell in cells for name in names(cell)) == sorted(kinds_of_masks())
    assert {cell for cell in cells if "*opt-in*" in cell} == {f"`{name}` (*opt-in*)" for name in mask_spec.OPT_IN}


def kinds_of_masks() -> set[str]:
    return {feature for kind in mask_spec.KINDS for feature in kind.features}


def test_every_verdict_is_described() -> None:
    found = {names(name)[0]: red for name, _, red in rows("docs/reference/outcomes.md", "verdict", "means", "red")}
    assert set(found) == set(VERDICTS)
    assert {name for name, red in found.items() if red == "red"} == set(RED)


def test_every_implementation_of_ours_is_described() -> None:
    named = {name for cell, _ in rows("docs/implementations.md", "name", "what it is") for name in names(cell)}
    ours = {name for name, module in MODULES.items() if not module.startswith("impls.upstream.")}
    assert ours <= named <= set(implementation_registry.list_implementations())


def test_files_that_the_recipes_name_are_there() -> None:
    paths = [name for name in names(PAGES[".github/CONTRIBUTING.md"]) if re.fullmatch(r"[\w.-]+(/[\w.-]+)+", name)]
    assert paths
    # Capitals stand for what is to be written.
    assert [path for path in paths if not re.search("[A-Z]{2}", path) and not (ROOT / path).exists()] == []
