"""Read the fenced code blocks of a Markdown page, with the attributes that say how tests treat them.

A fence may carry attributes in braces after its language, for example `{.not-run reason="needs a GPU"}`. GitHub ignores
them, the site drops them, and the tests of the pages (`tests/docs`) act on them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>```+)(?P<language>[\w+-]*)[ ]*(?:\{(?P<attributes>[^}\n]*)\})?[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)(?P=ticks)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
# A code span ends within its paragraph.
_SPAN = re.compile(r"(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=ticks)(?!`)", re.DOTALL)


@dataclass(frozen=True)
class Fence:
    """A fenced code block.

    Attributes:
      language: the word after the backticks, `""` if there is none.
      text: the lines between the fences, without the fence's indentation.
      line: the number of the opening fence's line, from 1.
      start: where the block begins in the page, in characters.
      end: where it ends.
      classes: the attributes that begin with a dot, without it.
      options: the attributes of the form `name=value`.
    """

    language: str
    text: str
    line: int
    start: int
    end: int
    classes: frozenset[str]
    options: dict[str, str]


def find_fences(page: str) -> Iterator[Fence]:
    """Yield the fenced blocks of a page from top to bottom."""
    for match in _FENCE.finditer(page):
        words = shlex.split(match["attributes"] or "")
        yield Fence(
            language=match["language"],
            text=re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
            line=page.count("\n", 0, match.start()) + 1,
            start=match.start(),
            end=match.end(),
            classes=frozenset(word[1:] for word in words if word.startswith(".")),
            options=dict(word.split("=", 1) for word in words if "=" in word),
        )


def drop_attributes(page: str) -> str:
    """Return the page without the attributes of its fences."""
    return re.sub(r"^([ ]*```+[\w+-]*)[ ]+\{[^}\n]*\}", r"\1", page, flags=re.MULTILINE)


def split_console(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with the output below it.

    A command follows `$ `. It is one line, or several of which all but the last end with a backslash.

    Raises:
      ValueError: if the block does not begin with a command.
    """
    parts = re.split(r"^\$ ((?:.*\\\n)*.*)\n?", text, flags=re.MULTILINE)
    if parts[0].strip():
        raise ValueError(f"a console block must begin with a command: {text}")
    yield from zip(parts[1::2], parts[2::2], strict=True)


def split_at_code(page: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a page in order, each with True if it is a fenced block or a code span."""
    for is_fence, text in _split(_FENCE, page):
        if is_fence:
            yield True, text
        else:
            yield from _split(_SPAN, text)


def _split(pattern: re.Pattern[str], text: str) -> Iterator[tuple[bool, str]]:
    end = 0
    for match in pattern.finditer(text):
        yield False, text[end : match.start()]
        yield True, match[0]
        end = match.end()
    yield False, text[end:]
