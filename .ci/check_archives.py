"""Check what the built archives hold: `python check_archives.py SOURCE.tar.gz WHEEL WHEEL_OF_THE_CLONE CLONE`.

`python -m build` builds the first wheel from the source archive. The second wheel is built from the clone. Each problem
is printed on a line of its own, and the exit code is 1 if there is any.
"""

from __future__ import annotations

import collections
import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

PACKAGES = {"cases", "conformance", "impls", "reports"}
NEEDED_IN_WHEEL = {
    *(f"{package}/py.typed" for package in PACKAGES),
    "conformance/__init__.pyi",
    "conformance/sensitivity/detection_table.json",
    "conformance/sensitivity/error_profiles.json",
    "conformance/truth/calibration.json",
}
# As pyproject.toml says: a picture is left out, and a file is at the top level.
NOT_IN_WHEEL = {"reports/report.png", "conformance/attention_conformance.py"}
TOP_LEVEL = {"attention_conformance.py"}
NEEDED_IN_SOURCE = {"pyproject.toml", "mkdocs.yml", "README.md", "LICENSE", "conftest.py"}
FOLDERS_IN_SOURCE = {*PACKAGES, "tests", "docs", "website", "findings", "changelog.d", ".ci", ".github"}


def read_wheel(file: str) -> dict[str, str]:
    """Return the digest of each file of a wheel by its path, without `RECORD`, which lists the others."""
    with zipfile.ZipFile(file) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if not name.endswith(("/", ".dist-info/RECORD"))
        }


def list_source(file: str) -> set[str]:
    """Return the paths of the files in a source archive, relative to its only folder."""
    with tarfile.open(file) as archive:
        return {str(PurePosixPath(*PurePosixPath(each.name).parts[1:])) for each in archive if each.isfile()}


def list_tracked(clone: str) -> set[str]:
    """Return the paths of the files that git tracks in the clone and that exist."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=clone, capture_output=True, text=True, check=True).stdout
    return {path for path in listed.split("\0") if path and Path(clone, path).is_file()}


def find_problems(source: str, wheel: str, wheel_of_clone: str, clone: str) -> list[str]:
    """Return a line for each problem of the archives."""
    built, of_clone = read_wheel(wheel), read_wheel(wheel_of_clone)
    packed, tracked = list_source(source), list_tracked(clone)
    problems = [
        f"{path} differs between the wheel of the source archive and that of the clone"
        for path in sorted({*built, *of_clone})
        if built.get(path) != of_clone.get(path)
    ]
    # Templates and data are whatever lies beside the code.
    wanted = {path for path in tracked if path.partition("/")[0] in PACKAGES} - NOT_IN_WHEEL | TOP_LEVEL
    problems += [f"the wheel lacks {path}" for path in sorted((wanted | NEEDED_IN_WHEEL) - set(built))]
    metadata = {path for path in built if ".dist-info/" in path}
    problems += [f"the wheel holds {path}, which git does not track" for path in sorted(set(built) - wanted - metadata)]
    wanted = {path for path in tracked if path.partition("/")[0] in FOLDERS_IN_SOURCE} | NEEDED_IN_SOURCE
    problems += [f"the source archive lacks {path}" for path in sorted(wanted - packed)]
    return problems


def describe_wheel(file: str) -> str:
    """Describe the top-level folders of a wheel, the number of their files and the size of the whole."""
    counts = collections.Counter(path.partition("/")[0] for path in read_wheel(file))
    folders = ", ".join(f"{name} ({count} files)" for name, count in sorted(counts.items()))
    return f"the wheel holds {folders}: {Path(file).stat().st_size / 2**20:.1f} MiB"


if __name__ == "__main__":
    found = find_problems(*sys.argv[1:])
    print(describe_wheel(sys.argv[2]))
    print("\n".join(found) or "the wheel of the source archive is that of the clone")
    sys.exit(1 if found else 0)
