"""Conditions on cases under which planted bugs show."""

from __future__ import annotations

from collections.abc import Callable

from cases.case import Case

Trigger = Callable[[Case], bool]


def has(*features: str) -> Trigger:
    """The case has all of these features (`cases.case.FEATURES`)."""
    return lambda case: set(features) <= set(case.features)


def trains(*features: str) -> Trigger:
    """The case has gradients and all of these features."""
    return has("train", *features)


def both(*triggers: Trigger) -> Trigger:
    """All conditions hold."""
    return lambda case: all(trigger(case) for trigger in triggers)


def empty_rows(case: Case) -> bool:
    """Some query may attend to nothing."""
    offset_hides = "-o-" in case.mask or ("window" in case.mask and case.q_length > case.kv_length)
    return "dense" in case.mask or "lengths-0" in case.mask or case.segments == "segpad" or offset_hides


def dead_keys(case: Case) -> bool:
    """Some key is hidden from every query."""
    return "dense" in case.mask or "lengths" in case.mask or case.segments == "segpad"


def grouped(case: Case) -> bool:
    """Query heads share key/value heads."""
    return case.num_q_heads > case.num_kv_heads


def sixteen_bits(case: Case) -> bool:
    """bf16 or f16 operands."""
    return case.dtype != "f32"


def masked(case: Case) -> bool:
    """Some pair is hidden."""
    return case.mask != "full" or case.segments is not None


def one_query(case: Case) -> bool:
    """`T = 1`."""
    return case.q_length == 1
