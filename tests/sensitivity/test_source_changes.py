"""Test that bugs which change a passage of a kernel's source find that passage; most are tested at night."""

from __future__ import annotations

import pytest

from tests.bank import PlantedBug
from tests.planted.computing import (
    moba_tpu,
    paged_gpu,
    paged_tpu,
    paged_tpu_latent,
    paged_tpu_masks,
    paged_tpu_scales,
    splash_packed,
)
from tests.planted.computing.flash_gpu import mosaic, packed
from tests.planted.features import alibi

MODULES = (
    mosaic,
    packed,
    moba_tpu,
    paged_gpu,
    paged_tpu,
    paged_tpu_latent,
    paged_tpu_masks,
    paged_tpu_scales,
    splash_packed,
    alibi,
)
BUGS: tuple[PlantedBug, ...] = tuple(bug for module in MODULES for bug in module.BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_passage_to_change_is_there_once(bug: PlantedBug) -> None:
    assert bug.build().name == bug.name
