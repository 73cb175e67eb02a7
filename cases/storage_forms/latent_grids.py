"""The models of latent attention as it is served: latents in pages, and dense ones with gradients.

Depths are those of a latent: the rank and the rotary part together, of which the rank is the values. The scale goes by
the heads that the latent stands for: 0.144 is that of 32 + 16 dimensions, 0.072 that of 128 + 64. Neither is that of
the latent. One shape of each model of sizes has the rank and the heads of DeepSeek V3 (arXiv:2412.19437), and kernels
that take no others are asked about these alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.storage_forms import stored_grids
from cases.storage_forms.stored_grids import Shape


class _Pair(NamedTuple):
    """A level of heads `(N, K)` or depths `(H, V)`."""

    first: int
    second: int
    instead_of: Any = None  # only for what does not support that level


_REAL = (576, 512)
_DEPTHS = Axis(
    "depths",
    (_Pair(80, 64), _Pair(192, 128), _Pair(40, 32), _Pair(64, 64), _Pair(576, 512, _Pair(80, 64))),
    rich=_Pair(80, 64),
)
_HEADS = Axis(
    "heads",
    (_Pair(4, 1), _Pair(16, 1), _Pair(1, 1), _Pair(6, 1), _Pair(128, 1, _Pair(4, 1))),
    rich=_Pair(4, 1),
)
_SCALE = Axis("scale", (0.144, 0.072, 0.3), rich=0.072)
# Beside these a pair of keys that are all but the same has values that are, too, and nothing cancels.
_VALUES = Axis("distribution", ("normal", "large", "dominant", "heavy", "small", "ties", "knee"), cheap=True)


def convert_to_latent_pages(case: Case) -> Case:
    """A case of keys and values in pages with latents in their place: the first coordinates of a key are its value."""
    assert case.storage is not None
    pages = case.storage.replace("paged", "latent", 1).replace("shared", "latentshared", 1)
    return dataclasses.replace(case, storage=pages)


def _build_paged_model(place: int, *changed: Axis) -> Model:
    """The model of pages of keys and values at `place` (`cases.storage_forms.stored_grids`), some of its axes changed."""
    usual = stored_grids.MODELS["paged"][place]
    axes = {**{axis.name: axis for axis in usual.axes}, **{axis.name: axis for axis in (*changed, _SCALE, _VALUES)}}

    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        return convert_to_latent_pages(usual.assemble(levels, seed))

    return Model(tuple(axes.values()), usual.compatible, assemble, usual.strongest)


_SIZES = (
    Shape("borders", lambda p: ((128, 128), (127, 255), (1, 129)), heads=(2, 1), depths=(40, 32)),
    Shape("long", lambda p: ((1, 1), (4, 1030), (1, 3)), heads=(8, 1), depths=(80, 64)),
    Shape("real", lambda p: ((1, 70), (2, 33), (1, 1)), heads=(128, 1), depths=_REAL),
    Shape("odd", lambda p: ((6, 20), (3, 50), (1, 9)), heads=(10, 1), depths=(104, 88)),
    Shape("many", lambda p: tuple((1, 1 + 7 * n % 90) for n in range(17)), "decode", heads=(4, 1), depths=(80, 64)),
)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """A level of dense latents: phase, B, T and S; of the model of sizes with heads and depths of its own."""

    phase: str
    batch: int
    q: int
    kv: int
    heads: tuple[int, int] | None = None
    depths: tuple[int, int] | None = None


# How an id writes them, by what a level means; `o` is where the first query stands if the last is at the last key.
_MASKS = {
    "causal": "causal-o{o}",
    "full": "full",
    "window": "window-l9-r0-o{o}",
    "lengths": "lengths-{lengths}",
    "array": "dense-d40",
}


def _build_dense_case(levels: Mapping[str, Any], seed: int) -> Case:
    size = levels["lengths"]
    heads, depths = size.heads or levels["heads"], size.depths or levels["depths"]
    lengths = "-".join(str(size.kv - 7 * n) for n in range(size.batch))
    mask = _MASKS[levels["mask"]].format(o=size.kv - size.q, lengths=lengths).replace("-o0", "")
    return Case(
        phase=size.phase,
        dtype=levels["dtype"],
        batch=size.batch,
        q_length=size.q,
        kv_length=size.kv,
        num_q_heads=heads[0],
        num_kv_heads=1,
        head_dim=depths[0],
        v_head_dim=depths[1],
        mask=mask,
        segments=levels["segments"],
        soft_cap=levels["soft_cap"],
        sinks=levels["sinks"],
        bias=levels["bias"],
        scale=levels["scale"],
        storage="latent",
        distribution=levels["distribution"],
        seed=seed,
    )


def _build_dense_model(*own: Axis, strongest: int = 4) -> Model:
    usual = {axis.name: axis for axis in stored_grids.MODELS["paged"][0].axes}
    shared = (_VALUES, usual["dtype"], usual["soft_cap"], usual["sinks"], _SCALE)
    segments = Axis("segments", (None, "seg"), rich="seg")
    mask, bias = Axis("mask", tuple(_MASKS), rich="window"), Axis("bias", (None, "bias", "biashead"), rich="biashead")
    return Model(
        (*own, mask, segments, *shared, bias), stored_grids.MODELS["paged"][0].compatible, _build_dense_case, strongest
    )


MODELS: Mapping[str, tuple[Model, Model]] = {
    "latent_pages": (
        _build_paged_model(0, _HEADS, _DEPTHS),
        _build_paged_model(1, Axis("shape", _SIZES)),
    ),
    "latent": (
        _build_dense_model(
            Axis(
                "lengths",
                (
                    _Sizes("train", 2, 40, 40),
                    _Sizes("train", 1, 64, 64),
                    _Sizes("train", 2, 24, 72),
                    _Sizes("train", 2, 40, 16),
                    _Sizes("prefill", 2, 16, 80),
                    _Sizes("decode", 3, 1, 40),
                ),
            ),
            _HEADS,
            _DEPTHS,
        ),
        _build_dense_model(
            Axis(
                "lengths",
                (
                    _Sizes("train", 1, 129, 129, (2, 1), (40, 32)),
                    _Sizes("train", 1, 17, 24, (128, 1), _REAL),
                    _Sizes("train", 3, 20, 150, (10, 1), (104, 88)),
                ),
            ),
            strongest=2,
        ),
    ),
}
"""The models of features and of sizes, by kind of storage."""
