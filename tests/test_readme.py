"""The README and its pages are true: commands parse, examples print what is shown, tables are complete."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cases import mask_spec
from cases.case_id import parse_case_id
from cases.masks import FIRST_TOKENS, LOCAL_WINDOW
from conformance import Implementation, cli
from conformance.check_api.scopes import SCOPES
from conformance.checks import CHECKS
from conformance.execution import implementation_registry
from conformance.gate import gate_options
from conformance.judging import run_plan, settings
from conformance.judging.runner import Runner
from impls.catalogue import MODULES
from reports.records import FAIL, PASS, RED, VERDICTS, Record
from tests.kernels import naive
from website import reference_pages
from website.fences import find_fences, split_at_code

ROOT = Path(__file__).parent.parent
MARKER = r"(?m)^<!-- generated: ([\w-]+) -->"
README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): reference_pages.fill_in(path.read_text())
    for path in sorted((ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")))
    if path.parent.name != "how-to"  # tests/docs runs their blocks
}


def blocks(page: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in one of the languages, with continued lines joined."""
    return [fence.text.replace("\\\n", " ") for fence in find_fences(page) if fence.language in languages]


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
    spans = (part for is_code, part in split_at_code(text) if is_code and not part.lstrip().startswith("```"))
    return [" ".join(span.strip("`").split()) for span in spans]


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


# As docs/reference/plain-functions.md has it: the order of bias, soft cap and mask, and what lies behind the mask.
@pytest.mark.parametrize("wrong", ["cap before bias", "mask before cap", "reads behind the mask"])
def test_what_kernels_often_miss_fails(wrong: str, tmp_path: Path) -> None:
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


def list_commands(page: str) -> str:
    """Return all that may be a command: blocks of a shell or a workflow, and code spans."""
    return "\n".join((*blocks(page, "sh", "console", "yaml"), *names(page)))


def test_every_command_is_one() -> None:
    text = "\n".join(map(list_commands, PAGES.values()))
    text = re.sub(r"\$\{\{.*?\}\}|\$\w+", "1", text)  # variables of a shell or a workflow
    for command in re.findall(r"(?<!-m )python -m conformance ([a-z].*)", text):
        cli.build_parser().parse_args(shlex.split(command, comments=True))


def test_the_pages_have_commands() -> None:
    text = "\n".join(text for page in PAGES.values() for text in blocks(page, "sh", "console"))
    assert len(re.findall(r"python -m conformance ([a-z].*)", text)) > 35


def test_every_pytest_command_is_one(pytestconfig: pytest.Config) -> None:
    known = {name for option in pytestconfig._parser._anonymous.options for name in option.names()}
    known.update(gate_options.SHORT_FORMS)
    known |= {name for group in pytestconfig._parser._groups for option in group.options for name in option.names()}
    text = "\n".join(map(list_commands, PAGES.values()))
    for command in re.findall(r"(?:^|/|run: | )pytest ((?:-|conformance|tests).*)", text, re.MULTILINE):
        words = shlex.split(command, comments=True)
        assert {word.split("=")[0] for word in words if word.startswith("-")} <= known, command
        for word in words:
            if word.startswith("tests/"):
                assert (ROOT / word.split("::")[0]).exists(), command


def test_every_example_in_python_is_python() -> None:
    for page, content in PAGES.items():
        for text in blocks(content, "python"):
            ast.parse(text, page)


def test_every_setting_is_one(tmp_path: Path) -> None:
    for text in itertools.chain.from_iterable(blocks(content, "toml") for content in PAGES.values()):
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


def test_every_generated_part_is_on_one_page() -> None:
    marked = [name for path in (ROOT / "docs").rglob("*.md") for name in re.findall(MARKER, path.read_text())]
    assert sorted(marked) == sorted(reference_pages.PARTS)


def test_the_generated_schema_describes_every_field_of_a_record() -> None:
    text = reference_pages.format_record_schema()
    described = reference_pages.read_attributes(Record)
    fields = [name for name in Record.__struct_fields__ if name != "run"]
    assert [name for name in fields if f"| `{name}` |" not in text] == []
    assert [name for name in fields if not described.get(name)] == []


def test_every_setting_is_described() -> None:
    page = "docs/reference/settings.md"
    described = {name for row in rows(page, "setting", "type", "meaning") for name in names(row[0])}
    assert described == set(settings._TABLE_KEYS)
    described = {name for row in rows(page, "field", "type", "meaning") for name in names(row[0])}
    known = {field.name for field in dataclasses.fields(settings.ExpectedFailure)} | set(settings._FILE_KEYS)
    assert described | {"expected_failures"} == known


def test_every_scope_is_described() -> None:
    described = [name for name, _ in rows("docs/checks.md", "scope", "cases")]
    assert sorted(described) == sorted(scope.name for scope in SCOPES)


def test_every_kind_of_mask_has_its_feature_in_the_contract() -> None:
    header = ("mask", "query `i` may attend to key `j` where", "in a case id", "feature")
    cells = [row[-1] for row in rows("docs/contract.md", *header)]
    assert {name for cell in cells for name in names(cell)} == kinds_of_masks() | {FIRST_TOKENS, LOCAL_WINDOW}
    assert {cell for cell in cells if "*opt-in*" in cell} == {f"`{name}` (*opt-in*)" for name in mask_spec.OPT_IN}


def kinds_of_masks() -> set[str]:
    return {feature for kind in mask_spec.KINDS for feature in kind.features}


def test_every_verdict_is_described() -> None:
    found = {names(name)[0]: red for name, _, red in rows("docs/reference/outcomes.md", "verdict", "means", "red")}
    assert set(found) == set(VERDICTS)
    assert {name for name, red in found.items() if red == "red"} == set(RED)


def test_every_implementation_of_ours_is_described() -> None:
    named = {name for cell, _ in rows("docs/implementations.md", "name", "what it is") for name in names(cell)}
    ours = {name for name, module in MODULES.items() if not module.startswith("impls.libraries.")}
    assert ours <= named <= set(implementation_registry.list_implementations())
