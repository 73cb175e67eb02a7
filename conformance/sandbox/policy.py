"""Decide which files a sandboxed kernel may read.

A kernel needs its own source tree, the interpreter, installed packages, system libraries and its devices. It does not
need the rest of the user's home. `confinement` enforces this; `fork_server.visible_environment` decides which
environment variables a kernel gets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from conformance import packages
from conformance.execution import implementation_registry

_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/gnu/store", "/sys")
# Entries of /etc that libraries read. Other entries may hold keys and passwords, which a judge that runs as root could
# read.
_ETC_ENTRIES_TEXT = """
ld.so.cache ld.so.conf ld.so.conf.d ld.so.preload localtime timezone locale.alias locale.conf passwd group
nsswitch.conf os-release debian_version alternatives mime.types magic fonts ssl/openssl.cnf machine-id OpenCL
vulkan nvidia cuda
"""
_ETC_ENTRIES = tuple(_ETC_ENTRIES_TEXT.split())
# Readable entries of /proc: they describe the machine, or the process itself.
_PROC_ENTRIES_TEXT = """
self cpuinfo meminfo stat loadavg sys driver version filesystems devices modules
"""
_PROC_ENTRIES = tuple(_PROC_ENTRIES_TEXT.split())
# Environment variables that name folders of libraries, which kernels may read.
_LIBRARY_FOLDERS = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "ROCM_PATH", "CONDA_PREFIX")

# The judge and `python -m` each put the current folder first on the search path. The user did not request these
# entries, so up to two of them are ignored.
_MAX_IMPLICIT_ENTRIES = 2


@dataclasses.dataclass(frozen=True)
class SandboxPolicy:
    """The options of a command that concern the sandbox of its kernels."""

    read: tuple[str, ...] = ()  # more files and folders that kernels may read (`--sandbox-read`)
    variables: tuple[str, ...] = ()  # names of more environment variables that kernels get (`--sandbox-env`)
    # Files that kernels may not read, even in their source trees, since the command writes or compares them.
    hidden: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Return the command-line options that give this policy, without `hidden`."""
        return (
            *(f"--sandbox-read={path}" for path in self.read),
            *(f"--sandbox-env={name}" for name in self.variables),
        )


def build_policy(read: Sequence[str], variables: Sequence[str], hidden: Iterable[str]) -> SandboxPolicy:
    """Build a policy from the values of options. Raises `ValueError` for a path or a name that cannot be one."""
    for path in read:
        if not os.path.exists(path):  # not of the absolute path, since that of an empty path is the current folder
            raise ValueError(f"sandbox-read={path}: there is no such file or folder")
    for name in variables:
        if not name or "=" in name:
            raise ValueError(f"sandbox-env={name}: expected the name of an environment variable, without a value")
    return SandboxPolicy(tuple(map(os.path.abspath, read)), tuple(variables), tuple(map(os.path.abspath, hidden)))


def find_system_paths() -> Iterator[Path]:
    """Yield the paths that every kernel may read: interpreter, installed packages, system libraries, machine data."""
    yield from map(Path, _SYSTEM_FOLDERS)
    yield from (Path("/etc", name) for name in _ETC_ENTRIES)
    yield from (Path("/proc", name) for name in _PROC_ENTRIES)
    yield from _find_interpreter()
    for variable in _LIBRARY_FOLDERS:
        yield from (Path(folder) for folder in os.environ.get(variable, "").split(os.pathsep) if folder.startswith("/"))
    yield from (packages.HOME / name for name in packages.NAMES)
    yield from _list_mapped_libraries()


def _find_interpreter() -> set[Path]:
    """Return the folders of the interpreter, its library, and installed packages."""
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    libraries = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return {Path(folder) for folder in (*prefixes, *libraries, *site.getsitepackages(), site.getusersitepackages())}


def _list_mapped_libraries() -> Iterator[Path]:
    """Yield the files that are mapped into this process, such as libraries outside the usual folders."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            name = line.partition("/")[2]
            if name and not name.endswith("(deleted)"):
                yield Path("/", name)


def find_source_trees(name: str, search_path: Iterable[str]) -> list[Path]:
    """Return the folders from which a kernel may import its own modules.

    These are the folder of its file or package, and the folders of the module search path except those of the system.
    The current folder counts only if the kernel lies in it: a kernel from elsewhere need not read it.
    """
    here = Path.cwd()
    home = None
    with contextlib.suppress(OSError, ValueError):  # loading the kernel later raises a clearer error
        home = _find_home(name)
    folders = [Path(entry).absolute() for entry in search_path]
    for _ in range(_MAX_IMPLICIT_ENTRIES):
        if folders and folders[0] == here:
            folders.pop(0)
    if home is not None:
        folders = [home, *([here] if home.is_relative_to(here.resolve()) else []), *folders]
    system = [place.resolve() for place in _find_interpreter()]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder.is_dir() and not any(folder.resolve().is_relative_to(place) for place in system)
    ]


def _find_home(name: str) -> Path | None:
    """Return the folder that contains a kernel's file or package; None if it is unknown."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).resolve().parent
    point = None if place else implementation_registry.find_entry_point(name)
    library = implementation_registry.find_library_module(name)
    module = library or place or (point.module if point is not None else "")
    # A user's package that has the name of one of this project's packages is refused later.
    if module.partition(".")[0] in packages.NAMES:
        return Path.cwd()
    spec = None
    with contextlib.suppress(ImportError, ValueError):  # importing the kernel later raises the same error
        spec = importlib.util.find_spec(module.partition(".")[0]) if module else None
    locations = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    return Path(locations[0]).resolve().parent if locations and locations[0].startswith("/") else None


def find_readable_sources(tree: Path, hidden: Iterable[Path]) -> Iterator[Path]:
    """Yield the files and folders of a source tree that a kernel may read.

    These are what `find_readable_entries` yields. If the tree is or contains the user's home or a folder for temporary
    files, only its modules and packages are readable.
    """
    tree = tree.resolve()
    if not any(shared.is_relative_to(tree) for shared in _list_shared_folders()):
        yield from find_readable_entries(tree, hidden)
        return
    for entry in map(Path, _scan(str(tree))):
        path = entry.resolve()
        is_module = entry.suffix in (".py", ".so") or (path / "__init__.py").is_file()
        if is_module and path.is_relative_to(tree) and not any(map(is_unreadable, path.relative_to(tree).parts)):
            yield from find_readable_entries(path, hidden)


def find_readable_entries(place: Path, hidden: Iterable[Path]) -> Iterator[Path]:
    """Yield a file that a kernel may read, or the readable entries of a folder.

    At any depth, these are all entries except dot files (`.git`, `.env`, `.ssh`), links that lead out of the folder,
    the files `hidden`, and files of records (`*.jsonl`). The latter have seeds and verdicts. `place` itself may have
    such a name.
    """
    system = {str(folder.resolve()) for folder in _find_interpreter()}  # readable anyway, and large
    unreadable = {str(path.resolve()) for path in hidden}
    above = {str(folder) for path in unreadable for folder in Path(path).parents}

    def find(folder: str) -> tuple[list[str], bool]:
        """Return the readable entries of a folder, and whether a rule may allow the folder as a whole."""
        found, is_whole = [], folder not in above
        for entry in _scan(folder):
            if entry.is_symlink():  # what it leads to is found by itself, or lies outside
                continue
            if is_unreadable(entry.name) or entry.path in unreadable:
                is_whole = False
            elif not entry.is_dir() or entry.path in system or (below := find(entry.path))[1]:
                found.append(entry.path)
            else:
                found += below[0]
                is_whole = False
        return found, is_whole

    place = place.resolve()
    if place.is_dir():
        yield from map(Path, find(str(place))[0])
    elif str(place) not in unreadable:
        yield place


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def is_unreadable(name: str) -> bool:
    """Tell whether an entry of a folder is a dot file or a file of records."""
    return name.startswith(".") or name.endswith(".jsonl")


def _list_shared_folders() -> Iterator[Path]:
    """Yield folders that hold much more than one project: the user's home, and folders for temporary files."""
    with contextlib.suppress(RuntimeError):  # raised if the user's home is unknown
        yield Path.home().resolve()
    yield from {Path(folder).resolve() for folder in ("/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir())}
