"""Decoding: a sequence that is computed piece by piece is what one pass over all of it gives.

The keys and values of the whole sequence are known; of the cache, each piece gets those up to its own last token. What
is behind them is what is behind a mask: NaN, unless that is declared to matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from cases import mask_spec
from cases.decoding import PIECES, piece
from cases.inputs import Problem
from conformance.bounds import Bounded
from conformance.checks.judgement import Judgement, by_bound
from conformance.comparison import compare
from conformance.subject import Subject

# What memory may hold that nothing wrote, where it must be finite.
_STALE = 2.0**6


def decoding(subject: Subject) -> Iterator[Judgement]:
    """Chunks of a prompt, then token by token into a cache that is longer, give the rows of one causal pass."""
    for start, stop in PIECES:
        got = subject.results_of(_problem(subject, start, stop))
        place = f"token{start}" if stop - start == 1 else f"chunk{start}"
        for name, axis in (("out", 1), ("logsumexp", 2), ("max_logits", 2)):
            if name in got:
                whole = subject.expectation.forward[name]
                rows = (slice(None),) * axis + (slice(start, stop),)
                yield by_bound(
                    name,
                    compare(got[name], Bounded(whole.value[rows], whole.bound[rows])),
                    dtype=subject.case.dtype,
                    tolerances=subject.tolerances,
                    label=f"{name}.{place}",
                )


def _problem(subject: Subject, start: int, stop: int) -> Problem:
    """The queries of a piece over a cache that is filled up to its last token."""
    whole, case = subject.problem, piece(subject.case, start, stop)
    stale = np.nan if subject.implementation.behind_mask == "any" else _STALE
    k, v = (x.copy() for x in (whole.k, whole.v))
    k[:, stop:] = v[:, stop:] = stale
    mask = mask_spec.build(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    return dataclasses.replace(whole, q=whole.q[:, start:stop], k=k, v=v, mask=mask)
