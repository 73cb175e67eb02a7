"""Phrase the declarations that together cover findings of an implementation, and say which findings are left."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from reports.causes.finding_text import FindingText
from reports.causes.sorts import DIFFERS
from reports.record_groups import JudgedImplementation
from reports.records import RunInfo
from reports.text_format import format_count


@dataclasses.dataclass(frozen=True)
class ProposalText:
    """The declarations that cover findings of an implementation, as text.

    Attributes:
      implementation: the implementation.
      heading: how many of its findings differ by declarations.
      code: the decorator, or the command that writes a wrapper, a line each.
      left: which findings are left with it.
    """

    implementation: JudgedImplementation
    heading: str
    code: tuple[str, ...]
    left: str

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines of the text."""
        return (self.heading, *self.code, self.left)


def describe_proposals(findings: Sequence[FindingText], run: RunInfo) -> tuple[ProposalText, ...]:
    """Phrase one proposal for each implementation that has findings which pass under declarations."""
    found = []
    for implementation in dict.fromkeys(text.finding.implementation for text in findings):
        own = [text for text in findings if text.finding.implementation == implementation]
        covered = [text for text in own if text.sort == DIFFERS]
        proposal = run.proposals.get(implementation.label)
        if proposal is None or not covered:
            continue
        needed = {one for text in covered for one in text.declarations}
        written = [one for one in proposal.declarations if one in needed]
        converted = [one for one in proposal.wrappers if one in needed]
        beside = ", beside what it declares" if proposal.declares and written else ""
        where = "" if proposal.is_function or not written else " in its Implementation"
        verb = "differs" if len(covered) == 1 else "differ"
        of = f"{len(covered)} of {format_count(len(own), 'finding')} {verb} by what can be declared{where}{beside}"
        wraps = f", and by {' and '.join(converted)}: wrap it" if converted else ""
        if converted and not written:
            of, wraps = f"{len(covered)} of {format_count(len(own), 'finding')} {verb}", f" by {converted[0]}: wrap it"
        arguments = ", ".join(written)
        code = [f"@declare({arguments})" if proposal.is_function else arguments] if written else []
        code += [_format_adapt_command(implementation.name, run.command)] if converted else []
        left = [str(text.number) for text in own if text.sort != DIFFERS]
        found.append(
            ProposalText(
                implementation=implementation,
                heading=f"{implementation.label}: {of}{wraps}",
                code=tuple(code),
                left=f"with it, {_format_left(left)}",
            )
        )
    return tuple(found)


def _format_adapt_command(name: str, command: str) -> str:
    """Format what finds out the conventions of a function and writes a wrapper, as a command or in Python."""
    if command.startswith("conformance.check("):
        return f"conformance.adapt({name})"
    return f"python -m conformance adapt --impl={shlex.quote(name)}"


def _format_left(numbers: Sequence[str]) -> str:
    if not numbers:
        return "no finding is left"
    if len(numbers) == 1:
        return f"finding {numbers[0]} is left"
    return f"findings {', '.join(numbers[:-1])} and {numbers[-1]} are left"
