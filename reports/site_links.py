"""Build links from the page to the documentation site."""

from __future__ import annotations

SITE = ""
"""The address of the site, ending in a slash. Empty while there is no site: then the page has no links to it."""
_CHECKS_PAGE = "reference/checks/"


def build_check_link(name: str) -> str:
    """Return the address of a check on the site; empty if there is no site."""
    return f"{SITE}{_CHECKS_PAGE}#{name}" if SITE else ""
