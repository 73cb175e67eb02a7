"""Build links from the page to the documentation site."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping

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


@functools.cache
def find_site() -> str:
    """Return the site's address with a final slash, the installed package's `Documentation`; empty if none."""
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
