"""Format pieces of Markdown, with text from records escaped so that it is shown literally."""

from __future__ import annotations

import html
import re


def escape_inline(text: str) -> str:
    """Escape text for one line of Markdown, so that no markup of Markdown or HTML in it takes effect."""
    escaped = re.sub(r"([\\`*_|\[\]~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
    return re.sub(r"^(\d+(?=[.)](?:\s|$))|(?=[-+=#:]))", r"\1\\", escaped)


def format_code(text: str) -> str:
    """Format one line of text as code within a line of Markdown or a cell of a table."""
    return escape_inline(text) if {"`", "|"} & set(text) else f"`{text}`"


def format_row(*cells: str) -> str:
    """Format one row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def format_command(command: str) -> str:
    """Format a shell command as a fenced block within a list item."""
    longest = max((len(run) for run in re.findall(r"`+", command)), default=0)
    fence = "`" * max(3, longest + 1)
    body = "\n".join(f"  {line}" for line in command.splitlines())
    return f"  {fence}sh\n{body}\n  {fence}"
