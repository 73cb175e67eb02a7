"""The tolerance table: complete, sourced, and never near what correct kernels reach."""

from __future__ import annotations

from conformance import tolerances
from conformance.tolerances import DTYPES, OBSERVABLES


def test_every_dtype_and_observable_has_a_limit_with_its_source() -> None:
    table = tolerances.default()
    assert [(row["dtype"], row["observable"]) for row in table.rows()] == [(d, o) for d in DTYPES for o in OBSERVABLES]
    assert all("correct kernels reached" in row["source"] for row in table.rows())


def test_correct_kernels_stay_below_three_quarters_of_the_limit() -> None:
    table = tolerances.default()
    for (dtype, observable), (ratio, rms) in tolerances._REACHED.items():
        limit = table.limit(dtype, observable)
        assert ratio <= 0.75 * limit.ratio
        assert rms <= 0.75 * limit.rms
