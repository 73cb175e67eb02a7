"""Test the scripts of `findings`: their form by day, what they show at night."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from findings import try_newest
from tests.survey.finding_scripts import read_python

FOLDER = Path(try_newest.__file__).parent
SCRIPTS = sorted(FOLDER.glob("*.sh"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_it_shows_and_pins_what_it_is_about(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for part in ("# Versions: ", "# Guess: ", "# Output seen:\n#   "):
        assert f"\n{part}" in text
    python = read_python(path)
    assert "conformance" not in python
    compile(python, str(path), "exec")
    package = try_newest.find_package(text)
    assert f" {package}==" in text
    assert f" {package}==" not in try_newest.leave_off_pin(text, package)


def test_the_table_of_newest_releases_has_each_script_once() -> None:
    rows = re.findall(r"^\| \[(\S+)\]\(\1\.sh\) \|", (FOLDER / "newest.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [path.stem for path in SCRIPTS]


@pytest.mark.nightly
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_still_shows_what_it_says(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
