"""The coarse picture of an error has the sizes, the shades and the mask that it should."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.truth.error_patterns.failure import build_failure
from conformance.truth.error_patterns.map_drawing import draw_error_map
from reports.records import MAX_CELLS, ErrorMap
from tests.truth.error_patterns.planted_errors import CAUSAL, FULL, LENGTHS, LIMIT, ONE_HEAD, Plant, failure, truth


def drawn(case: str, observable: str, plant: Plant, blocks: tuple[int, int] = (0, 0)) -> ErrorMap:
    found = draw_error_map(failure(case, observable, plant), blocks)
    assert found is not None
    return found


def last_rows(x: np.ndarray, _: object) -> np.ndarray:
    x[1, 128:, 2] += 1
    return x


def test_rows_are_drawn_by_head_and_beside_them_the_mask_of_the_worst() -> None:
    found = drawn(CAUSAL, "out", last_rows, blocks=(128, 0))
    assert (found.axes, found.shape, found.at, found.blocks) == (("T", "BN"), (150, 8), (1, 2), (128, 0))
    assert len(found.cells) == MAX_CELLS
    assert {len(line) for line in found.cells} == {8}
    red = {(y, x) for y, line in enumerate(found.cells) for x, shade in enumerate(line) if shade > "1"}
    assert red == {(y, 6) for y in range(20, MAX_CELLS)}
    assert (found.mask_shape, found.along) == ((150, 150), "T")
    assert [shade > "1" for shade in found.marks] == [y >= 20 for y in range(MAX_CELLS)]


def test_the_mask_tells_empty_full_and_partial_cells_apart() -> None:
    found = drawn(CAUSAL, "dq", last_rows)
    for y, line in enumerate(found.mask):
        assert line == "2" * y + "1" + "0" * (MAX_CELLS - 1 - y)


def test_keys_are_drawn_along_keys() -> None:
    found = drawn(CAUSAL, "dk", lambda x, _: x + 1)
    assert (found.axes, found.shape, found.along) == (("S", "BK"), (150, 4), "S")


def test_pairs_are_drawn_as_pairs_without_another_mask() -> None:
    found = drawn(FULL, "dbias", lambda x, _: x + 1)
    assert (found.axes, found.mask, found.marks) == (("T", "S"), (), "")


def test_one_head_is_drawn_by_columns() -> None:
    found = drawn(ONE_HEAD, "out", lambda x, _: x + 1)
    assert (found.axes, found.shape) == (("T", "V"), (64, 64))


@pytest.mark.parametrize(
    ("ratio", "shade"), [(0.3, "0"), (3.0, "1"), (30.0, "2"), (300.0, "3"), (4e6, "7"), (1e12, "8"), (np.nan, "9")]
)
def test_a_shade_is_a_power_of_ten_beyond_the_limit(ratio: float, shade: str) -> None:
    bound = truth(CAUSAL)[1]["logsumexp"].bound

    def plant(x: np.ndarray, _: object) -> np.ndarray:
        x[0, 0, 149] += 1
        x[1, 3, 0] += ratio * bound[1, 3, 0]
        return x

    problem, core = truth(CAUSAL)
    got = plant(core["logsumexp"].value.copy(), None)
    found = build_failure("logsumexp", got, core["logsumexp"], None, limit=LIMIT, problem=problem, core=core)
    assert found is not None
    picture = draw_error_map(found)
    assert picture is not None
    assert picture.cells[0][7] == shade


def test_what_is_not_judged_is_a_dash() -> None:
    problem, core = truth(LENGTHS)
    judged = ~problem.empty_rows.transpose(0, 2, 1)[..., None]
    found = build_failure("out", core["out"].value + 1, core["out"], judged, limit=LIMIT, problem=problem, core=core)
    assert found is not None
    picture = draw_error_map(found)
    assert picture is not None
    assert picture.cells[0].startswith("----")
    assert "-" not in picture.cells[0][4:]


def test_a_result_without_rows_has_no_picture() -> None:
    assert draw_error_map(failure(FULL, "dsinks", lambda x, _: x + 1)) is None


def test_results_of_other_shapes_have_no_axes_that_are_known() -> None:
    problem, core = truth(CAUSAL)
    out = core["out"]
    for other in (out.value[..., 0], out.value[:, :, :3], out.value[0]):
        assert build_failure("out", other, out, None, limit=LIMIT, problem=problem) is None
