"""Escape text that comes from a file or a kernel, where it enters: reports then show it as it is."""

from __future__ import annotations

import re
from typing import Any

# The first character of commands to GitHub Actions: `::` at the start of a line, and `##[` anywhere in it.
_COMMAND_START = re.compile(r"(?<!\S):(?=:)|#(?=#\[)")


def make_printable(text: str) -> str:
    """Return the text as one line of printable characters that no runner of GitHub Actions takes for a command.

    White space becomes a space. Any other unprintable character becomes its Python escape, such as part of a terminal
    escape sequence, a mark that changes the direction of writing, or half a surrogate pair. So does the first character
    of a command, since words may begin a line.
    """
    if is_printable(text):
        return text
    if not text.isprintable():
        text = "".join(x if x.isprintable() else " " if x.isspace() else _escape_character(x) for x in text)
    return _COMMAND_START.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def is_printable(text: str) -> bool:
    """Tell whether `make_printable` leaves the text as it is."""
    return text.isprintable() and "::" not in text and "##[" not in text


def make_all_printable(value: Any) -> Any:
    """Return plain data with every string in it printable, keys too."""
    if isinstance(value, str):
        return make_printable(value)
    if isinstance(value, list):
        return list(map(make_all_printable, value))
    if isinstance(value, dict):
        return {make_printable(name): make_all_printable(item) for name, item in value.items()}
    return value


def may_need_escapes(json_line: str) -> bool:
    """Tell whether `make_printable` may change strings in a JSON line, where DEL is the only raw control character."""
    is_plain = "\x7f" not in json_line if json_line.isascii() else json_line.isprintable()
    return not is_plain or "\\" in json_line or "::" in json_line or "##[" in json_line


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()
