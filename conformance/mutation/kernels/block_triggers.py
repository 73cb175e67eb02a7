"""Conditions on a case under which blockwise bugs show."""

from __future__ import annotations

import functools

import numpy as np

from cases import mask_spec
from cases.case import Case
from conformance.mutation.kernels.layout import BLOCK_KV, BLOCK_Q, EMPTY, PARTIAL


@functools.lru_cache(maxsize=256)
def kinds(case: Case) -> np.ndarray:
    """Kinds of the mask's tiles, `[b, n, q tiles, key blocks]`; segment ids are left out."""
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    return mask.blocks(case.q_length, case.kv_length, BLOCK_Q, BLOCK_KV)


def always(case: Case) -> bool:
    """Every case."""
    return True


def several_blocks(case: Case) -> bool:
    """More than one key block, so that there is something to rescale."""
    return case.kv_length > BLOCK_KV


def train(case: Case) -> bool:
    """Gradients are judged."""
    return case.phase == "train"


def train_blocks(case: Case) -> bool:
    """Gradients are judged, over several key blocks."""
    return train(case) and several_blocks(case)


def rounds(case: Case) -> bool:
    """Operands of 16 bits."""
    return case.dtype != "f32"


def grouped(case: Case) -> bool:
    """Query heads share key/value heads, and gradients are judged."""
    return train(case) and case.num_q_heads != case.num_kv_heads


def key_tail(case: Case) -> bool:
    """The last key block is padded."""
    return bool(case.kv_length % BLOCK_KV)


def query_tail(case: Case) -> bool:
    """The last query tile is padded."""
    return bool(case.q_length % BLOCK_Q)


def plain(case: Case) -> bool:
    """No mask at all."""
    return case.mask == "full" and case.segments is None


def masked(case: Case) -> bool:
    """Some tile is partial."""
    return case.segments is not None or bool((kinds(case) == PARTIAL).any())


def empty_rows(case: Case) -> bool:
    """Some query tile may attend to nothing."""
    return bool((kinds(case) == EMPTY).all(axis=-1).any())


def dead_block(case: Case) -> bool:
    """No query of some batch row may attend to some key block."""
    return bool((kinds(case) == EMPTY).all(axis=(1, 2)).any())


def late_start(case: Case) -> bool:
    """The first key block is empty for some query tile that has others."""
    found = kinds(case)
    return bool(((found[..., 0] == EMPTY) & (found != EMPTY).any(axis=-1)).any())


def empty_after(case: Case) -> bool:
    """An empty tile follows one that is not."""
    found = kinds(case) != EMPTY
    return bool((found[..., :-1] & ~found[..., 1:]).any())


def mixed(case: Case) -> bool:
    """Tiles of several kinds."""
    return len(np.unique(kinds(case))) > 1


def by_batch(case: Case) -> bool:
    """The mask differs by batch row."""
    return case.batch > 1 and kinds(case).shape[0] > 1


def by_head(case: Case) -> bool:
    """The mask differs by head."""
    return kinds(case).shape[1] > 1


def only_whole_tiles(case: Case) -> bool:
    """Some batch row and head has empty tiles and no partial one."""
    found = kinds(case)
    return bool(((found != PARTIAL).all(axis=(2, 3)) & (found == EMPTY).any(axis=(2, 3))).any())


def empty_before(case: Case) -> bool:
    """A query tile that may attend to nothing comes before one that may attend to something."""
    live = (kinds(case) != EMPTY).any(axis=-1)
    return bool((~live[..., :-1] & live[..., 1:]).any())


def holes(case: Case) -> bool:
    """Some query tile has an empty tile between two that are not."""
    active = kinds(case) != EMPTY
    before = np.logical_or.accumulate(active, axis=-1)
    after = np.logical_or.accumulate(active[..., ::-1], axis=-1)[..., ::-1]
    return bool((before & after & ~active).any())


def kinds_by_head(case: Case) -> bool:
    """Kinds of tiles differ by head."""
    found = kinds(case)
    return bool((found != found[:, :1]).any())


def kinds_by_batch(case: Case) -> bool:
    """Kinds of tiles differ by batch row."""
    found = kinds(case)
    return bool((found != found[:1]).any())


def empty_tile(case: Case) -> bool:
    """Some tile is empty."""
    return bool((kinds(case) == EMPTY).any())
