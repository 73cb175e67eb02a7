"""The documents name what is there: links, sections, checks, masks, declarations, files."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases.case import Case
from cases.masks import Mask
from cases.moba_mask import Moba
from cases.operand_registry import OPTIONAL
from conformance import declare
from conformance.checks import CHECKS
from impls.contract.declarations import Arithmetic, Formulas
from impls.contract.implementation import Accelerator, Implementation
from website import reference_pages

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / ".github" / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "conformance").rglob("*.md")),
)
CONTRACT, CHECKED = (ROOT / "docs" / name for name in ("contract.md", "checks.md"))
FOLDERS = ("cases", "conformance", "impls", "reports", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

NAMES = [check.name for check in CHECKS]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(rf"(?<![\w./-])(?:{'|'.join((*FOLDERS, 'docs', '.ci'))})/[\w./-]*\w")
DOCUMENT = re.compile(r"(?<![\w./-])[\w./-]+\.md\b")
# Not `cases.py`, which is a file of a user's.
MODULE = re.compile(rf"(?<![\w./:-])(?:{'|'.join(FOLDERS)})(?!\.py\b)(?:\.\w+)+")


def prose(text: str) -> str:
    """Markdown without its code blocks and the contents of its code spans."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", text)


def headings(path: Path) -> list[str]:
    page = reference_pages.fill_in(path.read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    found: dict[str, int] = {}
    slugs = set()
    for heading in headings(path):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = found.get(slug, 0)
        found[slug] = again + 1
        slugs.add(f"{slug}-{again}" if again else slug)
    return slugs


def broken_links(path: Path) -> list[str]:
    """Relative links of a document that lead nowhere."""
    broken = []
    for target in LINK.findall(prose(path.read_text(encoding="utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@functools.cache
def words(path: Path) -> str:
    """Docstrings and comments of a module, in their order."""
    text = path.read_text(encoding="utf-8")
    found = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(words for _, words in sorted(found))


def told() -> dict[Path, str]:
    """What modules and documents say, but for files to come (README, blocks of `add-*.md`) and gone (changes)."""
    said = {path: words(path) for path in SOURCES}
    pages = (path for path in (ROOT / "docs").rglob("*.md") if path.name != "changelog.md")
    return said | {path: prose_of_guide(path) for path in pages}


def prose_of_guide(path: Path) -> str:
    """The text of a page, without blocks if it guides an addition: their files are to come, as `NAME` is."""
    page = path.read_text(encoding="utf-8")
    if not path.name.startswith("add-"):
        return page
    return re.sub(r"^```.*?^```|`[^`\n]*\bNAME\b[^`\n]*`", "", page, flags=re.DOTALL | re.MULTILINE)


def is_there(module: str) -> bool:
    """Whether a dotted name is a module of ours, or is in the text of one."""
    names = module.split(".")
    place = ROOT / names[0]
    for depth, name in enumerate(names[1:], 1):
        if (place / name).is_dir():
            place = place / name
        elif (file := place / f"{name}.py").is_file():
            return _mentions(file, names[depth + 1 :])
        else:
            return any(_mentions(file, names[depth:]) for file in place.glob("*.py"))  # which the package may re-export
    return True


def _mentions(file: Path, names: list[str]) -> bool:
    text = file.read_text(encoding="utf-8")
    if not names or re.search(rf"\b{names[0]}\b", text) is not None:
        return True
    starred = re.findall(r"^from ([\w.]+) import \*", text, re.MULTILINE)
    return any(is_there(f"{module}.{names[0]}") for module in starred)


def masks(kind: type[Any] = Mask) -> Iterator[str]:
    """The kinds of masks: public classes of the package that defines them, without what they have in common."""
    for found in kind.__subclasses__():
        if found.__module__.startswith("cases.") and not found.__name__.startswith("_") and not found.__subclasses__():
            yield found.__name__
        yield from masks(found)


def code_spans(path: Path) -> str:
    """All that stands in code spans."""
    return "\n".join(re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8")))


def test_every_link_leads_somewhere() -> None:
    assert {str(path): broken for path in DOCUMENTS if (broken := broken_links(path))} == {}


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## 2. A `part`, and more\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#2-a-part-and-more) [c](#here) [d](https://example.org/none) `[e](none.md)`\n"
        "[f](other.md#none) [g](none.md) [h](#none) ![i](none.png)\n\n# Here\n"
    )
    assert broken_links(page) == ["other.md#none", "none.md", "#none", "none.png"]


def test_every_check_has_its_section_and_no_section_is_of_none() -> None:
    found = re.findall(r"^## (.+)$", CHECKED.read_text(encoding="utf-8"), re.MULTILINE)
    assert found == NAMES


def test_the_contract_has_every_mask() -> None:
    assert {"Full", "OwnWindow", "And", Moba.__name__} <= set(masks())
    spans = code_spans(CONTRACT)
    assert [name for name in masks() if not re.search(rf"^{name}\b", spans, re.MULTILINE)] == []


def test_the_contract_has_every_declaration() -> None:
    fields = [
        field.name for kind in (Implementation, Accelerator, Arithmetic, Formulas) for field in dataclasses.fields(kind)
    ]
    page = reference_pages.fill_in(CONTRACT.read_text(encoding="utf-8"))
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert [name for name in fields + list(inspect.signature(declare).parameters) if name not in rows] == []


def test_the_reference_has_every_field_of_a_case() -> None:
    page = (ROOT / "docs" / "reference" / "case-fields.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", page, re.MULTILINE))
    properties = {name for name, x in inspect.getmembers(Case) if isinstance(x, property | functools.cached_property)}
    assert set(rows) == {field.name for field in dataclasses.fields(Case)} | properties
    for operand in OPTIONAL:
        levels = [level for level in operand.levels if isinstance(level, str)]
        assert [level for level in levels if f'`"{level}"`' not in rows[operand.field]] == []


@pytest.mark.parametrize("pattern", [FILE, DOCUMENT], ids=["files", "documents"])
def test_files_that_are_named_are_there(pattern: re.Pattern[str]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {named}"
        for path, text in told().items()
        for named in pattern.findall(text)
        if not (ROOT / named).exists() and not (path.parent / named).exists()
    ]
    assert wrong == []


def test_modules_that_are_named_are_there() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {named}"
        for path, text in told().items()
        for named in MODULE.findall(text)
        if not is_there(named)
    ]
    assert wrong == []
