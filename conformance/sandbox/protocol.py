"""What crosses between the judge and a kernel's process.

Requests are pickled: the judge is trusted. Answers are not: they are JSON, with the bytes of arrays behind it, and
nothing in them is executed. A message is two lengths of eight bytes, then the JSON, then the bytes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from cases.inputs import Problem

LENGTHS = struct.Struct("<QQ")
_MOST_WORDS = 2**24
_MOST_BYTES = 2**32
_DTYPES = {
    np.dtype(name).name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4, ml_dtypes.uint4),
    )
}


class UnreadableAnswer(Exception):  # noqa: N818 -- a statement, as the message is
    """An answer that is none; the message says why."""


class UnsupportedResult(TypeError):  # noqa: N818 -- a statement, as the message is
    """A kernel returned something that is no array and no number; the message says what."""


class _Requests(pickle.Pickler):
    """Leaves behind what the judge has found out of a problem and keeps with it."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Problem:
            return Problem, tuple(getattr(obj, field.name) for field in dataclasses.fields(Problem))
        return NotImplemented


def pack_request(request: Any) -> bytes:
    """A request as bytes."""
    written = io.BytesIO()
    _Requests(written, protocol=pickle.HIGHEST_PROTOCOL).dump(request)
    return written.getvalue()


def unpack_request(request: bytes) -> Any:
    """A request from its bytes, in the kernel's process."""
    return pickle.loads(request)


def pack_answer(value: Any) -> bytes:
    """A message with `value` in it: None, booleans, numbers, words, arrays, and lists, tuples and dicts of such.

    Raises:
      UnsupportedResult: for anything else.
    """
    arrays: list[bytes] = []
    words = json.dumps(_encoded(value, arrays)).encode()
    rest = b"".join(arrays)
    return LENGTHS.pack(len(words), len(rest)) + words + rest


def parse_lengths(head: bytes) -> tuple[int, int]:
    """The lengths of the two parts of a message. Raises `UnreadableAnswer` for more than any answer has."""
    words, rest = LENGTHS.unpack(head)
    if words > _MOST_WORDS or rest > _MOST_BYTES:
        raise UnreadableAnswer(f"an answer of {words + rest:,} bytes")
    return words, rest


def parse_answer(words: bytes, rest: bytes) -> Any:
    """What a message says. Raises `UnreadableAnswer` for what `answer` would not have written."""
    try:
        text = json.loads(words)
        found, used = _decoded(text, rest, 0)
    except UnreadableAnswer:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise UnreadableAnswer(f"an answer that cannot be read ({type(error).__name__})") from error
    if used != len(rest):
        raise UnreadableAnswer("an answer with bytes that belong to no array")
    return found


def _encoded(value: Any, arrays: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, Mapping):
        return {"dict": [[str(name), _encoded(item, arrays)] for name, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_encoded(item, arrays) for item in value]}
    array = _array(value)
    arrays.append(array.tobytes())
    return {"array": array.dtype.name, "shape": list(array.shape)}


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        array = np.asarray(value)
        if type(array) is np.ndarray and array.dtype.name in _DTYPES:
            return array
    raise UnsupportedResult(f"returned {type(value).__name__}, must be an array of numbers")


def _decoded(text: Any, rest: bytes, at: int) -> tuple[Any, int]:
    if text is None or isinstance(text, bool | int | str):
        return text, at
    if not (isinstance(text, dict) and text):
        raise UnreadableAnswer("an answer with something in it that nobody writes")
    if "float" in text:
        return float.fromhex(text["float"]), at
    if "array" in text:
        return _read_array(text["array"], text["shape"], rest, at)
    if "dict" in text:
        pairs = {}
        for name, item in text["dict"]:
            pairs[str(name)], at = _decoded(item, rest, at)
        return pairs, at
    found = []
    for item in text["list"] if "list" in text else text["tuple"]:
        one, at = _decoded(item, rest, at)
        found.append(one)
    return (found if "list" in text else tuple(found)), at


def _read_array(name: str, shape: list[int], rest: bytes, at: int) -> tuple[np.ndarray, int]:
    dtype = _DTYPES[name]
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise UnreadableAnswer(f"an array of shape {shape}")
    end = at + math.prod(shape) * dtype.itemsize
    if end > len(rest):
        raise UnreadableAnswer("an array that is longer than its bytes")
    # A copy: results can be written to, as those of a call in this process can.
    return np.frombuffer(rest[at:end], dtype).reshape(shape).copy(), end
