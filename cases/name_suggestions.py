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
    """Suggest a query with the closest part for each part that no case id has; empty if none is close."""
    known = list(dict.fromkeys(part for one in ids for part in one.split("/")))
    parts = query.split("/")
    closest = [_find_closest(part, known) for part in parts]
    return f"; did you mean {'/'.join(closest)!r}?" if closest != parts else ""


def _find_closest(part: str, known: list[str]) -> str:
    """Return the closest known part, or the part itself if it matches one or none is close."""
    if any(fnmatch.fnmatchcase(one, part) for one in known):
        return part
    return next(iter(difflib.get_close_matches(part, known, n=1)), part)
