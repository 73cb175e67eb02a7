"""Test that answers of a kernel's process are data: valid ones arrive unchanged, all others are refused."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.case import Case
from cases.operand_values import draw_problem
from conformance.sandbox import protocol

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_, ml_dtypes.float8_e4m3fn, np.complex64)


def send_and_receive(value: Any) -> Any:
    """Return `value` after it was encoded and decoded."""
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
    assert send_and_receive(value) == value


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=4), st.binary(min_size=648, max_size=648))
def test_arrays_arrive_to_the_bit(dtype: Any, shape: list[int], drawn: bytes) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = np.frombuffer(drawn[:size], dtype).reshape(shape)
    ((found, same),) = [send_and_receive((array, [array]))]
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == same[0].tobytes() == array.tobytes()


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_whatever_else_comes_is_unreadable_and_no_more(words: bytes, rest: bytes) -> None:
    try:
        found = protocol.parse_answer(words, rest)
    except protocol.UnreadableAnswer:
        return
    assert send_and_receive(found) == found


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


DEEP = protocol.MAX_DEPTH + 1


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b'{"array": "float32", "shape": [' + b", ".join([b"9" * 4000] * 1000) + b"]}", "4,000 digits"),
        (b'{"array": "float32", "shape": [' + b", ".join([b"9" * 14] * 33) + b"]}", "33 axes"),
        (b'{"array": "float32", "shape": [0, 281474976710656]}', "axis"),
        (b'{"array": "float32", "shape": [true]}', "axis"),
        (b'{"array": "float32", "shape": [0], "more": 1}', "no known kind"),
        (b'{"list": [' * DEEP + b"null" + b"]}" * DEEP, "nested"),
        (b'{"list": [' + b", ".join([b"0"] * protocol.MAX_VALUES) + b"]}", "values"),
        (b'{"list": [' + b", ".join([b'{"array": "bool", "shape": [0]}'] * 5000) + b"]}", "arrays"),
        (b" " * (protocol.MAX_JSON_BYTES + 1), "bytes of JSON"),
        (b"1.5", "no integer"),
        (b"NaN", "no integer"),
        (b'{"float": "' + b"1" * 1000 + b'"}', "no known kind"),
        (b'{"dict": [[["name"], null]]}', "name"),
    ],
)
def test_forged_answers_are_refused_by_name(text: bytes, names: str) -> None:
    with pytest.raises(protocol.UnreadableAnswer, match=names):
        protocol.parse_answer(text, b"")


def test_the_largest_answer_goes_by_what_was_asked() -> None:
    small, large = (
        draw_problem(Case(q_length=length, kv_length=16, head_dim=16, v_head_dim=64)) for length in (16, 64)
    )
    out = small.q.size // 16 * 64 * 8
    assert out < protocol.max_array_bytes(small) < protocol.max_array_bytes([large]) < 2**26
    assert protocol.max_array_bytes(Case(), None, "text", 3) == protocol.max_array_bytes()
    head = protocol.LENGTHS.pack(10, protocol.max_array_bytes(small) + 1)
    with pytest.raises(protocol.UnreadableAnswer, match="what was asked has at most"):
        protocol.parse_lengths(head, protocol.max_array_bytes(small))


def count_calls(text: bytes, rest: bytes) -> int:
    """Count the functions that are called, in Python and below, to parse an answer or refuse it."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with contextlib.suppress(protocol.UnreadableAnswer):
            protocol.parse_answer(text, rest)
    finally:
        sys.setprofile(before)
    return calls


# Parts of forged answers, besides parts of real ones.
FORGED = st.sampled_from(
    [
        *(
            b'{"list": [',
            b"]}",
            b'{"dict": [["a", ',
            b"]]}",
            b", ",
            b"null",
            b"-1",
            b"1e9",
            b'"',
            b"\\ud800",
            b"[" * 500,
        ),
        *(b'{"array": "float32", "shape": [', b'{"array": "int4", "shape": [0', b"9" * 14, b"9" * 4000, b", 0" * 40),
        *(
            b'{"float": "0x1.8p+1"}',
            b'{"float": "',
            b"Infinity",
            b"281474976710655",
            b'{"tuple": [',
            b"\x00",
            b" " * 999,
        ),
    ]
)


@given(
    st.lists(nested, max_size=3),
    st.lists(st.tuples(FORGED, st.floats(0, 1), st.integers(0, 30), st.integers(1, 40)), max_size=6),
    st.binary(max_size=64),
)
def test_a_forged_answer_is_read_or_refused_in_few_steps(
    value: Any, forged: list[tuple[bytes, float, int, int]], rest: bytes
) -> None:
    message = protocol.pack_answer([value, np.ones(3, np.float32)])
    length, _ = protocol.LENGTHS.unpack(message[: protocol.LENGTHS.size])
    text = message[protocol.LENGTHS.size :][:length]
    for piece, place, removed, copies in forged:
        start = int(place * len(text))
        text = text[:start] + piece * copies + text[start + removed :]
    assert count_calls(text, rest) <= 100 + 10 * len(text)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), lambda: 0])
def test_what_is_no_data_is_refused_where_it_is_made(value: Any) -> None:
    with pytest.raises(protocol.UnsupportedResult, match="must be an array of numbers"):
        protocol.pack_answer({"out": value})


def test_a_request_has_the_operands_and_not_what_the_judge_found_out() -> None:
    problem = draw_problem(Case(mask="dense-d40"))
    before = protocol.pack_request(problem)
    assert problem.allowed.any()
    assert problem.empty_rows.any() in (True, False)
    assert protocol.pack_request(problem) == before
    assert not vars(protocol.unpack_request(before)).keys() - set(problem.__dataclass_fields__)
