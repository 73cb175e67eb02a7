"""Explain the words of the page: the checks of a run, and the terms that stand in several sections."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Iterable, Mapping

from markupsafe import Markup, escape

TERMS: Mapping[str, str] = {
    "bound": "The rounding error that a correct implementation may have at one element, for its declared arithmetic.",
    "case": "One attention problem, drawn from a seed. Its id names the shape, the mask, the operands and the seed.",
    "check": "One property that is tested on a case. The table of checks has all of them.",
    "expected failure": "A known failure that the settings list with a reason. It is red once it passes.",
    "feature": "Something that an implementation may lack: a dtype, a kind of mask, an operand, a storage form.",
    "finding": "The failures of a run that one cause explains.",
    "limit": "The largest ratio, or the largest rms ratio, that passes.",
    "margin": "How far beyond its limit a simple wrong result, such as zeros, would be on a case.",
    "max ratio": "The largest ratio of all elements of a result. It must not exceed its limit.",
    "planted bug": "A small mistake that was put into a correct kernel, to see whether the checks find it.",
    "poison": "NaN, infinity or a huge number in memory that must not change any result.",
    "ratio": "The error of one element divided by its bound. A correct kernel stays below the limit for any shape.",
    "ratio_flash": "A ratio against a backward pass from the kernel's own `out` and `logsumexp`. It is not judged.",
    "record": "The verdict on one result of one check on one case.",
    "result": "An array that is judged, such as `out`, `logsumexp` or `dq`.",
    "rms ratio": "The root mean square of the ratios of all elements of a result. It has a limit of its own.",
    "times its limit": "A ratio divided by the largest ratio that passes. Above 1 it is a failure.",
    "unjudged": "No comparison took place, for the reason that is given.",
    "unsupported": "The implementation lacks something that the case needs, and refuses or declares it.",
}
"""What the terms of the page mean, one or two sentences each."""
OTHER_ROWS: Mapping[str, tuple[str, str]] = {
    "devices": ("too few devices", "The case needs more devices than this machine has."),
    "discrimination": (
        "weak cases",
        "A simple wrong result would pass the case, so it proves too little.",
    ),
    "early_end": ("ended early", "No call came right in cases of every kind, so the other cases were not judged."),
    "expectations": ("missing known failures", "A listed known failure did not occur in the whole run."),
    "files": ("changed files", "Files of the kernel changed while it was judged."),
    "flags": ("compiler flags", "Too many results are right under one set of compiler flags only."),
    "hardware": ("missing hardware", "The accelerator that the kernel needs is not in this machine."),
    "support": ("unsupported cases", "The implementation does not support the case."),
}
"""What records name in place of a check, with the words by which the page calls it, and its meaning.

These names are no values of `--check`, so the page does not show them as if they were.
"""
_LINKED = ("max ratio", "rms ratio", "bound")
"""Terms that lines of evidence have, as `text_format` writes them."""
_TERM = re.compile(rf"\b({'|'.join(_LINKED)})\b")
_PACKAGE = "attention-conformance"
_CHECKS_PAGE = "checks.html"
TERM_PAGES: Mapping[str, str] = {
    "bound": "verdicts.html#the-four-numbers",
    "case": "features.html#ids",
    "check": "checks.html",
    "expected failure": "reference/outcomes.html#known-failures",
    "feature": "features.html#features",
    "finding": "findings.html",
    "limit": "verdicts.html#the-two-limits",
    "margin": "cases.html#a-case-must-be-able-to-fail",
    "max ratio": "verdicts.html#the-two-limits",
    "planted bug": "sensitivity.html#planted-bugs",
    "poison": "checks.html#poison",
    "ratio": "verdicts.html#the-four-numbers",
    "ratio_flash": "contract.html#the-two-reference-backward-passes",
    "record": "reference/records.html",
    "result": "glossary.html",
    "rms ratio": "verdicts.html#the-two-limits",
    "times its limit": "verdicts.html#the-two-limits",
    "unjudged": "reference/outcomes.html#outcomes",
    "unsupported": "reference/outcomes.html#outcomes",
}
"""The page of the site that explains each term, relative to the address of the site."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A word of the page and its meaning."""

    word: str  # as it stands on the page
    anchor: str  # the address of its meaning on the page
    meaning: str  # one or two sentences
    link: str = ""  # the address of more about it; empty if there is none

    @property
    def meaning_id(self) -> str:
        """The id of a hidden copy of the meaning for screen readers, which do not read folded sections."""
        return f"meaning-{self.anchor}"


@dataclasses.dataclass(frozen=True)
class Glossary:
    """The words of a page by name. A check and a term of the same name, such as `poison`, have an entry each."""

    checks: Mapping[str, Entry]
    terms: Mapping[str, Entry]


def build_glossary(checks: Iterable[str], meanings: Mapping[str, str]) -> Glossary:
    """Build the glossary of a page."""
    known = {**{name: meaning for name, (_, meaning) in OTHER_ROWS.items()}, **meanings}
    return Glossary(
        checks={
            name: Entry(
                name_row(name),
                f"check-{_slugify(name)}",
                known[name],
                build_check_link(name) if name in meanings else "",
            )
            for name in checks
            if known.get(name)
        },
        terms={
            word: Entry(word, f"word-{_slugify(word)}", meaning, build_term_link(word))
            for word, meaning in TERMS.items()
        },
    )


def name_row(check: str) -> str:
    """Return the words by which the page calls a check, or what a record names in place of one."""
    return OTHER_ROWS[check][0] if check in OTHER_ROWS else check


def _slugify(word: str) -> str:
    return re.sub(r"\W+", "-", word)


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


@functools.cache
def find_site() -> str:
    """Return the `Documentation` address of the installed package, with a final slash; empty if it has none."""
    try:
        urls = importlib.metadata.metadata(_PACKAGE).get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    named = dict(line.partition(", ")[::2] for line in urls)
    address: str = named.get("Documentation", "")
    return f"{address.rstrip('/')}/" if address else ""


def build_check_link(name: str) -> str:
    """Return the address of a check on the site; empty if there is no site."""
    return _build_link(f"{_CHECKS_PAGE}#{name}")


def build_term_link(term: str) -> str:
    """Return the address where the site explains a term; empty if there is no site."""
    return _build_link(TERM_PAGES[term])


def _build_link(place: str) -> str:
    site = find_site()
    return f"{site}{place}" if site else ""
