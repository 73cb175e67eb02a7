"""Look up block sizes in a table measured by device and length, and describe them to the tuner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from cases.case import Case
from impls.contract.tunable import ParameterSettings, Setting, Tunable, TuningParameter, read_table

DEFAULT_SIZES = {"block_q": 128, "block_kv": 128}
"""Block sizes where nothing was measured, and for short calls. A short call would fit into one block of a larger size.
"""
MIN_TUNED_LENGTH = 1024

TABLE = Path(__file__).with_name("block_sizes.json")
_ENTRIES = read_table(TABLE)
_BLOCK_LENGTHS = (64, 128, 256, 512)


def look_up(q_length: int, kv_length: int) -> Setting:
    """Look up block sizes for the default device, as measured at the longest length that is at most both lengths."""
    device = jax.devices()[0].device_kind
    fitting = [
        entry
        for entry in _ENTRIES
        if entry.device == device and MIN_TUNED_LENGTH <= entry.key["min_length"] <= min(q_length, kv_length)
    ]
    return max(fitting, key=lambda entry: entry.key["min_length"]).settings["blocks"] if fitting else DEFAULT_SIZES


def build_tunable(call: Callable[..., Any]) -> Tunable:
    """Describe to the tuner the block sizes of `call`, which takes `block_q` and `block_kv`."""

    def with_settings(settings: ParameterSettings) -> Callable[..., Any]:
        def attention(*operands: Any, **options: Any) -> Any:
            return call(*operands, **options, **settings["blocks"])

        return attention

    return Tunable(
        parameters=(TuningParameter(name="blocks", phase="forward+backward", candidates=_iter_candidates),),
        settings=lambda case: {"blocks": look_up(case.q_length, case.kv_length)},
        call=with_settings,
        key=lambda case: {"min_length": min(case.q_length, case.kv_length)},
        cases=lambda: tuple(_build_case(length) for length in (1024, 4096)),
        table=TABLE,
    )


def _iter_candidates(case: Case) -> Iterator[Setting]:
    for block_q in _BLOCK_LENGTHS:
        for block_kv in _BLOCK_LENGTHS:
            if block_q <= case.q_length and block_kv <= case.kv_length:
                yield {"block_q": block_q, "block_kv": block_kv}


def _build_case(length: int) -> Case:
    return Case(q_length=length, kv_length=length, num_q_heads=4, num_kv_heads=4, mask="causal")
