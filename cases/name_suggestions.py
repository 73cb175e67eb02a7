"""Suggest the known name that a misspelt one is closest to."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'forward'?` for `forwrd`; empty if no known name is close."""
    closest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {closest[0]!r}?" if closest else ""


def suggest_or_list(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean 'forward'?` for `forwrd`, or `; known are ...` if no known name is close."""
    names = list(known)
    return suggest_name(str(name), names) or f"; known are {', '.join(names)}"


def suggest_query(query: str, ids: Iterable[str]) -> str:
    """Return a suggestion for a query of case ids that matches none; empty if none is close.

    Each component of the query that no id has is replaced by the closest component of any id.
    """
    known = list(dict.fromkeys(component for one in ids for component in one.split("/")))
    components = query.split("/")
    closest = [_find_closest(component, known) for component in components]
    return f"; did you mean {'/'.join(closest)!r}?" if closest != components else ""


def _find_closest(component: str, known: list[str]) -> str:
    """Return the closest known component, or the component itself if it matches one or none is close."""
    if any(fnmatch.fnmatchcase(one, component) for one in known):
        return component
    return next(iter(difflib.get_close_matches(component, known, n=1)), component)
