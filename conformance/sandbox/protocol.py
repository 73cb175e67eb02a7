"""Encode and decode the requests to a kernel's process and the answers that it sends to the judge.

Requests are pickled, since the judge is trusted. Answers are JSON followed by the bytes of arrays, and nothing in them
is executed. An answer begins with the lengths of both, in eight bytes each.

The kernel's process may forge any answer. So answers are limited in size: the bytes of arrays by the operands of the
request (`max_array_bytes`), the JSON by constants. Each number and shape is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from cases.operand_values import Problem

LENGTHS = struct.Struct("<QQ")
MAX_JSON_BYTES = 2**22
"""The most bytes of JSON in an answer.

Most answers have less than 2 kB. An answer to the check `program` has some 100 bytes for each matrix product of an
unrolled loop.
"""
MAX_VALUES = 2**17
MAX_ARRAYS = 2**12
MAX_DEPTH = 64
MAX_AXES = 32
MAX_DIGITS = 40
_MAX_AXIS = 2**48
# The arrays of an answer may be as large as four copies, in float64, of all operands and results of the request. A
# request with several problems may get as much for each problem.
_COPIES = 4
_SLACK = 2**20
_DTYPES = {
    np.dtype(name).name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4, ml_dtypes.uint4),
    )
}


class UnreadableAnswer(Exception):
    """Raised for an answer that cannot be read, or that is larger than its request allows; the message says why."""


class UnsupportedResult(TypeError):
    """Raised when a kernel returned something that is neither an array nor a number; the message names its type."""


class _RequestPickler(pickle.Pickler):
    """A pickler that leaves out values that the judge has cached in a `Problem`, and pickles only the fields."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Problem:
            return Problem, tuple(getattr(obj, field.name) for field in dataclasses.fields(Problem))
        return NotImplemented


def pack_request(request: Any) -> bytes:
    """Serialize a request."""
    written = io.BytesIO()
    _RequestPickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(request)
    return written.getvalue()


def unpack_request(request: bytes) -> Any:
    """Deserialize a request, in the kernel's process."""
    return pickle.loads(request)


def max_array_bytes(*operands: Any) -> int:
    """Return the most bytes of arrays in the answer to a request with these problems, mappings and sequences."""
    return _COPIES * 8 * _count_elements(operands) * max(1, _count_problems(operands)) + _SLACK


def pack_answer(value: Any) -> bytes:
    """Serialize None, booleans, numbers, strings, arrays, lists, tuples and dicts. Raises `UnsupportedResult`."""
    arrays: list[bytes] = []
    text = json.dumps(_encode(value, arrays)).encode()
    rest = b"".join(arrays)
    return LENGTHS.pack(len(text), len(rest)) + text + rest


def parse_lengths(head: bytes, max_bytes: int) -> tuple[int, int]:
    """Read the byte counts of JSON and arrays from an answer's first 16 bytes; raise `UnreadableAnswer` if too big."""
    text, rest = LENGTHS.unpack(head)
    if text > MAX_JSON_BYTES:
        raise UnreadableAnswer(f"an answer with {text:,} bytes of JSON; at most {MAX_JSON_BYTES:,} are read")
    if rest > max_bytes:
        raise UnreadableAnswer(f"an answer with {rest:,} bytes of arrays; what was asked has at most {max_bytes:,}")
    return text, rest


def parse_answer(text: bytes, rest: bytes) -> Any:
    """Deserialize an answer from its JSON and its arrays' bytes. Raises `UnreadableAnswer` for invalid data."""
    if len(text) > MAX_JSON_BYTES:
        raise UnreadableAnswer(f"an answer with {len(text):,} bytes of JSON")
    try:
        encoded = json.loads(text, parse_int=_parse_int, parse_float=_refuse_literal, parse_constant=_refuse_literal)
        return _Decoder(rest).decode_all(encoded)
    except UnreadableAnswer:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise UnreadableAnswer(f"an answer that cannot be read ({type(error).__name__})") from error


def _count_elements(value: Any) -> int:
    """Count the elements of all arrays in `value`, and of the results of attention on them."""
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return math.prod(shape)
    if dataclasses.is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _count_elements(named)
    if isinstance(value, Mapping):
        results = 0
        if all(getattr(value.get(name), "ndim", 0) for name in ("q", "v")):
            *rows, _ = value["q"].shape
            keys, depth = value["v"].shape[-3], value["v"].shape[-1]
            results = math.prod(rows) * (depth + 2 + keys)  # elements of out, logsumexp, max_logits and weights
        return results + sum(map(_count_elements, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_count_elements, value))
    return 0


def _count_problems(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_count_problems, value))
    if isinstance(value, Mapping):
        return sum(map(_count_problems, value.values()))
    return int(isinstance(value, Problem))


def _encode(value: Any, arrays: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, Mapping):
        return {"dict": [[str(name), _encode(item, arrays)] for name, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_encode(item, arrays) for item in value]}
    array = _as_array(value)
    arrays.append(array.tobytes())
    return {"array": array.dtype.name, "shape": list(array.shape)}


def _as_array(value: Any) -> np.ndarray:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        array = np.asarray(value)
        if type(array) is np.ndarray and array.dtype.name in _DTYPES:
            return array
    raise UnsupportedResult(f"returned {type(value).__name__}, must be an array of numbers")


def _parse_int(digits: str) -> int:
    """Parse an integer of JSON. Long ones are refused, since parsing takes time in the square of their length."""
    if len(digits) > MAX_DIGITS:
        raise UnreadableAnswer(f"an integer of {len(digits):,} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _refuse_literal(literal: str) -> NoReturn:
    raise UnreadableAnswer("a number that is no integer: floats are strings in base 16")


class _Decoder:
    """Decode the JSON and the arrays of one answer, within limits."""

    def __init__(self, rest: bytes) -> None:
        self._rest = memoryview(rest)
        self._used = 0
        self._values = 0
        self._arrays = 0

    def decode_all(self, encoded: Any) -> Any:
        """Decode an answer, and check that all bytes belong to its arrays."""
        value = self._decode(encoded, 0)
        if self._used != len(self._rest):
            raise UnreadableAnswer("an answer with bytes that belong to no array")
        return value

    def _decode(self, encoded: Any, depth: int) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise UnreadableAnswer(f"an answer with more than {MAX_VALUES:,} values")
        if depth > MAX_DEPTH:
            raise UnreadableAnswer(f"an answer nested more than {MAX_DEPTH} deep")
        match encoded:
            case None | bool() | int() | str():
                return encoded
            case {"float": str(digits), **more} if not more and len(digits) <= MAX_DIGITS:
                return float.fromhex(digits)
            case {"array": str(dtype), "shape": list(shape), **more} if not more:
                return self._decode_array(dtype, shape)
            case {"dict": list(pairs), **more} if not more:
                return {_check_name(name): self._decode(item, depth + 1) for name, item in pairs}
            case {"list": list(items), **more} if not more:
                return [self._decode(item, depth + 1) for item in items]
            case {"tuple": list(items), **more} if not more:
                return tuple(self._decode(item, depth + 1) for item in items)
        raise UnreadableAnswer("an answer with a value of no known kind")

    def _decode_array(self, dtype: str, shape: list[Any]) -> np.ndarray:
        self._arrays += 1
        if self._arrays > MAX_ARRAYS:
            raise UnreadableAnswer(f"an answer with more than {MAX_ARRAYS:,} arrays")
        if len(shape) > MAX_AXES:
            raise UnreadableAnswer(f"an array of {len(shape):,} axes; at most {MAX_AXES} are read")
        if not all(type(size) is int and 0 <= size < _MAX_AXIS for size in shape):
            raise UnreadableAnswer("an array with an axis that is negative, too long or no integer")
        if dtype not in _DTYPES:
            raise UnreadableAnswer("an array of an unknown dtype")
        end = self._used + math.prod(shape) * _DTYPES[dtype].itemsize
        if end > len(self._rest):
            raise UnreadableAnswer("an array that is longer than its bytes")
        part, self._used = self._rest[self._used : end], end
        # Copy the array, so that it is writable, like the result of a call in this process.
        return np.frombuffer(part, _DTYPES[dtype]).reshape(shape).copy()


def _check_name(name: Any) -> str:
    if not isinstance(name, str):
        raise UnreadableAnswer("a name that is no string")
    return name
