"""Implement `compare`: report what changed between two runs, or two sets of shards."""

from __future__ import annotations

import argparse

from rich.console import Console

from conformance.commands.argument_lookup import format_command_line
from conformance.session import input_files
from conformance.session.failures import CannotJudge
from conformance.session.run_annotations import annotate_comparison
from conformance.session.run_comparison import compare_runs, read_compared_runs
from conformance.session.run_outputs import check_writable, write_summary
from reports import changes_page


def compare(arguments: argparse.Namespace) -> int:
    """Report what changed between two runs; return 1 if anything became worse, else 0."""
    page = check_writable(arguments.report, "report") if arguments.report is not None else None
    text = check_writable(arguments.markdown, "markdown") if arguments.markdown is not None else None
    named = [*arguments.old.split(","), *arguments.new.split(",")]
    for option, place in (("report", page), ("markdown", text)):
        if place is not None and place.resolve() in [input_files.parse_input_path(name).resolve() for name in named]:
            raise CannotJudge(f"--{option}={place} is one of the files to be read: give it its own file")
    command = format_command_line()
    old, new = (read_compared_runs(names, command=command) for names in (arguments.old, arguments.new))
    found = compare_runs(old, new)
    try:
        if page is not None:
            changes_page.save_changes_page(page, found, (old.records, old.info), (new.records, new.info))
        if text is not None:
            write_summary(text, changes_page.format_changes_markdown(found))
    except OSError as error:
        raise CannotJudge(f"{error.filename or 'an output'} cannot be written: {error.strerror or error}") from error
    changes_page.print_comparison(found, Console(), lists_all=arguments.all)
    print("".join(f"{line}\n" for line in annotate_comparison(found)), end="")
    return 1 if found.regressions else 0
