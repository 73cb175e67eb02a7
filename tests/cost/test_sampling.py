"""Sampling: functions are timed in turn, in rounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.cost.timing import sampling
from conformance.cost.timing.sampling import MAX_CALLS, MIN_ROUNDS, WARM_UP_ROUNDS, compare_pairs, count_calls
from reports.records.measurement import Quartiles

interleave = functools.partial(sampling.interleave, warm_up=math.inf)


class Clock:
    """A clock that only what is timed moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, *seconds: float) -> Callable[[int], None]:
        """A function whose calls take these seconds in turn, over and over."""

        def run(calls: int) -> None:
            for _ in range(calls):
                self.now += seconds[self.ran.count(name) % len(seconds)]
                self.ran.append(name)

        return run


def test_functions_take_turns_and_each_sample_is_theirs() -> None:
    clock = Clock()
    functions = {"a": clock.taking("a", 1.0), "b": clock.taking("b", 2.0), "c": clock.taking("c", 0.5)}
    sampled = interleave(functions, rounds=5, clock=clock)
    assert sampled.seconds == {"a": (1.0,) * 5, "b": (2.0,) * 5, "c": (0.5,) * 5}
    assert clock.ran == ["a", "b", "c"] * (WARM_UP_ROUNDS + 5)
    assert not sampled.interrupted


def test_drift_that_hits_all_alike_does_not_move_the_ratio() -> None:
    """The machine slows down threefold half way: medians move, the paired ratio does not."""
    clock = Clock()
    slow = [1.0] * (WARM_UP_ROUNDS + 5) + [3.0] * 5
    functions = {"a": clock.taking("a", *slow), "b": clock.taking("b", *(2 * seconds for seconds in slow))}
    sampled = interleave(functions, rounds=10, clock=clock)
    assert compare_pairs(sampled.seconds["a"], sampled.seconds["b"]) == Quartiles(0.5, 0.5, 0.5)
    assert compare_pairs(sampled.seconds["b"], sampled.seconds["a"]).median == 2.0


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), min_size=1, max_size=20))
def test_ratios_of_the_two_orders_are_inverse_where_the_rounds_decide(pairs: list[tuple[float, float]]) -> None:
    a, b = ([pair[member] for pair in pairs] for member in (0, 1))
    there, back = compare_pairs(a, b), compare_pairs(b, a)
    assert there.lower <= there.median <= there.upper
    if len(pairs) % 2:  # an even number interpolates between two rounds
        # Tolerance: two divisions and a product, and rounds that rounding makes equal: four roundings of 2**-53.
        assert there.median * back.median == pytest.approx(1, rel=0, abs=2.0**-51)
    assert compare_pairs(a, a) == Quartiles(1, 1, 1)


def test_short_calls_are_sampled_several_at_a_time() -> None:
    clock = Clock()
    sampled = interleave({"a": clock.taking("a", 0.25)}, rounds=4, least=1.0, clock=clock)
    assert sampled.calls == {"a": 4}
    assert sampled.seconds == {"a": (0.25,) * 4}
    assert clock.ran == ["a"] * (WARM_UP_ROUNDS + 4 * 4)
    assert count_calls(1.0, 0.0) == MAX_CALLS
    assert count_calls(0.0, 0.0) == 1


def test_time_is_up_after_the_fewest_rounds_at_the_earliest() -> None:
    clock = Clock()
    assert len(interleave({"a": clock.taking("a", 10.0)}, rounds=50, seconds=1, clock=clock).seconds["a"]) == 3
    clock = Clock()
    sampled = interleave({"a": clock.taking("a", 1.0)}, rounds=50, seconds=10, clock=clock)
    assert len(sampled.seconds["a"]) == 10 - WARM_UP_ROUNDS


def test_slow_functions_warm_up_once() -> None:
    clock = Clock()
    functions = {"a": clock.taking("a", 0.75), "b": clock.taking("b", 0.5)}
    sampling.interleave(functions, rounds=3, clock=clock)
    assert clock.ran == ["a", "b"] * (1 + 3)


def test_what_raises_is_left_out_and_the_others_go_on() -> None:
    clock = Clock()

    def dies(calls: int) -> None:
        if clock.ran.count("a") > WARM_UP_ROUNDS + 1:
            raise MemoryError("out of memory")

    sampled = interleave({"a": clock.taking("a", 1.0), "b": dies, "c": clock.taking("c", 1.0)}, rounds=5, clock=clock)
    assert set(sampled.seconds) == {"a", "c"}
    assert {len(samples) for samples in sampled.seconds.values()} == {5}
    assert str(sampled.failures["b"]) == "out of memory"


@pytest.mark.parametrize(("rounds_done", "kept"), [(MIN_ROUNDS + 1, True), (MIN_ROUNDS - 1, False)])
def test_ctrl_c_keeps_whole_rounds_if_there_are_enough(rounds_done: int, kept: bool) -> None:
    clock = Clock()

    def interrupts(calls: int) -> None:
        if clock.ran.count("a") > WARM_UP_ROUNDS + rounds_done:
            raise KeyboardInterrupt

    sampled = interleave({"a": clock.taking("a", 1.0), "b": interrupts}, rounds=50, clock=clock)
    assert sampled.interrupted
    assert {name: len(samples) for name, samples in sampled.seconds.items()} == (
        {"a": rounds_done, "b": rounds_done} if kept else {}
    )
