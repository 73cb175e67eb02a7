"""Describe an exception of a kernel in one line.

A description has the exception's type, the first line of its message, and a place: a line of the user's own code. The
place is the innermost frame outside of JAX, NumPy, Python's library and this project. It is searched in three texts:
the traceback, the tracebacks of chained exceptions (JAX moves frames there), and JAX's report of a failed host
callback, which holds a traceback as text.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import linecache
import re
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reports.printable_text import make_printable

_MAX_MESSAGE = 2000
_MAX_SOURCE_LINE = 160
_OWN_PACKAGES = ("conformance", "cases", "reports")
_LIBRARIES = (
    "jax",
    "jaxlib",
    "numpy",
    "ml_dtypes",
    "opt_einsum",
    "scipy",
    "absl",
    "jaxtyping",
    "beartype",
    "typeguard",
    "pytest",
    "_pytest",
    "pluggy",
)
# JAX's error for a failed host callback has the original traceback in its text: frames, then the exception.
_TRACEBACK_HEADER = "Traceback (most recent call last):"
_FRAME_PATTERN = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_RAISED_PATTERN = re.compile(r"^(?P<raised>[A-Za-z_][\w.]*(?:: .*)?)$", re.MULTILINE)
# The parts of a place as `describe_kernel_error` writes it at the end of its text: ` (kernel.py:12`.
_BRACKET_PATTERN = re.compile(r" \(")
_PLACE_PATTERN = re.compile(r"(?P<file>[^:]+):(?P<line>\d{1,9})\b")
# What JAX raises for a precision of f32 operands that the platform lacks, as XLA:CPU does (jax 0.10.2 to 0.12).
_REFUSED_PRECISION = re.compile(
    r"The precision '(?:TF32_TF32_F32\w*|BF16_BF16_F32_X9)' is not supported by dot_general on \w+"
)
_REMOTE_MESSAGE = "_told_elsewhere"
_HINT = "_conformance_hint"
_NO_MESSAGE = "its message cannot be had"


class WrongReturn(TypeError):
    """The call returned a wrong value; the message says what it must return, and what it returned."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the user's code: the path of the file and the number of the line."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return text such as `kernel.py:12: out = q @ k`; a path inside the current folder is relative."""
        source = linecache.getline(self.file, self.line).strip()
        if len(source) > _MAX_SOURCE_LINE:
            source = f"{source[:_MAX_SOURCE_LINE]} …"
        return f"{_shorten_path(self.file)}:{self.line}" + (f": {source}" if source else "")


def set_remote_message(error: BaseException, words: str) -> None:
    """Set the description of an error that was raised in another process, for `describe_kernel_error`."""
    vars(error)[_REMOTE_MESSAGE] = words


def add_hint(error: BaseException, hint: str) -> None:
    """Add a hint at what the user may declare or change, which stands after the message in descriptions."""
    vars(error)[_HINT] = hint


def describe_kernel_error(error: BaseException) -> str:
    """Describe an exception in one line: type, first line of the message, and the place in the user's code.

    Records have this text as their reason. For an exception of a host callback, it is that of the callback.
    """
    if (elsewhere := vars(error).get(_REMOTE_MESSAGE)) is not None:
        return make_printable(str(elsewhere))
    within = _find_callback_error(error)
    words = within or (
        _get_message(error) if isinstance(error, WrongReturn) else f"{type(error).__name__}: {_get_message(error)}"
    )
    if hint := vars(error).get(_HINT):
        words = f"{words}; {hint}"
    place = find_place(error)
    return make_printable(words if place is None else f"{words} ({place})")


def describe_refusal(error: NotImplementedError) -> str:
    """Return the first line of the message with which a kernel refuses a case; "" if there is none."""
    return make_printable(_get_message(error, ""))


def is_refused_precision(error: BaseException) -> bool:
    """Return whether JAX refuses a product, since this platform does not offer the precision that it requests."""
    return isinstance(error, ValueError) and _REFUSED_PRECISION.match(_get_message(error)) is not None


def find_place(error: BaseException) -> Place | None:
    """Find the innermost line of the user's code in the traceback of an error; None if there is none."""
    linecache.checkcache()  # a file may have been changed since it was last read
    for one in _iter_causes(error):
        frames = [*_iter_frames(one.__traceback__), *_iter_callback_frames(one)]
        for place in reversed(frames):
            if _is_user_code(place.file):
                return place
    return None


def parse_place(words: str) -> Place | None:
    """Parse the place from a text of `describe_kernel_error`; None if it has none or the file's line has changed."""
    linecache.checkcache()
    for bracket in _BRACKET_PATTERN.finditer(words):
        if (found := _PLACE_PATTERN.match(words, bracket.end())) is None:
            continue
        place = Place(found["file"], int(found["line"]))
        # The text of a message may look like a place: compare it with the line of the file.
        if Path(place.file).is_file() and words.startswith(make_printable(f"{place})"), bracket.end()):
            return place
    return None


def _get_message(error: BaseException, otherwise: str = "no message") -> str:
    """Return the first line of an exception's message; `otherwise` if it is empty, fixed text if `__str__` raises."""
    try:
        text = str(error)
    except BaseException as failed:  # the user's `__str__` may raise anything, and must not end the judge
        if isinstance(failed, KeyboardInterrupt):
            raise
        return _NO_MESSAGE
    lines = [line.strip() for line in text[: 10 * _MAX_MESSAGE].splitlines() if line.strip()]
    if type(error).__module__.partition(".")[0] == "jaxtyping":  # which argument is wrong stands in later lines
        facts = {name: value.strip(" .") for name, _, value in (line.partition(":") for line in lines)}
        what = next((line.rpartition(" typechecking ")[2] for line in lines if " typechecking " in line), "a value")
        if "Actual value" in facts:
            expected = facts.get("Expected type", "another").removeprefix("<class '").removesuffix("'>")
            lines = [f"{what.strip('.')} is {facts['Actual value']}, must be {expected}"]
    first = lines[0] if lines else otherwise
    return first if len(first) <= _MAX_MESSAGE else f"{first[:_MAX_MESSAGE]} …"


def _get_full_message(error: BaseException) -> str:
    """Return all lines of an exception's message; "" if its `__str__` raises."""
    return "" if _get_message(error) == _NO_MESSAGE else str(error)


def _find_callback_error(error: BaseException) -> str | None:
    """Return the type and message of a host callback's exception if `error` is JAX's report of one; else None."""
    text = _get_full_message(error)
    if _TRACEBACK_HEADER not in text:
        return None
    found = [
        match["raised"] for match in _RAISED_PATTERN.finditer(text.rpartition(_TRACEBACK_HEADER)[2]) if match["raised"]
    ]
    return found[0] if found else None


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its cause or context, the cause of that, and so on."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _iter_frames(trace: types.TracebackType | None) -> Iterator[Place]:
    while trace is not None:
        yield Place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next


def _iter_callback_frames(error: BaseException) -> Iterator[Place]:
    """Yield the frames in the text of JAX's report of a failed host callback."""
    text = _get_full_message(error)
    if _TRACEBACK_HEADER in text:
        yield from (Place(match["file"], int(match["line"])) for match in _FRAME_PATTERN.finditer(text))


@functools.lru_cache(1000)
def _is_user_code(file: str) -> bool:
    if file.startswith("<"):  # code without a file, such as `<string>`, mostly comes from a library
        return False
    path = Path(file)
    if any(path.is_relative_to(folder) for folder in _find_library_folders()):
        return False
    # The folder of installed packages may be inside the folder of Python's own library.
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(installed) or not path.is_relative_to(sysconfig.get_path("stdlib"))


@functools.cache
def _find_library_folders() -> tuple[Path, ...]:
    """Find the folders of this project, of JAX and NumPy, and of the libraries that they call."""
    specs = filter(None, map(_find_spec, (*_OWN_PACKAGES, *_LIBRARIES)))
    return tuple(Path(folder) for spec in specs for folder in spec.submodule_search_locations or ())


def _find_spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # not installed, or a module of this name without a specification
        return None


def _shorten_path(file: str) -> str:
    """Return the path relative to the current folder if the file is inside it, else the path as it is."""
    path = Path(file)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (OSError, ValueError):
        return file
