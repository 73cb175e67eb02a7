"""Generate the parts of reference pages that follow from code.

A page asks for a part by a comment at the start of a line, for example `<!-- generated: command-line -->`. The line is
replaced when the site is built, so no generated text is kept in the repository. What follows the comment is for readers
of the repository.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from website import foreign_conventions, measurement_tables

PIPE = r"\|"
"""A `|` in a cell of a table, as GitHub needs it in code spans too."""
_MARKER = re.compile(r"^<!-- generated: ([\w-]+) -->.*$", re.MULTILINE)


def fill_in(page: str) -> str:
    """Return the page with each marker replaced by the part that it names.

    Raises:
      KeyError: if a marker names no part.
    """
    return _MARKER.sub(lambda marker: PARTS[marker[1]](), page)


def format_command_line() -> str:
    """Format each command as a section: what it does, its options, its examples."""
    from conformance import cli

    sections = []
    for name, command in _find_commands(cli.build_parser()).items():
        groups = (group for group in command._action_groups if _list_shown(group))
        sections += [f"## {name}", _plain(command.description or "")]
        for group in groups:
            rows = ((_name_option(action), _describe_option(action)) for action in _list_shown(group))
            title = {"options": "Options", "positional arguments": "Arguments"}.get(group.title or "", group.title)
            sections.append(f"**{title[:1].upper()}{title[1:]}**" if title else "")
            sections.append(_format_table(("option", "what it does"), rows))
        if command.epilog:
            sections.append(f"```text\n{command.epilog.strip()}\n```")
    return "\n\n".join(filter(None, sections))


def format_pytest_options() -> str:
    """Format the options that the plugin adds to pytest as a table."""
    from conformance.gate import gate_options

    recorder = _OptionRecorder()
    gate_options.add_options(recorder)  # type: ignore[arg-type]
    rows = ((_name_option(action), _describe_option(action)) for action in recorder.actions)
    return _format_table(("option", "what it does"), rows)


class _OptionRecorder:
    """Stand in for pytest's parser and its groups, and keep the options as `argparse` has them."""

    def __init__(self) -> None:
        self.actions: list[argparse.Action] = []
        self._parser = argparse.ArgumentParser()

    def getgroup(self, *_: str) -> _OptionRecorder:
        return self

    def addoption(self, *names: str, **attributes: Any) -> None:
        self.actions.append(self._parser.add_argument(*names, **attributes))


def format_checks() -> str:
    """Format all checks as a table, in the order in which they run."""
    from conformance.checks import CHECKS

    rows = ((f"[`{check.name}`](#{check.name})", check.about, check.scope.about) for check in CHECKS)
    return _format_table(("check", "what it is", "runs on"), rows)


def format_features() -> str:
    """Format all features of cases as a table."""
    from cases.case import FEATURES, OPT_IN

    rows = ((f"`{name}`", f"{text}{' (*opt-in*)' if name in OPT_IN else ''}") for name, text in FEATURES.items())
    return _format_table(("feature", "what it is"), rows)


def format_declarations(name: str) -> str:
    """Format the declarations that a class of the contract's table adds: values, what they say and what they loosen."""
    from impls.contract import declarations

    kind = getattr(declarations, name)
    hints, inherited = get_type_hints(kind), {name for base in kind.__bases__ for name in get_type_hints(base)}
    rows = (
        (f"`{field.name}`", _list_values(field.default, hints[field.name]), *field.metadata.values())
        for field in declarations.list_fields(kind)
        if field.name not in inherited
    )
    return _format_table(("declaration", "values, the default first", "says", "loosens"), rows)


def _list_values(default: object, hint: Any) -> str:
    """List the values that a declaration may have, or their types, the default first."""
    parts = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    if hint is bool:
        parts = (Literal[True, False],)
    listed = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
    values = [repr(value).replace("'", '"') for value in dict.fromkeys([default, *listed])]
    kinds = [re.sub(r"\w+\.", "", inspect.formatannotation(part)) for part in parts if get_origin(part) is not Literal]
    return ", ".join(f"`{text}`" for text in dict.fromkeys([*values, *kinds]) if text != "NoneType")


def format_record_schema() -> str:
    """Format each kind of line of a file of records: its fields, their JSON types and what they mean."""
    from reports.records.error_map import ErrorMap
    from reports.records.measurement import Measurement
    from reports.records.record import Record, Worst
    from reports.records.run_record import DeclarationTrial, End, JobLine, Kernel, ProbeLine, Proposal, RunLine

    documented: Iterable[tuple[str, type[msgspec.Struct]]] = (
        ("Record", Record),
        ("Worst element", Worst),
        ("Error map", ErrorMap),
        ("Run", RunLine),
        ("Kernel of a run", Kernel),
        ("Finished job", JobLine),
        ("Probe of a finding", ProbeLine),
        ("Proposal of declarations", Proposal),
        ("Trial of declarations", DeclarationTrial),
        ("End of a run", End),
        ("Measurement", Measurement),
    )
    sections = []
    for title, line in documented:
        meanings = {name: text for kind in reversed(line.__mro__) for name, text in read_attributes(kind).items()}
        rows = []
        for field in msgspec.structs.fields(line):
            if field.name == "run":  # a label that no file has
                continue
            required = "yes" if field.required else ""
            rows.append((f"`{field.name}`", _name_json_type(field.type), required, meanings.get(field.name, "")))
        tag = line.__struct_config__.tag
        sections.append(f"## {title}")
        sections.append(_plain((inspect.getdoc(line) or "").partition("\n\n")[0]))
        if tag:
            sections.append(f'`"schema": "{tag}"`')
        sections.append(_format_table(("field", "JSON type", "required", "meaning"), rows))
    return "\n\n".join(sections)


def read_attributes(kind: type[Any]) -> dict[str, str]:
    """Return the descriptions in the `Attributes:` section of a class, by attribute."""
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if match := re.match(r" {2}(\w+): (.*)", line):
            name = match[1]
            found[name] = match[2]
        elif name:
            found[name] += f" {line.strip()}"
    return {name: _link_free(text) for name, text in found.items()}


def _find_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(subparsers.choices)


def _list_shown(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return [
        action
        for action in group._group_actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]


def _name_option(action: argparse.Action) -> str:
    """Name an option as it is written, with the values it takes."""
    value = str(action.metavar or "")
    if action.choices is not None and not action.metavar:
        value = "|".join(map(str, action.choices))
    if not action.option_strings:
        return f"`{value or action.dest}`"
    takes_value = action.nargs != 0
    return f"`{action.option_strings[-1]}{f'={value or action.dest.upper()}' if takes_value else ''}`"


def _describe_option(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%") % {"default": action.default} if action.help else ""


def _name_json_type(kind: Any) -> str:
    """Name a field's type as JSON has it."""
    names = list(dict.fromkeys(_name_types(msgspec.inspect.type_info(kind))))
    if "number" in names and "integer" in names:
        names.remove("integer")
    return " or ".join(names)


def _name_types(info: msgspec.inspect.Type) -> Iterator[str]:
    match info:
        case msgspec.inspect.UnionType():
            for member in info.types:
                yield from _name_types(member)
        case msgspec.inspect.Metadata():
            yield from _name_types(info.type)
        case msgspec.inspect.LiteralType():
            yield from (f"`{value!r}`".replace("'", '"') for value in info.values)
        case msgspec.inspect.IntType():
            yield "integer"
        case msgspec.inspect.FloatType():
            yield "number"
        case msgspec.inspect.StrType():
            yield "string"
        case msgspec.inspect.BoolType():
            yield "boolean"
        case msgspec.inspect.NoneType():
            yield "null"
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            yield f"array of {' or '.join(dict.fromkeys(_name_types(info.item_type)))}"
        case msgspec.inspect.TupleType():
            yield f"array of {len(info.item_types)}: {', '.join(n for i in info.item_types for n in _name_types(i))}"
        case msgspec.inspect.DictType():
            yield f"object of {' or '.join(dict.fromkeys(_name_types(info.value_type)))}"
        case msgspec.inspect.StructType():
            yield "array" if info.array_like else "object"
        case _:
            yield "any"


def _format_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines: list[Iterable[str]] = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_plain(cell).replace('|', PIPE) for cell in line)} |" for line in lines)


def _plain(text: str) -> str:
    """Return a text as one line."""
    return " ".join(text.split())


def _link_free(text: str) -> str:
    return text.replace("[", r"\[")


def format_upstream_findings() -> str:
    """Format the reports on faults of libraries as a table, by library."""
    from conformance.survey.upstream_findings import read_findings

    rows = [
        (f"[{finding.title}]({finding.name}.md)", finding.library, ", ".join(finding.versions), finding.mended or "no")
        for finding in sorted(read_findings(), key=lambda one: (one.library.lower(), one.name))
    ]
    return _format_table(("finding", "library", "seen in", "mended"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "command-line": format_command_line,
    "pytest-options": format_pytest_options,
    "checks": format_checks,
    "features": format_features,
    "arithmetic": functools.partial(format_declarations, "Arithmetic"),
    "formulas": functools.partial(format_declarations, "Formulas"),
    "behaviour": functools.partial(format_declarations, "Behaviour"),
    "conventions": functools.partial(format_declarations, "Conventions"),
    "declaration": functools.partial(format_declarations, "Declaration"),
    "record-schema": format_record_schema,
    "upstream-findings": format_upstream_findings,
    "foreign-names": foreign_conventions.format_names,
    "foreign-conventions": foreign_conventions.format_answers,
    **measurement_tables.PARTS,
}
"""The generated parts by the names that pages use."""
