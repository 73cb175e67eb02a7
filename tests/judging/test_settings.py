"""Test that misspelt settings are refused, and that expected failures which stop failing are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.judging import settings
from conformance.judging.settings import ExpectedFailure, Settings, SettingsError
from reports.records import ERROR, EXPECTED_FAIL, FAIL, PASS, UNEXPECTED_PASS, UNJUDGED, UNSUPPORTED, Record

JAX = "0.10.2"


def load_text(folder: Path, text: str) -> Settings:
    (folder / "pyproject.toml").write_text(text)
    return settings.load_settings(folder)


def write_table(text: str) -> str:
    return f"[tool.attention_conformance]\n{text}\n"


def write_entry(text: str) -> str:
    return f"[[tool.attention_conformance.expected_failures]]\n{text}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool", "is not TOML"),
        ("[tool]\nattention_conformance = 3", "the table must be a table, got 3"),
        (
            write_table("implementatons = []"),
            "unknown keys ['implementatons'], known are ['expected_failure_files'",
        ),
        (write_table('implementations = "x"'), "implementations must be a list of names, got 'x'"),
        (write_table("implementations = [1]"), "implementations must be a list of names, got [1]"),
        (write_table("tolerances = 4"), "tolerances must be a table"),
        (write_table('tolerances = {"bf17.out" = 4}'), "tolerance 'bf17.out' is not dtype.observable"),
        (write_table('tolerances = {"bf16.uot" = 4}'), "tolerance 'bf16.uot' is not dtype.observable"),
        (write_table("tolerances = {bf16.out = 4}"), 'must be written in quotes, as "bf16.out" = 5.0'),
        (write_table('tolerances = {"bf16.out" = "4"}'), "must be a finite number, got '4'"),
        (write_table('tolerances = {"bf16.out" = true}'), "must be a finite number, got True"),
        (write_table('tolerances = {"bf16.out" = inf}'), "must be a finite number, got inf"),
        (write_table('tolerances = {"bf16.out" = nan}'), "must be a finite number, got nan"),
        (write_table('tolerances = {"bf16.out" = 0}'), "must be positive"),
        (write_table("groups = 3"), "groups must be a table of lists of names, got 3"),
        (write_table('groups = {upstream = "a"}'), "the group 'upstream' must be a list of names, got 'a'"),
        (write_table('groups = {"kernel.py:attention" = ["dot_product"]}'), "has the name of an implementation"),
        (write_table('groups = {dot_product = ["block_flash"]}'), "has the name of an implementation"),
        (write_table("expected_failures = 3"), "expected_failures must be a list of tables"),
        (write_table("expected_failures = [3]"), "an expected failure must be a table, got 3"),
        (write_entry('implementation = "x"'), "an expected failure needs 'reason'"),
        (write_entry('implementation = "x"\nreason = " "'), "an expected failure needs a reason"),
        (write_entry('reason = "x"'), "an expected failure needs 'implementation'"),
        (write_entry('implementation = "x"\nreason = "y"\nchek = ["forward"]'), "unknown keys ['chek']"),
        (
            write_entry('implementation = "x"\nreason = "y"\ncheck = "forward"'),
            "check of an expected failure must be a list",
        ),
        (write_entry('implementation = "x"\nreason = "y"\nsome = "yes"'), "must be true or false, got 'yes'"),
        (write_entry('implementation = "x"\nreason = 3'), "reason of an expected failure must be a string, got 3"),
        (write_entry('implementation = "x"\nreason = "y"\njax = "new"'), "is not a version range"),
        (
            write_entry('implementation = "x"\nreason = "y"\nplatform = "cuda"'),
            "must be one of cpu, cpu-interpret, gpu, tpu",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_text(tmp_path, text)
    assert message in str(caught.value)
    assert "pyproject.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_are_those_of_the_nearest_file_above(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(write_table('implementations = ["a"]\ntolerances = {"bf16.out" = 5}'))
    below = tmp_path / "one" / "two"
    below.mkdir(parents=True)
    found = settings.load_settings(below)
    assert found.implementations == ("a",)
    limit = found.tolerances.limit("bf16", "out")
    assert (limit.ratio, limit.source) == (5.0, "pyproject.toml")


def test_a_group_stands_for_its_members_and_each_is_judged_once(tmp_path: Path) -> None:
    found = load_text(tmp_path, write_table('groups = {mine = ["a", "b"]}'))
    assert found.resolve_groups(["b", "mine", "c.py:mine"]) == ["b", "a", "c.py:mine"]


def test_a_file_without_the_table_means_the_defaults(tmp_path: Path) -> None:
    assert load_text(tmp_path, "[project]\nname = 'x'\n") == Settings()


def build_record(verdict: str, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "implementation": "kernel",
        "platform": "cpu",
        "case": "train/f32/x",
        "check": "gradients",
    }
    return Record(**{**values, "observable": "dv", "verdict": verdict, **changes})


def build_settings(**fields: object) -> Settings:
    return Settings(expected_failures=(ExpectedFailure(implementation="kernel", reason="known", **fields),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "some", "after"),
    [
        (FAIL, False, EXPECTED_FAIL),
        (ERROR, False, EXPECTED_FAIL),
        (PASS, False, UNEXPECTED_PASS),
        (PASS, True, PASS),
        (FAIL, True, EXPECTED_FAIL),
        (UNSUPPORTED, False, UNSUPPORTED),
    ],
)
def test_what_becomes_of_an_expected_failure(before: str, some: bool, after: str) -> None:
    assert build_settings(some=some).mark_expected_failures(build_record(before), JAX).verdict == after


@pytest.mark.parametrize(
    "fields",
    [
        {"case": "decode"},
        {"check": ["forward"]},
        {"observable": ["dq"]},
        {"jax": ">=0.11"},
        {"platform": "gpu"},
        {"package": "numpy<1"},
        {"package": "no-such-package"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_an_entry_is_not_about_stays_a_failure(fields: dict[str, object]) -> None:
    assert build_settings(**fields).mark_expected_failures(build_record(FAIL), JAX).verdict == FAIL


def test_patterns_and_version_ranges_match() -> None:
    chosen = build_settings(case="train/*", check=["grad*"], observable=["d?"], jax=">=0.10", package="numpy>=1")
    assert chosen.mark_expected_failures(build_record(FAIL), JAX).verdict == EXPECTED_FAIL
    assert chosen.mark_expected_failures(build_record(FAIL), "0.12.0.1").verdict == EXPECTED_FAIL


def test_the_finding_of_an_entry_is_named_in_the_reason() -> None:
    chosen = build_settings(finding="kernel-no-mask")
    assert "finding kernel-no-mask: known" in chosen.mark_expected_failures(build_record(FAIL), JAX).reason


def test_an_entry_that_nothing_fails_for_is_stale_and_red() -> None:
    (stale,) = build_settings(some=True).find_stale_entries([build_record(PASS)], JAX)
    assert stale.verdict == UNEXPECTED_PASS
    assert "nothing failed that pyproject.toml expects to fail: known" in stale.reason


def test_an_entry_is_not_stale_where_it_fails_was_not_judged_or_is_about_another_version() -> None:
    assert not build_settings().find_stale_entries(
        [build_settings().mark_expected_failures(build_record(FAIL), JAX)], JAX
    )
    assert not build_settings().find_stale_entries([build_record(PASS, implementation="other")], JAX)
    assert not build_settings(jax=">=0.11").find_stale_entries([build_record(PASS)], JAX)
    assert not build_settings(platform="gpu").find_stale_entries([build_record(PASS, platform="cpu")], JAX)
    assert build_settings(platform="gpu").find_stale_entries([build_record(PASS, platform="gpu")], JAX)
    assert not build_settings().find_stale_entries([build_record(UNJUDGED, check="hardware")], JAX)


FILE = 'library = "x"\nlink = "https://example.org"\nversions = ["x 1"]\n'
LISTED = '[[expected_failures]]\nimplementation = "a"\nreason = "known"\n'


def load_file(folder: Path, text: str, pattern: str = "known/*.toml") -> Settings:
    (folder / "known").mkdir()
    (folder / "known" / "x.toml").write_text(text)
    return load_text(folder, write_table(f'expected_failure_files = ["{pattern}"]'))


def test_expected_failures_are_read_from_files_too(tmp_path: Path) -> None:
    (found,) = load_file(tmp_path, FILE + LISTED).expected_failures
    assert (found.implementation, found.reason) == ("a", "known")


@pytest.mark.parametrize(
    ("text", "pattern", "named"),
    [
        (FILE + LISTED, "none/*.toml", ["none/*.toml"]),
        (FILE + LISTED, "/known/x.toml", ["relative", "/known/x.toml"]),
        ("[x", "known/*.toml", ["x.toml"]),
        (LISTED, "known/*.toml", ["x.toml", "library"]),
        (FILE + LISTED.replace("reason", "reasn"), "known/*.toml", ["x.toml", "reasn"]),
        (FILE.replace("versions", "version") + LISTED, "known/*.toml", ["x.toml", "version"]),
    ],
)
def test_a_file_of_expected_failures_that_cannot_be_used_is_named(
    text: str, pattern: str, named: list[str], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_file(tmp_path, text, pattern)
    assert all(name in str(caught.value) for name in named)


def test_this_project_lists_what_upstream_kernels_do_wrong() -> None:
    found = settings.load_settings(Path(__file__).parent).expected_failures
    assert {"jax_nn_xla", "tokamax_splash_tpu"} <= {entry.implementation for entry in found}
