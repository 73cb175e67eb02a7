"""The adapters of tpu-inference: layouts and conventions, by the package's own references in place of its kernels.

No interpreter takes the kernels, so what an adapter gives them is judged by what the package says that they compute. A
TPU judges the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from cases.storage_forms.page_writes import WRITE_FORMS, build_writing, view_bits
from conformance.execution import implementation_registry
from conformance.execution.stored_calls import StoredCall, build_storage_arrays_for, lower_implementation
from impls.contract.implementation import Implementation
from impls.libraries import tpu_inference_kernels as adapters
from tests.comparison_asserts import assert_right, compute_expected

RAGGED, LATENT = (implementation_registry.find_implementation(name) for name in (adapters.RAGGED, adapters.LATENT))
INSTALLED = RAGGED.accelerator.absent != adapters.ABSENT
MIXED = "own-linf-17-35-13-9"
# Single tokens first and not first, windows, an odd number of tokens, pages that sequences share.
OF_RAGGED = (
    f"prefill/f32/B4.T13.S35.N4.K2.H64.V64/{MIXED}/paged16-q1-1-13-9/normal/s0",
    "prefill/f32/B3.T9.S50.N6.K3.H32.V32/own-l15-50-33-18/softcap30/scale0.3/paged8-q9-1-2/normal/s0",
    "prefill/f32/B3.T7.S41.N2.K1.H128.V128/own-l5-36-32-41/shared8-q4-1-7/normal/s0",
)
OF_LATENT = (
    f"prefill/f32/B4.T13.S35.N4.K1.H80.V64/{MIXED}/scale0.144/latent16-q1-1-13-9/normal/s0",
    "prefill/f32/B3.T9.S50.N6.K1.H48.V32/own-l15-50-33-18/softcap30/scale0.3/latent8-q9-1-2/normal/s0",
)
_FOR_KERNELS = ("d_block_sizes", "m_block_sizes", "vmem_limit_bytes", "num_kv_pages_per_block", "num_queries_per_block")


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the package's references in place of its kernels, with zeros past the last sequence."""
    if not INSTALLED:
        pytest.skip(adapters.ABSENT)
    kept = adapters._load_module

    def module(name: str) -> Any:
        library = kept(name)
        (entry,) = (x for x in ("ragged_paged_attention", "mla_ragged_paged_attention") if hasattr(library, x))
        reference: Callable[..., Any] = getattr(library, f"ref_{entry}")

        def run(q: Any, *operands: Any, **options: Any) -> Any:
            asked = {key: x for key, x in options.items() if key not in _FOR_KERNELS}
            out, cache = reference(jnp.asarray(q), *map(jnp.asarray, operands), **asked)
            # The reference of latents leaves the lanes in that fill a tile.
            return jnp.pad(out[..., : q.shape[2]], ((0, len(q) - len(out)), (0, 0), (0, 0))), cache

        return SimpleNamespace(**{"get_kv_cache_shape": library.get_kv_cache_shape, entry: run})

    monkeypatch.setattr(adapters, "_load_module", module)


@pytest.mark.long
@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize(
    ("implementation", "case_id"), [*((RAGGED, x) for x in OF_RAGGED), *((LATENT, x) for x in OF_LATENT)]
)
def test_what_kernels_are_given_is_the_call(implementation: Implementation, case_id: str) -> None:
    case = parse_case_id(case_id)
    assert implementation.supports(case) is None
    problem = draw_problem(case)
    assert problem.storage is not None
    sizes = (case.batch, case.num_q_heads, case.q_length, case.kv_length)
    static, _ = implementation.lower_mask(problem.mask, *sizes)
    options = {"soft_cap": problem.soft_cap, "scale": problem.scale, **static}
    out = lower_implementation(implementation).call(
        problem.q, problem.k, problem.v, storage=build_storage_arrays_for(implementation, problem), **options
    )
    live = ~problem.empty_rows.transpose(0, 2, 1)[..., None]
    assert_right({"out": out}, compute_expected(problem, arithmetic=implementation.arithmetic), judged=live)


@pytest.mark.long
@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize(
    ("implementation", "case_id"), [*((RAGGED, x) for x in OF_RAGGED), *((LATENT, x) for x in OF_LATENT)]
)
def test_pages_come_back_as_they_were_but_for_the_new_tokens(implementation: Implementation, case_id: str) -> None:
    problem = draw_problem(parse_case_id(case_id))
    assert problem.storage is not None
    what = build_writing(problem, 0, finite=True)
    call = StoredCall.of(implementation.call, problem.storage.form, writes=True)
    arrays = build_storage_arrays_for(implementation, problem)
    queries = WRITE_FORMS[problem.storage.form].name_queries(call.pack_queries(problem.q, arrays), problem.v.shape[-1])
    stored = {**queries, **what.tokens, **what.before, **call.select_tables(arrays)}
    given: dict[str, Any] = {name: jnp.asarray(x) for name, x in stored.items()}
    if problem.scale is not None:
        given["scale"] = problem.scale
    _, _, pools = call.write(**given)
    for name, must in what.after.items():
        assert (view_bits(np.asarray(pools[name])) == view_bits(must)).all()


@pytest.mark.parametrize(
    ("implementation", "case_id", "reason"),
    [
        (
            RAGGED,
            "decode/bf16/B1.T1.S9.N2.K1.H64.V64/causal-o8/paged5/normal/s0",
            "a page size that is a multiple of 2",
        ),
        (RAGGED, "decode/f32/B2.T1.S9.N2.K1.H64.V64/own-linf-9-4/paged4-q1-0/normal/s0", "one has 0 queries and 4"),
        (LATENT, "decode/f32/B1.T1.S9.N2.K1.H64.V64/causal-o8/scale0.2/latent4/normal/s0", "no rotary part"),
    ],
)
def test_limits_are_declared(implementation: Implementation, case_id: str, reason: str) -> None:
    assert reason in (implementation.supports(parse_case_id(case_id)) or "")


def test_it_is_unjudged_with_the_remedy_where_it_is_not_installed() -> None:
    assert INSTALLED or all("pip install --no-deps" in (x.accelerator.absent or "") for x in (RAGGED, LATENT))
