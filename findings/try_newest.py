"""Run scripts of this folder with the newest release of the package that each is about, and print a table.

`python findings/try_newest.py [NAME ...]`: all scripts, or those named. A script is about the package that its line
`# Versions:` names first; all other pins stay as they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

FOLDER = Path(__file__).parent
TIMEOUT_S = 1800


def find_package(script: str) -> str:
    """Return the name of the package that a script is about."""
    named = re.search(r"^# Versions: (\S+)", script, re.MULTILINE)
    assert named, "no line `# Versions: PACKAGE VERSION`"
    return named[1]


def leave_off_pin(script: str, package: str) -> str:
    """Return the script without the pin of a package where it is installed."""
    lines = script.splitlines(keepends=True)
    return "".join(
        re.sub(rf"(?<=\s){re.escape(package)}==\S+", package, line) if "pip install" in line else line for line in lines
    )


def run_with_newest(path: Path) -> tuple[str, str]:
    """Return the installed release of a script's package, and whether what the script shows still holds."""
    script = path.read_text(encoding="utf-8")
    package = find_package(script)
    with tempfile.TemporaryDirectory() as folder:
        copy, log = Path(folder, path.name), Path(folder, "pip.log")
        copy.write_text(leave_off_pin(script, package), encoding="utf-8")
        try:
            done = subprocess.run(
                ["bash", str(copy)],
                cwd=folder,
                env={**os.environ, "PIP_LOG": str(log)},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return package, f"not finished in {TIMEOUT_S} s"
        installed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    releases = re.findall(rf"Successfully installed.*?\b{re.escape(package)}-(\d\S*)", installed)
    release = f"{package} {releases[-1]}" if releases else package
    if not releases:
        return release, "not installed: " + (done.stderr.strip().splitlines() or ["?"])[-1]
    if done.returncode == 0:
        return release, "holds"
    seen = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()[:-1] or ["nothing printed"]
    return release, f"changed: `{seen[-1][:120]}`"


def main(names: list[str]) -> int:
    """Print one row for each script, and return 1 if any held when `newest.md` was made and does no more."""
    paths = [FOLDER / f"{name}.sh" for name in names] or sorted(FOLDER.glob("*.sh"))
    before = (FOLDER / "newest.md").read_text(encoding="utf-8").splitlines()
    held = {row.split("]")[0].removeprefix("| [") for row in before if "| holds |" in row}
    print("| script | newest release | what it shows | tried |\n|---|---|---|---|", flush=True)
    news = False
    for path in paths:
        release, result = run_with_newest(path)
        news |= result != "holds" and path.stem in held
        print(f"| [{path.stem}]({path.name}) | {release} | {result} | {datetime.now(UTC):%Y-%m-%d} |", flush=True)
    return int(news)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
