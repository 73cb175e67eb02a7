"""What a kernel's process answers is data: what it may say arrives as it was said, and nothing else is believed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.case import Case
from cases.inputs import draw
from conformance.sandbox import protocol

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_, ml_dtypes.float8_e4m3fn, np.complex64)


def sent(value: Any) -> Any:
    """`value` after it has crossed."""
    message = protocol.pack_answer(value)
    words, rest = protocol.parse_lengths(message[: protocol.LENGTHS.size], 2**30)
    body = message[protocol.LENGTHS.size :]
    assert len(body) == words + rest
    return protocol.parse_answer(body[:words], body[words:])


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nested = st.recursive(
    plain, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
)


@given(nested)
def test_numbers_and_words_arrive_as_they_were(value: Any) -> None:
    assert sent(value) == value


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=4), st.binary(min_size=648, max_size=648))
def test_arrays_arrive_to_the_bit(dtype: Any, shape: list[int], drawn: bytes) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = np.frombuffer(drawn[:size], dtype).reshape(shape)
    ((found, same),) = [sent((array, [array]))]
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == same[0].tobytes() == array.tobytes()


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_whatever_else_comes_is_unreadable_and_no_more(words: bytes, rest: bytes) -> None:
    try:
        found = protocol.parse_answer(words, rest)
    except protocol.UnreadableAnswer:
        return
    assert sent(found) == found


@pytest.mark.parametrize(
    "words",
    [
        b'{"array": "object", "shape": [1]}',
        b'{"array": "float32", "shape": [-1]}',
        b'{"array": "float32", "shape": [1e9]}',
        b'{"array": "float32", "shape": [9999999999, 9999999999]}',
        b'{"list": 3}',
        b"[" * 100_000,
        b'{"float": "nothing"}',
    ],
)
def test_arrays_that_are_none_are_unreadable(words: bytes) -> None:
    with pytest.raises(protocol.UnreadableAnswer):
        protocol.parse_answer(words, b"\0" * 4)


def test_a_message_of_terabytes_is_not_waited_for() -> None:
    with pytest.raises(protocol.UnreadableAnswer):
        protocol.parse_lengths(protocol.LENGTHS.pack(10, 2**42), 2**30)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), lambda: 0])
def test_what_is_no_data_is_refused_where_it_is_made(value: Any) -> None:
    with pytest.raises(protocol.UnsupportedResult, match="must be an array of numbers"):
        protocol.pack_answer({"out": value})


def test_a_request_has_the_operands_and_not_what_the_judge_found_out() -> None:
    problem = draw(Case(mask="dense-d40"))
    before = protocol.pack_request(problem)
    assert problem.allowed.any()
    assert problem.empty_rows.any() in (True, False)
    assert protocol.pack_request(problem) == before
    assert not vars(protocol.unpack_request(before)).keys() - set(problem.__dataclass_fields__)
