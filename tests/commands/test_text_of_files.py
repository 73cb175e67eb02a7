"""No text of a file of records begins a line of what commands print and write, or takes effect as markup there."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from reports.records import (
    ERROR,
    INTERRUPTED,
    PASS,
    UNJUDGED,
    End,
    PlannedJob,
    serialize_end,
    serialize_job,
    serialize_measurement,
    serialize_probe,
    serialize_run,
)
from reports.records.measurement import AGREES, FORWARD, Measurement
from tests.commands.kernel_folder import run_cli
from tests.test_mutated_records import CASES, FAILED, PASSED, RUN

OTHER_CASE = CASES[0].replace("s0", "s1")
KERNEL = msgspec.structs.replace(
    RUN.kernels["kernel"], place="ran elsewhere", source="a digest", asks_less=("less",), files={"a file": "its digest"}
)
UNJUDGED_RECORD = msgspec.structs.replace(
    PASSED, implementation="other", verdict=UNJUDGED, ratio=None, reason="no device"
)
RED = msgspec.structs.replace(FAILED, remedy="a remedy", pattern="a pattern", reproduce="repeat it", host="a host")
RAISED = msgspec.structs.replace(
    RED, check="primal", verdict=ERROR, ratio=None, worst=None, reason="ValueError: a reason"
)
MEASURED = Measurement(
    implementation="kernel",
    platform="cpu",
    device="a device",
    case=CASES[0],
    phase=FORWARD,
    outcome=AGREES,
    reason="a reason",
    baseline="kernel",
    samples=(1.0,),
    speed=None,
    error=None,
    jax="0.10.2",
)
WIDE = 10_000
FREE_NAMES = frozenset({"kernel", "other", "a file", "jax", "xla_flags", "compile_seconds"})
"""The names of fields that a kernel or its author chose."""
STARTS = (
    "::error::",
    "##[error]",
    "# ",
    "```",
    "~~~",
    "|---|",
    "- ",
    "* ",
    "1. ",
    "> ",
    "[/]",
    "---",
    "===",
    "<b>",
    "&",
)
TEXTS = st.builds(
    lambda pieces, fill: "".join(pieces) + "z" * fill,
    st.lists(st.sampled_from((*STARTS, *"\n\r\v\x1b\x07\x85\u2028\u202e \ta")), min_size=1, max_size=4),
    st.integers(1, 30),
)
FORGED = {
    "kernel": "# ",
    "cpu": "::error::",
    "a part": "\n# ",
    "a stop": "\x1b[31m\n::error::",
    "ran elsewhere": "\n::error::",
    "a reason": "##[error]",
}


def list_lines(*, failing: bool) -> list[dict[str, Any]]:
    """List the lines of a file of records: three jobs with records of every kind, a probe, and an end."""
    jobs = (RUN.jobs[0], dataclasses.replace(RUN.jobs[1], checks=("forward", "primal")))
    run = msgspec.structs.replace(
        RUN,
        narrowed="a part",
        command="the command",
        environment={"jax": "0.10.2", "xla_flags": "no flags"},
        kernels={"kernel": KERNEL, "other": msgspec.structs.replace(KERNEL, arrays=())},
        jobs=(*jobs, PlannedJob("other", CASES[0], ("forward",))),
    )
    texts = (
        serialize_run(run),
        serialize_job(0, [PASSED]),
        serialize_job(1, [RED, RAISED] if failing else [msgspec.structs.replace(RED, verdict=PASS, ratio=0.5)]),
        serialize_job(2, [UNJUDGED_RECORD]),
        serialize_probe(msgspec.structs.replace(RED, case=OTHER_CASE)),
        serialize_end(End(ended="2026-01-01T00:01:00+00:00", how=INTERRUPTED, reason="a stop", jobs=3, seconds=60.0)),
    )
    return [json.loads(line) for text in texts for line in text.splitlines()]


def list_texts(value: Any) -> Iterator[str]:
    """Yield each string that is a value within a JSON value."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(item, str):
            yield item
        yield from list_texts(item)


def replace_texts(value: Any, texts: Mapping[str, str]) -> Any:
    """Replace strings everywhere in a JSON value, but for the names of fields."""
    if isinstance(value, list):
        return [replace_texts(item, texts) for item in value]
    if isinstance(value, dict):
        return {
            texts.get(name, name) if name in FREE_NAMES else name: replace_texts(item, texts)
            for name, item in value.items()
        }
    return texts.get(value, value) if isinstance(value, str) else value


FIXED = r"attention-conformance/.*|inf|nan|pass|fail|error|unjudged|agrees|interrupted|2026.*|[TBN]{1,2}|[-0-9]*"
"""What the schema prescribes, which no other text can replace."""
TIMED_LINE = json.loads(serialize_measurement(MEASURED))
FREE = sorted(
    {
        text
        for text in (*list_texts([*list_lines(failing=True), TIMED_LINE]), *FREE_NAMES)
        if not re.fullmatch(FIXED, text)
    }
    - {FORWARD}
)


@dataclasses.dataclass(frozen=True)
class Shown:
    """What the commands that read records print, and the Markdown that they write."""

    printed: list[str]
    markdown: list[str]
    entries: str


def show(texts: Mapping[str, str], width: int = WIDE) -> Shown:
    """Run the commands that read records, with some texts of their files replaced."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.chdir(name)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("GITHUB_ACTIONS", "true")
        patch.delenv("GITHUB_STEP_SUMMARY", raising=False)
        files = {
            "old": list_lines(failing=False),
            "new": list_lines(failing=True),
            "timed": [TIMED_LINE],
        }
        for file, lines in files.items():
            Path(f"{file}.jsonl").write_text("".join(f"{json.dumps(replace_texts(x, texts))}\n" for x in lines))
        printed, entries = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            run_cli("report", "new.jsonl", "timed.jsonl", "--gate", "--markdown=report.md")
            run_cli("compare", "old.jsonl", "new.jsonl", "--markdown=compare.md")
            run_cli("compare", "old.jsonl", "new.jsonl", "--all")
        with contextlib.redirect_stdout(entries):
            run_cli("expect", "new.jsonl")
            run_cli("expect", "new.jsonl", "--all")
        written = [Path(f"{each}.md") for each in ("report", "compare")]
        markdown = [path.read_text() if path.exists() else "" for path in written]
        return Shown(printed.getvalue().split("\n"), markdown, entries.getvalue())


def count_parts(text: str) -> Counter[str]:
    """Count the parts of a Markdown text by their kind; names decide their order."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    return Counter(f"{kind.type} {kind.tag}" for token in tokens for kind in (token, *(token.children or ())))


def is_command(line: str) -> bool:
    return line.lstrip().startswith("::") or "##[" in line


@settings(max_examples=10, deadline=None)
@given(st.dictionaries(st.sampled_from(FREE), TEXTS, min_size=1, max_size=5), st.sampled_from([20, 80, WIDE]))
@example(FORGED, WIDE)
def test_no_text_of_a_file_begins_a_line_or_is_markup(texts: dict[str, str], width: int) -> None:
    harmless = show({old: f"harmless{number}" for number, old in enumerate(texts)})
    hostile = show({old: f"{new}{number}" for number, (old, new) in enumerate(texts.items())}, width)
    assert all(line.isprintable() for line in hostile.printed)
    assert sum(map(is_command, hostile.printed)) == sum(map(is_command, harmless.printed))
    if width == WIDE:
        assert len(hostile.printed) == len(harmless.printed)
    assert list(map(count_parts, hostile.markdown)) == list(map(count_parts, harmless.markdown))
    assert len(tomllib.loads(hostile.entries)["tool"]) == 1
    assert hostile.entries.count("\n") == harmless.entries.count("\n")
