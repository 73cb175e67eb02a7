"""Bugs that only a kernel can have that goes through chunks in grid steps, each one passage of ours changed."""

from __future__ import annotations

import dataclasses
import functools

from cases.case import Case
from cases.case_id import parse_case_id
from conformance.mutation.kernels.triggers import both, has, trains
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.source_change import Change, changed

MANY = parse_case_id("train/f32/B1.T200.S500.N4.K2.H32.V48/moba-150-2-o300/softcap2/sinks/normal/s0")
FEW = parse_case_id("train/f32/B1.T4.S500.N4.K2.H32.V48/moba-60-2-o496/normal/s0")
"""Chunks of more keys than are computed at a time, with several blocks of rows; and chunks that no query takes."""

_moba = has("moba")
_trains = trains("moba")


def _long_chunks(case: Case) -> bool:
    return case.mask.startswith("moba") and int(case.mask.split("-")[1]) > 128


def _few_queries(case: Case) -> bool:
    return _trains(case) and case.q_length < 8


def _several_blocks(case: Case) -> bool:
    return _trains(case) and case.q_length > 128


def _build(name: str, change: Change) -> Implementation:
    package = changed("impls.moba", f"planted_{name.replace('-', '_')}", change)
    (found,) = (one for one in package.IMPLEMENTATIONS if one.name == "moba_tpu")
    return dataclasses.replace(found, name=name)


_bug = functools.partial(
    stored_bug.bug, family="moba tpu", build=_build, shows="out logsumexp max_logits", trigger=_moba
)

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "moba-tpu-gradients-of-a-chunk-cleared-with-each-block",
        Change("moba_tpu", "opens = (number == 0) |", "opens = (number >= 0) |"),
        kind="sums over blocks",
        reference="inferred from grouped matrix products: the accumulator cleared at every tile of a group",
        shows="dk dv",
        trigger=_several_blocks,
    ),
    _bug(
        "moba-tpu-gradients-of-chunks-never-cleared",
        Change("moba_tpu", "opens = (number == 0) | (", "opens = (number == 0) & ("),
        kind="sums over blocks",
        reference="inferred from kernels that clear their accumulator in the first step of the grid alone",
        shows="dk dv",
        trigger=_trains,
    ),
    _bug(
        "moba-tpu-gradients-of-chunks-that-nobody-took",
        Change("moba_tpu", "jnp.where(taken, x[:, :chunk], 0.0)", "x[:, :chunk]"),
        kind="chunks without rows",
        reference="inferred from grouped matrix products, whose groups without rows are never written",
        shows="dk dv",
        trigger=_few_queries,
    ),
    _bug(
        "moba-tpu-no-mask-where-some-row-sees-all",
        Change("moba_tpu", "last.min(axis=1) + 1", "last.max(axis=1) + 1"),
        kind="causal.position",
        reference="inferred: whether a block needs its mask is asked of its last row",
        trigger=_long_chunks,
    ),
    _bug(
        "moba-tpu-last-step-of-keys-left-out",
        Change("moba_tpu", "lax.div(some + (size - 1), jnp.int32(size))", "lax.div(some, jnp.int32(size))"),
        kind="tail",
        reference="inferred: the number of steps rounded down",
    ),
    _bug(
        "moba-tpu-mask-of-the-first-step-for-all",
        Change(
            "moba_tpu",
            "lax.broadcasted_iota(jnp.int32, z.shape, 1) + first",
            "lax.broadcasted_iota(jnp.int32, z.shape, 1)",
        ),
        kind="causal.position",
        reference="inferred: places counted within a step",
        trigger=_long_chunks,
    ),
    _bug(
        "moba-tpu-sum-not-rescaled",
        Change("moba_tpu", "total * decay + sum_by_lane(weights)", "total + sum_by_lane(weights)"),
        kind="rescaling",
        reference="inferred: the sum of an online softmax keeps the maximum that it was made with",
        shows="out logsumexp",
        trigger=_long_chunks,
    ),
    _bug(
        "moba-tpu-maxima-in-units-of-log-two",
        Change("moba_tpu", "-jnp.inf, maximum * jnp.float32(LN_2))", "-jnp.inf, maximum)"),
        kind="base two",
        reference="inferred from kernels that return the maximum of base-2 logits",
    ),
    _bug(
        "moba-tpu-logsumexp-not-in-units-of-log-two",
        Change("moba_tpu", "[:, None] / jnp.float32(LN_2)", "[:, None]"),
        kind="base two",
        reference="inferred: the backward of a base-2 softmax given a logsumexp of base e",
        shows="dq dk dv",
        trigger=both(_moba, _trains),
    ),
)
