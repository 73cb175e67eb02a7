"""Run TPU kernels in JAX's simulating interpreter: what only it catches, and that it recovers from failures."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from packaging.version import Version

from cases.accelerator_cases import select_interpreted_cases
from cases.case import Case
from cases.case_id import parse_case_id
from conformance.accelerators import interpreters
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings, load_settings
from impls.contract.implementation import Accelerator, Implementation
from reports.records import EXPECTED_FAIL, FAIL, PASS, RED, UNJUDGED, Record
from tests.kernels import pallas_flash
from tests.kernels.pallas_flash import LANES
from tests.test_structure import ROOT

INTERPRETER = CHECKS_BY_NAME["interpreter"]
CASE = parse_case_id("prefill/f32/B1.T256.S512.N2.K1.H64.V64/full/normal/s0")


def judge(
    implementation: Implementation, case: Case = CASE, check: str = "interpreter", settings: Settings | None = None
) -> list[Record]:
    """The records of a check."""
    planned = run_plan.plan_case(implementation, case, [CHECKS_BY_NAME[check]])
    return Runner(settings or Settings()).run(planned.jobs)


def kernel(**options: Any) -> Implementation:
    return pallas_flash.build_pallas_implementation("kernel", **options)


@pytest.mark.long
def test_a_correct_kernel_passes_with_every_seed() -> None:
    found = {record.observable: record.verdict for record in judge(kernel())}
    assert found == {f"out.seed{seed}": PASS for seed in range(interpreters.SEEDS)} | {"races.forward": PASS}


def failures(found: list[Record]) -> dict[str, str]:
    return {record.observable: record.reason for record in found if record.verdict == FAIL}


@pytest.mark.parametrize(
    "options",
    [{"reads_ahead": True}, {"semantics": ("parallel",) * 3}, {"keys_outside": True}, {"counts": True}],
    ids=["out of bounds", "order", "revisited", "race"],
)
def test_the_fast_interpreter_does_not_see_what_is_planted_here(options: dict[str, Any]) -> None:
    assert not any(record.verdict in RED for record in judge(kernel(**options), check="forward"))


@pytest.mark.long
def test_memory_that_nothing_wrote_is_nan() -> None:
    assert set(failures(judge(kernel(clears=False)))) >= {"out.seed0"}


def test_a_block_out_of_bounds_fails_in_the_interpreters_words() -> None:
    (reason,) = failures(judge(kernel(reads_ahead=True))).values()
    assert reason.startswith("IndexError: Out-of-bounds block index (0, 0, 4, 0)")
    assert "\n" not in reason


@pytest.mark.long
def test_a_sequential_dimension_declared_parallel_is_wrong_in_some_order() -> None:
    found = failures(judge(kernel(semantics=("parallel",) * 3)))
    assert found
    assert all("exceeds" in reason for reason in found.values())


def test_an_output_block_that_is_visited_again_fails() -> None:
    (reason,) = failures(judge(kernel(keys_outside=True))).values()
    assert reason.startswith("RuntimeError: Revisited block")


def test_two_cores_that_write_one_block_race() -> None:
    found = failures(judge(kernel(counts=True)))
    assert set(found) == {"races.forward"}
    assert "races, the first: write of" in found["races.forward"]


@pytest.mark.long
def test_a_kernel_that_failed_leaves_nothing_behind() -> None:
    judge(kernel(reads_ahead=True))
    jax.effects_barrier()  # raises what a computation left
    assert not failures(judge(kernel()))


def test_what_a_kernel_prints_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    with interpreters.capture_races() as found:
        print("RACE DETECTED\n  write of A from 0, 1\n  clock: [1 2]\n  read of A from 0, 0\n  clock: [2 1]\n")
        print("from the kernel")
    assert found == ["write of A from 0, 1 and read of A from 0, 0"]
    assert capsys.readouterr().out.strip() == "from the kernel"


def test_races_of_every_kernel_of_a_program_are_found() -> None:
    """The interpreter's own flag is that of the last kernel."""

    def write_one_block(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...]

    def run(x: jax.Array, shared: bool) -> jax.Array:
        return pl.pallas_call(
            write_one_block,
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (0 if shared else i, 0)),
            out_shape=jax.ShapeDtypeStruct((8 if shared else 16, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            interpret=interpreters.build_parameters(0),
        )(x)

    x = jnp.ones((16, 128), jnp.float32)
    with interpreters.capture_races() as found:
        jax.block_until_ready(jax.jit(lambda x: (run(x, True), run(x + 1, False)))(x))
    assert found
    with interpreters.capture_races() as found:
        jax.block_until_ready(jax.jit(lambda x: run(x, False))(x))
    assert not found


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["jax_splash_tpu", "jax_flash_tpu"])
def test_upstream_is_right_and_races_where_it_is_known_to(name: str) -> None:
    case = parse_case_id("train/f32/B1.T256.S256.N2.K2.H64.V64/causal/normal/s0")
    found = judge(implementation_registry.find_implementation(name), case, settings=load_settings(ROOT))
    known = {record.observable for record in found if record.verdict == EXPECTED_FAIL}
    assert not any(record.verdict in RED for record in found)
    assert all(observable.startswith("races.") for observable in known)
    assert bool(known) == (name == "jax_splash_tpu" and Version(jax.__version__) < Version("0.12"))
    assert {"out.seed0", "dq.seed1", "dk.seed1", "dv.seed1"} <= {r.observable for r in found if r.verdict == PASS}


def test_without_a_call_one_record_says_so() -> None:
    silent = dataclasses.replace(kernel(), accelerator=Accelerator(platform="tpu", interpreted=True))
    (job,) = run_plan.plan_run([silent], level="quick", checks=[INTERPRETER]).jobs
    (record,) = Runner(Settings()).judge(job)
    assert record.verdict == UNJUDGED
    assert "no `under_interpreter`" in record.reason


def test_only_tpu_kernels_are_asked() -> None:
    for name in ("dot_product", "jax_mha_gpu"):
        assert (
            run_plan.plan_run(
                [implementation_registry.find_implementation(name)], level="quick", checks=[INTERPRETER]
            ).jobs
            == ()
        )


def test_the_cases_have_one_batch_row_and_four_key_blocks() -> None:
    for implementation in (
        implementation_registry.find_implementation("jax_splash_tpu"),
        implementation_registry.find_implementation("jax_flash_tpu"),
        kernel(),
    ):
        cases = select_interpreted_cases(3, implementation.supports)
        assert len(cases) == 2
        for case in cases:
            assert parse_case_id(case.id) == case
            assert (case.batch, case.kv_length, case.seed) == (1, 512, 3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("INTERNAL: callback\nTraceback:\n  File\nIndexError: outside\nmore", "IndexError: outside"),
        ("no such block\nmore", "ValueError: no such block"),
    ],
)
def test_an_error_is_told_by_what_was_raised_inside(text: str, told: str) -> None:
    assert interpreters.format_interpreter_error(ValueError(text)) == told


@pytest.mark.parametrize("right", [True, False])
def test_a_block_whose_padding_the_interpreter_ignores_is_unjudged(right: bool) -> None:
    """The kernel gets the rows of two blocks of queries, of which the first block has none ahead of it."""

    def shift(q_ref: Any, out_ref: Any) -> None:
        rows = q_ref[...]
        out_ref[...] = rows[LANES:] if right else rows[:LANES]

    def copy(q: jax.Array, padding: tuple[int, int], interpret: Any) -> jax.Array:
        sizes = (None, None, pl.Element(2 * LANES, padding), q.shape[3])
        return pl.pallas_call(
            shift,
            grid=(q.shape[1], q.shape[2] // LANES),
            in_specs=[pl.BlockSpec(sizes, lambda n, i: (0, n, i * LANES, 0))],
            out_specs=pl.BlockSpec((None, None, LANES, q.shape[3]), lambda n, i: (0, n, i, 0)),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            interpret=interpret,
        )(q)

    def attend(q: jax.Array, *rest: Any, padding: tuple[int, int], interpret: Any = True, **options: Any) -> Any:
        q = copy(q.transpose(0, 2, 1, 3), padding, interpret).transpose(0, 2, 1, 3)
        return pallas_flash.attention(q, *rest, interpret=interpret, **options)

    def build(padding: tuple[int, int]) -> Implementation:
        call = functools.partial(attend, padding=padding)
        accelerator = Accelerator(
            platform="tpu", interpreted=True, under_interpreter=lambda p: functools.partial(call, interpret=p)
        )
        return dataclasses.replace(kernel(), call=call, accelerator=accelerator)

    found = judge(build((LANES, 0)))
    assert {record.verdict for record in found} == {UNJUDGED}
    assert all("padding (128, 0)" in record.reason for record in found), found
    (forward,) = judge(build((LANES, 0)), check="forward")
    assert forward.verdict == (PASS if right else FAIL)
    assert any(record.verdict == FAIL for record in judge(build((0, 0))))  # out of bounds, with no padding to ignore
