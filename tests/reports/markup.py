"""Parse a page and check rules of accessibility and of addresses, without a browser."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from urllib.parse import unquote

VOID = frozenset({"meta", "br", "col", "input", "img", "link", "hr"})
# Elements of SVG figures that close themselves.
SELF_CLOSING = frozenset({"path", "use", "rect", "circle", "line", "stop"})
_SCRIPTS = re.compile(r"<script[^>]*>.*?</script>", re.DOTALL)


@dataclasses.dataclass
class Element:
    """An element: its attributes, the elements above it, and its text."""

    tag: str
    attributes: dict[str, str]
    above: tuple[Element, ...] = dataclasses.field(repr=False)
    children: list[Element] = dataclasses.field(default_factory=list)
    text: str = ""

    def all(self, *tags: str) -> list[Element]:
        """Return the elements below it with one of these tags."""
        found = []
        for child in self.children:
            found += [child] if child.tag in tags else []
            found += child.all(*tags)
        return found

    @property
    def words(self) -> str:
        """All text in it and below."""
        return " ".join((self.text + " " + " ".join(child.words for child in self.children)).split())


class _PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {}, ())
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs}, tuple(self.open))
        self.open[-1].children.append(element)
        if tag not in VOID and tag not in SELF_CLOSING:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {n: v or "" for n, v in attrs}, tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID or tag in SELF_CLOSING:
            return
        if self.open[-1].tag != tag:
            raise ValueError(f"</{tag}> closes <{self.open[-1].tag}>")
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data


def parse_page(page: str) -> Element:
    """Parse a page.

    Raises:
      ValueError: if an element is not closed, or a tag closes another element.
    """
    reader = _PageParser()
    reader.feed(page)
    reader.close()
    if len(reader.open) > 1:
        raise ValueError(f"<{reader.open[-1].tag}> is not closed")
    return reader.root


def strip_scripts(page: str) -> str:
    """Remove the scripts of a page."""
    return _SCRIPTS.sub("", page)


def find_faults(page: str) -> list[str]:
    """List what is wrong with the structure of a page, in words."""
    root = parse_page(page)
    every = _list_elements(root)[1:]
    ids = [element.attributes["id"] for element in every if "id" in element.attributes]
    found = [f"the id {name} is given {ids.count(name)} times" for name in set(ids) if ids.count(name) > 1]
    found += [f"{link} leads nowhere" for link in sorted(_list_links(every)) if link not in ids]
    found += _check_headings(root)
    for table in root.all("table"):
        found += _check_table(table)
    labels = [
        label for element in every if element.attributes.get("role") == "region" for label in [_get_label(element)]
    ]
    found += [f"a region is called {label!r}" for label in set(labels) if labels.count(label) > 1 or not label]
    for element in every:
        found += _check_element(element, ids)
    return found


def _list_elements(element: Element) -> list[Element]:
    return [element, *(x for child in element.children for x in _list_elements(child))]


def _list_links(every: list[Element]) -> set[str]:
    links = {element.attributes["href"] for element in every if element.tag == "a"}
    return {unquote(link.removeprefix("#")) for link in links}


def _check_headings(root: Element) -> list[str]:
    levels = [int(heading.tag[1]) for heading in root.all("h1", "h2", "h3", "h4", "h5", "h6")]
    found = [f"{levels.count(1)} headings of level 1"] if levels.count(1) != 1 else []
    steps = zip([0, *levels], levels, strict=False)
    return found + [f"a heading of level {new} after one of {old}" for old, new in steps if new > old + 1]


def _check_table(table: Element) -> list[str]:
    caption = [child for child in table.children if child.tag == "caption"]
    name = caption[0].words if caption else "a table"
    found = [] if caption and name else ["a table has no caption"]
    found += [f"{name}: a header cell has no scope" for th in table.all("th") if not th.attributes.get("scope")]
    found += [f"{name}: a header cell is empty" for th in table.all("th") if not th.words]
    found += [] if table.all("th") else [f"{name}: no header cell"]
    return found


def _check_element(element: Element, ids: list[str]) -> list[str]:
    named = element.attributes.get("aria-labelledby")
    found = [f"<{element.tag}> is labelled by {named}, which is nowhere"] if named and named not in ids else []
    if element.tag in ("input", "select") and not any(x.tag == "label" and x.words for x in element.above):
        found.append(f"<{element.tag}> has no label")
    if element.tag == "svg" and not (element.attributes.get("aria-label") or "aria-hidden" in element.attributes):
        found.append("a figure has no label")
    if element.tag in ("summary", "button") and not element.words:
        found.append(f"<{element.tag}> has no text")
    if element.tag == "section" and not _get_label(element):
        found.append("a section has no label")
    if "scroll" in element.attributes.get("class", "").split() and not _get_label(element):
        found.append("what scrolls has no label")
    return found


def _get_label(element: Element) -> str:
    return element.attributes.get("aria-label") or element.attributes.get("aria-labelledby", "")
