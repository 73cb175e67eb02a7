"""Test the diagnosis of wrong kernels that are in no bank.

The class of each was written down before it was judged. `unknown_kernels.json` has one kernel a line: as changes of a
right one, the families that are right to name (none where the fault is of no known class), the levels that it needs,
and how wrong it was on the six most telling cases. The first set determined the least similarity of a kernel that is
wrong everywhere. The second set was written after that. The kernels of the third and the fourth set are wrong in
gradients only (`by_hand`): `docs/measurements/diagnosis.md` says what was changed after the third.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cases.error_profile_cases import ERROR_PROFILE_CASES
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sensitivity import diagnosis, error_profiles
from conformance.sensitivity.error_profiles import CHECK_SEPARATOR, ErrorProfile, KnownBug
from reports.causes.case_levels import find_levels
from tests.bank.examination import create_single_look_runner
from tests.reports.causes.faults.faulty_kernels import FaultyKernel

UNSEEN: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("unknown_kernels.json").read_text(encoding="utf-8")
)


_MODULES = {
    "by_hand": "handwritten_backward",
    **{name: f"{name}_attention" for name in ("dense", "paged", "packed")},
}
"""The modules of the right kernels, in `tests/reports/causes/faults`."""


def add_right_cases(kernel: dict[str, Any]) -> ErrorProfile:
    """Return the error profile of a kernel, completed as findings would complete it.

    Cases without the levels that the fault needs are added as right.
    """
    sizes = dict(kernel["sizes"])
    if kernel["levels"]:
        right = dict.fromkeys({name.partition(CHECK_SEPARATOR)[0] for found in sizes.values() for name in found})
        stored = {kernel["base"]} & {"packed", "paged"}
        for one in ERROR_PROFILE_CASES:
            names = {level.name for level in find_levels(one.case.id)}
            taken = bool(stored) or not ({"own", "moba", "score_mod"} & names or one.case.kv_cache)
            if taken and names & {"paged", "packed", "latent"} == stored and not set(kernel["levels"]) <= names:
                sizes.setdefault(one.case.id, right)
    return ErrorProfile(sizes)


@pytest.fixture(scope="module")
def known_bugs() -> list[KnownBug]:
    return error_profiles.load_profiles()


GRADIENTS = {name: kernel for name, kernel in UNSEEN.items() if kernel["base"] == "by_hand"}


@pytest.mark.parametrize(
    "unseen", [pytest.param(UNSEEN, id="all", marks=pytest.mark.long), pytest.param(GRADIENTS, id="gradients")]
)
def test_the_class_of_most_is_named(known_bugs: list[KnownBug], unseen: dict[str, dict[str, Any]]) -> None:
    first, three, none = [], [], []
    for name, kernel in unseen.items():
        near = diagnosis.find_nearest(add_right_cases(kernel), known_bugs)
        right = [each.bug.family in kernel["classes"] for each in near]
        if not kernel["classes"]:
            none += [name] if not near else []
            continue
        first += [name] if any(right[:1]) else []
        three += [name] if any(right) else []
    known = sum(bool(kernel["classes"]) for kernel in unseen.values())
    assert len(first) >= 0.6 * known
    assert len(three) >= 0.8 * known
    assert len(none) == len(unseen) - known


@pytest.mark.nightly
@pytest.mark.parametrize("name", UNSEEN)
def test_a_kernel_is_as_wrong_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = UNSEEN[name]
    monkeypatch.chdir(tmp_path)
    changes = tuple((before, after) for before, after in kernel["changes"])
    Path("kernel.py").write_text(FaultyKernel(name, _MODULES[kernel["base"]], (), (), changes).source)
    implementation = KernelOptions(None, True).find("kernel.py:attention")
    runner = create_single_look_runner()
    # The cases judged then: which a diagnosis judges first depends on which exist.
    jobs = [job for job in error_profiles.iter_profile_jobs(implementation) if job.case.id in kernel["sizes"]]
    assert len(jobs) == len(kernel["sizes"])
    now = error_profiles.build_profile(record for job in jobs for record in runner.stream(job))
    then = ErrorProfile(kernel["sizes"])
    assert now.wrong.keys() == then.wrong.keys()
    old = KnownBug(name=name, family="family", kind="a.kind", reference="inferred from a test", profile=then)
    assert diagnosis.compare_profiles(now, old).similarity > 0.97
