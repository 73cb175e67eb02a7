"""Read the reports on faults of published libraries, the pages of `docs/upstream`.

A page begins with a block of YAML between lines of `---`, which has `library`, `versions` and `mended`, and may have
`platform`, `not_judged` and `effect: raises`. Its first heading is the title. The script `findings/NAME.sh` shows the
fault. A fault that shows on a GPU alone has its script in the page, as a Python block.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from impls.libraries.library_specs import FOLDER

PAGES = FOLDER.parent.parent / "docs" / "upstream"
"""The folder of the pages, if this project runs from its repository."""
_PAGE = re.compile(r"---\n(.*?)---\n(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class UpstreamFinding:
    """A fault of a published library."""

    name: str  # its name, as known failures and the page's file have it
    title: str  # what is wrong, in one line
    library: str  # the library's name, as its description has it
    versions: tuple[str, ...]  # the versions in which the script showed it
    mended: str  # the first version without the fault; empty if none is known
    raises: bool  # whether the call only raises, where it should compute; if not, it gives wrong results
    platform: str  # the JAX backend that shows it
    not_judged: str  # why no known failure names it; empty if one does


def read_findings(folder: Path = PAGES) -> list[UpstreamFinding]:
    """Read all reports, in the order of their names; none if the folder does not exist."""
    return [parse_finding(path) for path in sorted(folder.glob("*.md")) if path.stem != "index"]


def name_raising(findings: Iterable[UpstreamFinding]) -> frozenset[str]:
    """Return the names of the findings that only raise."""
    return frozenset(one.name for one in findings if one.raises)


def parse_finding(path: Path) -> UpstreamFinding:
    """Parse a report. Raises `ValueError`, which names the file and a missing part."""
    page = _PAGE.fullmatch(path.read_text(encoding="utf-8"))
    if page is None:
        raise ValueError(f"{path.name} does not begin with a block between lines of ---")
    facts = dict(re.findall(r"^(\w+): *(.*?)(?: +#.*)?$", page[1], re.MULTILINE))
    title = re.search(r"^# (.+)$", page[2], re.MULTILINE)
    for part, found in (("library", facts.get("library")), ("versions", facts.get("versions")), ("title", title)):
        if not found:
            raise ValueError(f"{path.name} has no {part}")
    assert title is not None
    return UpstreamFinding(
        name=path.stem,
        title=title[1].strip(),
        library=facts["library"].strip("\"'"),
        versions=tuple(re.findall(r"""["']([^"']+)["']""", facts["versions"])),
        mended=facts.get("mended", "").strip("\"'"),
        raises=facts.get("effect") == "raises",
        platform=facts.get("platform", "cpu"),
        not_judged=facts.get("not_judged", "").strip("\"'"),
    )
