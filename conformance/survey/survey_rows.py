"""Select the rows of a survey: versions of libraries, each with the functions to judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from cases.name_suggestions import suggest_name
from conformance.session.failures import CannotJudge
from impls.libraries.library_specs import PREFIX, Library


@dataclasses.dataclass(frozen=True)
class Row:
    """One version of a library, and the names of its functions to judge."""

    library: Library
    version: str
    functions: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the row and of its folder, such as `flax-0.12.12`."""
        return f"{self.library.name}-{self.version}"


def select_rows(
    libraries: Mapping[str, Library], asked: Sequence[str], *, everything: bool = False, all_versions: bool = False
) -> list[Row]:
    """Select rows by what the user typed after `--library=`.

    Args:
      libraries: all libraries by name.
      asked: each is the name of a library, of one of its functions, or what names of functions have before a dot; with
        `==VERSION` or without.
      everything: all libraries.
      all_versions: all listed versions, where none is asked for; else the newest.

    Returns:
      The rows in the order of the libraries, the newest version first. A row that is asked for in parts has all parts.

    Raises:
      CannotJudge: if nothing is asked for, or a name is unknown.
    """
    if not asked and not everything:
        raise CannotJudge("nothing to survey: give --library=NAME (see survey --list), or --all")
    chosen: dict[tuple[str, str], dict[str, None]] = {}
    for text in (*asked, *(libraries if everything else ())):
        name, _, version = text.partition("==")
        library, functions = _find_functions(libraries, name)
        listed = library.versions if all_versions else library.versions[:1]
        for one in (version,) if version else listed:
            chosen.setdefault((library.name, one), {}).update(dict.fromkeys(functions))
    order = list(libraries)

    def rank(key: tuple[str, str]) -> tuple[int, int]:
        versions = libraries[key[0]].versions
        return order.index(key[0]), versions.index(key[1]) if key[1] in versions else len(versions)

    return [Row(libraries[key[0]], key[1], tuple(chosen[key])) for key in sorted(chosen, key=rank)]


def _find_functions(libraries: Mapping[str, Library], name: str) -> tuple[Library, tuple[str, ...]]:
    """Find the functions of a library, the function of this name, or those whose names begin with it and a dot.

    Raises:
      CannotJudge: if there is none.
    """
    name = name.removeprefix(PREFIX)
    if name in libraries:
        return libraries[name], libraries[name].implementation_names
    for library in libraries.values():
        short = {one.removeprefix(PREFIX): one for one in library.implementation_names}
        if name in short:
            return library, (short[name],)
        if found := tuple(one for key, one in short.items() if key.startswith(f"{name}.")):
            return library, found
    known = [*libraries, *(n.removeprefix(PREFIX) for one in libraries.values() for n in one.implementation_names)]
    raise CannotJudge(f"no library or function {name!r}{suggest_name(name, known)}; survey --list prints all")


def select_shard(rows: Sequence[Row], shard: tuple[int, int] | None) -> list[Row]:
    """Return the Kth of N parts of the rows; all rows without a shard."""
    if shard is None:
        return list(rows)
    number, count = shard
    return list(rows[number - 1 :: count])


def format_rows(rows: Iterable[Row]) -> str:
    """Return a table of rows as text, a line each."""
    return "\n".join(
        f"{row.library.package}=={row.version}  (Python {row.library.build_environment(row.version).python})  "
        + ", ".join(name.removeprefix(PREFIX) for name in row.functions)
        for row in rows
    )
