"""Every kind of location is found if it is planted in right results, and none is found otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.truth.error_patterns.planted_errors import BF16, CAUSAL, FULL, LENGTHS, WINDOW, noise, seen

B, T, N = (slice(None),) * 3


def spoilt(*index: Any) -> Any:
    """A plant that adds noise at an index."""

    def plant(x: np.ndarray, _: object) -> np.ndarray:
        x[index] += 0.1 * noise(x[index].shape)
        return x

    return plant


@pytest.mark.parametrize(
    ("case", "observable", "index", "words"),
    [
        (CAUSAL, "out", (B, 149), "only the last row"),
        (CAUSAL, "out", (B, slice(128, None)), "only rows from 128 on, a multiple of 128"),
        (CAUSAL, "dk", (B, slice(128, None)), "only keys from 128 on, a multiple of 128"),
        (CAUSAL, "dv", (B, slice(64, 128)), "only keys 64 to 127, a block of 64"),
        (CAUSAL, "dq", (B, slice(101, None)), "only rows from 101 on"),
        (CAUSAL, "dq", (B, slice(None, 96)), "only rows before 96, a multiple of 32"),
        (CAUSAL, "dq", (B, slice(63, None, 64)), "only rows that are the last of a block of 64"),
        (WINDOW, "dq", (B, slice(0, None, 32)), "only rows that are the first of a block of 32"),
        (WINDOW, "dk", (B, slice(5, None, 16)), "only keys that are number 5 of a block of 16"),
        (WINDOW, "dk", (B, slice(1, None, 2)), "only odd keys"),
        (CAUSAL, "out", (B, T, 2), "only head 2"),
        (CAUSAL, "dv", (B, T, 1), "only key/value head 1"),
        (CAUSAL, "logsumexp", (B, 1, slice(None)), "only head 1"),
        (FULL, "out", (B, T, [1, 2, 3, 5, 6, 7]), "every head of a group but the first"),
        (FULL, "out", (B, T, [0, 4]), "only the first head of every group"),
        (FULL, "dq", (B, T, slice(4, None)), "only heads of every group but the first"),
        (FULL, "dq", (B, T, [1, 3, 4, 6]), "only heads that an interleaved head map (n % K) would give another"),
        (CAUSAL, "out", (1,), "only batch row 1"),
        (CAUSAL, "out", (1, slice(96, None), 3), "only batch row 1, head 3, rows from 96 on, a multiple of 32"),
        (CAUSAL, "out", (B, T, N, slice(32, None)), "only columns from 32 on"),
        (CAUSAL, "out", (B, slice(64, None), N, 63), "only rows from 64 on, a multiple of 64, the last column"),
        (CAUSAL, "out", (0, 17, 2), "only one row, [B, T, N] = [0, 17, 2]"),
        (CAUSAL, "out", (0, 17, 2, 5), "only one element"),
        (FULL, "dsinks", (3,), "only one head, [N] = [3]"),
        (FULL, "dbias", (B, B, slice(64, None), B), "only rows from 64 on"),
    ],
)
def test_a_place_along_the_axes_is_named(case: str, observable: str, index: tuple[Any, ...], words: str) -> None:
    assert seen(case, observable, spoilt(*index)).words.startswith(words)


def test_the_first_row_is_also_the_one_that_sees_one_key() -> None:
    found = seen(CAUSAL, "out", spoilt(B, 0)).words
    assert found.startswith("only the first row (rows that see one key alone)")


def test_the_sizes_of_blocks_are_told_for_the_picture() -> None:
    assert seen(CAUSAL, "out", spoilt(B, slice(128, None))).blocks == (128, 128)
    assert seen(CAUSAL, "out", spoilt(B, slice(101, None))).blocks == (0, 0)


def test_empty_rows_are_named_though_they_are_a_batch_row_too() -> None:
    found = seen(LENGTHS, "out", spoilt(0)).words
    assert "rows that may attend to nothing" in found


def test_the_padded_tail_is_named() -> None:
    def read(x: np.ndarray, _: object) -> np.ndarray:
        x[1, 100:] += 0.1 * noise(x[1, 100:].shape)
        x[0] += 0.1 * noise(x[0].shape)
        return x

    assert seen(LENGTHS, "dk", read).words == "only keys that no query may attend to"
    tail = seen(LENGTHS, "dk", spoilt(1, slice(100, None))).words
    assert tail == "only keys from 100 on (keys that no query may attend to)"


def test_rows_behind_an_empty_block_are_named() -> None:
    """Of a window of 32 keys: whoever stands at 95 or later sees no key of the first block of 64."""
    found = seen(WINDOW, "out", spoilt(B, slice(95, None))).words
    assert found == "only rows from 95 on (rows whose first block of 64 keys is empty)"


def test_what_only_hidden_keys_tell_apart_is_named() -> None:
    found = seen(WINDOW, "out", spoilt(B, slice(32, None))).words
    assert found == "only rows from 32 on, a multiple of 32 (rows that do not see the first key)"


@pytest.mark.parametrize("case", [CAUSAL, LENGTHS, WINDOW, BF16])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.01])
def test_errors_at_random_are_in_no_place(case: str, share: float) -> None:
    def scattered(x: np.ndarray, _: object) -> np.ndarray:
        chosen = np.random.default_rng(1).random(x.shape) < share
        return x + np.where(chosen & (x != 0), 0.3 * noise(x.shape), 0)

    for observable in ("out", "dq", "dk", "dv"):
        assert seen(case, observable, scattered).words == ""


def test_errors_that_only_tight_bounds_make_wrong_are_in_no_place() -> None:
    """Noise of one size everywhere goes beyond the limit only where bounds are narrow; that is no place."""

    def everywhere(x: np.ndarray, _: object) -> np.ndarray:
        return x + 3e-6 * noise(x.shape) * (x != 0)

    assert "only rows" not in seen(CAUSAL, "dq", everywhere).words


def test_a_place_is_not_said_if_little_of_it_is_wrong() -> None:
    def here_and_there(x: np.ndarray, _: object) -> np.ndarray:
        x[:, 128::7, 1] += 0.3
        x[:, 3] += 0.3
        return x

    assert "from 128" not in seen(CAUSAL, "out", here_and_there).words
