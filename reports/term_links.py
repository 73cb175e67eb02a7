"""Link the terms in a line of text to their meanings on the page."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from reports.glossary import Glossary

_LINKED = ("max ratio", "rms ratio", "bound")
"""Terms that lines of evidence have, as `text_format` writes them."""
_TERM = re.compile(rf"\b({'|'.join(_LINKED)})\b")


def mark_terms(text: str, glossary: Glossary) -> Markup:
    """Link each of the known terms at its first place in a text, and escape all the rest.

    The tab key passes over these links, since the same terms are linked above the findings.
    """
    seen: set[str] = set()
    parts = []
    for part in _TERM.split(text):
        if part in _LINKED and part not in seen:
            seen.add(part)
            entry = glossary.terms[part]
            link = f'href="#{escape(entry.anchor)}" aria-describedby="{escape(entry.meaning_id)}"'
            parts.append(f'<a class="term" {link} tabindex="-1">{part}</a>')
        else:
            parts.append(str(escape(part)))
    return Markup("".join(parts))
