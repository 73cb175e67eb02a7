"""Bugs that only a TPU shows: in what a kernel tells its pipeline and its compiler, in memory that nothing wrote."""

from __future__ import annotations

import functools
from typing import Any

from conformance.accelerators.targets import TPU
from tests.bank import PlantedBug
from tests.kernels.pallas_flash import build_pallas_implementation


def _bug(name: str, *, kind: str, reference: str, shows: tuple[str, ...], **options: Any) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="pallas tpu",
        kind=kind,
        reference=reference,
        shows=shows,
        build=functools.partial(build_pallas_implementation, name, **options),
    )


def _compiled_bug(name: str, *, kind: str, reference: str, **options: Any) -> PlantedBug:
    """One that the compiler sees, where there is one."""
    return PlantedBug(
        name=name,
        family="pallas tpu",
        kind=kind,
        reference=reference,
        shows=("v4", "v5e", "v5p", "v6e", "7x"),
        build=functools.partial(build_pallas_implementation, name, **options),
        unmeasurable=lambda: TPU.missing,
    )


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "tpu-scratch-never-cleared",
        kind="init.masked-store",
        reference="jax 08c2a36e28 (ragged paged attention)",
        shows=("out",),
        clears=False,
    ),
    _bug(
        "tpu-reads-one-block-ahead",
        kind="pipeline.oob-block",
        reference="jax#23181",
        shows=("forward",),
        reads_ahead=True,
    ),
    _bug(
        "tpu-key-dimension-parallel",
        kind="pipeline.semantics",
        reference="inferred from jax splash_attention_kernel.py (dimension_semantics)",
        shows=("out",),
        semantics=("parallel", "parallel", "parallel"),
    ),
    _bug(
        "tpu-output-visited-again",
        kind="pipeline.revisited-output",
        reference="inferred from jax splash_attention_kernel.py (running state in outputs)",
        shows=("forward",),
        keys_outside=True,
    ),
    _bug(
        "tpu-cores-share-an-output",
        kind="race.shared-output",
        reference="inferred from jax splash_attention_kernel.py (running state in outputs that all heads share)",
        shows=("races",),
        counts=True,
    ),
    _compiled_bug(
        "tpu-block-of-four-rows",
        kind="compile.misaligned",
        reference="jax#24415",
        block=4,
    ),
    _compiled_bug(
        "tpu-scratch-beyond-vmem-limit",
        kind="compile.vmem",
        reference="vllm-project/tpu-inference PR 3407",
        vmem_limit=2**17,
    ),
)
