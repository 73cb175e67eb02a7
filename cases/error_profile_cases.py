"""List the fixed cases on which a kernel's errors are measured as its error profile, to compare it with planted bugs.

The operands of a case are the same bits everywhere, and so are the exact results and their bounds. Two kernels that
compute the same wrong thing therefore have the same ratio of error to bound, however different they are inside. The
cases of a grid depend on what a kernel supports, so they differ between kernels. These cases are the same for all
kernels, and each kernel gets the cases that it supports. Most cases test one feature.
"""

from __future__ import annotations

import dataclasses

from cases.case import Case
from cases.case_id import parse_case_id
from cases.storage_forms.form_cases import load_all_form_cases


@dataclasses.dataclass(frozen=True)
class ErrorProfileCase:
    """A case and the names of the checks that run on it. A check runs where it reveals what no other case reveals."""

    case: Case
    checks: tuple[str, ...]


_ONE = "B2.T256.S256.N2.K2.H64.V64"
_GROUPS = "B2.T256.S256.N4.K2.H64.V64"
_CHUNK = "B1.T64.S320.N2.K2.H64.V64"
_STEP = "B2.T1.S200.N4.K2.H64.V64"

# Checks that run in addition to `forward` and `gradients`: residuals, gradients through logsumexp, and NaN behind the
# mask (`poison`).
_SAVED = ("residuals",)
_LSE = ("residuals", "gradients_lse")
_BEHIND = ("residuals", "poison")

ERROR_PROFILE_CASES: tuple[ErrorProfileCase, ...] = tuple(
    ErrorProfileCase(parse_case_id(f"{case}/s0"), ("forward", "gradients", *beside))
    for case, beside in (
        # The first case is attention without a feature. The others have features that every kernel has in some form.
        (f"train/f32/{_ONE}/full/normal", _SAVED),
        (f"train/f32/{_GROUPS}/full/normal", _LSE),
        (f"train/f32/{_ONE}/causal/normal", _SAVED),
        (f"train/f32/{_GROUPS}/causal/seg/normal", ()),
        # Lengths that are no multiple of a block, more queries than keys, and more keys than queries.
        ("train/f32/B1.T200.S200.N2.K2.H64.V64/causal/normal", _SAVED),
        ("train/f32/B1.T384.S128.N2.K2.H64.V64/full/normal", ()),
        ("train/f32/B1.T100.S300.N2.K2.H64.V64/full/normal", ()),
        ("train/f32/B1.T128.S384.N2.K2.H64.V64/causal/normal", _BEHIND),
        ("train/f32/B1.T1100.S1100.N1.K1.H32.V32/causal/normal", ()),
        # Heads and depths.
        ("train/f32/B1.T128.S128.N3.K1.H40.V24/full/normal", ()),
        # Masks.
        (f"train/f32/{_ONE}/window-l31-r0/normal", ()),
        (f"train/f32/{_ONE}/window-l63-r15/normal", ()),
        (f"train/f32/{_ONE}/chunked-107/normal", ()),
        (f"train/f32/{_ONE}/lengths-100-256/normal", _BEHIND),
        (f"train/f32/{_ONE}/dense-d40/normal", ()),
        (f"train/f32/{_ONE}/full/segpad/normal", _BEHIND),
        (f"train/f32/{_ONE}/causal_and_dense-d40/normal", ()),
        # Operands, alone and where their order matters.
        (f"train/f32/{_ONE}/full/softcap2/normal", _SAVED),
        (f"train/f32/{_GROUPS}/full/sinks/normal", _LSE),
        (f"train/f32/{_ONE}/full/bias/normal", ()),
        (f"train/f32/{_ONE}/full/scale0.3/normal", ()),
        (f"train/f32/{_ONE}/causal/softcap2/bias/normal", ()),
        (f"train/f32/{_ONE}/causal/softcap2/sinks/scale0.3/normal", ()),
        # Precision and values.
        (f"train/bf16/{_GROUPS}/causal/normal", _SAVED),
        (f"train/f16/{_ONE}/full/normal", ()),
        (f"train/f32/{_ONE}/full/large", ()),
        # Serving: a chunk of queries, one query, a few over a long cache, quantised caches.
        (f"prefill/f32/{_CHUNK}/causal-o256/normal", _SAVED),
        (f"prefill/f32/{_CHUNK}/window-l79-r0-o256/softcap2/normal", ()),
        (f"decode/f32/{_STEP}/lengths-101-200/normal", _BEHIND),
        (f"decode/f32/{_STEP}/own-l6-101-200/sinks/normal", ()),
        (f"decode/f32/{_STEP}/lengths-0-128/softcap2/normal", _SAVED),
        (f"decode/bf16/{_STEP}/lengths-101-200/normal", ()),
        ("prefill/f32/B1.T4.S1152.N8.K2.H64.V64/causal-o1148/normal", _SAVED),
        (f"decode/f32/{_STEP}/lengths-101-200/kvint8-token/normal", ()),
        (f"decode/f32/{_STEP}/lengths-101-200/kvint4-head/normal", ()),
        (f"decode/f32/{_STEP}/lengths-101-200/kvfp8-token/normal", ()),
        (f"prefill/f32/{_CHUNK}/causal-o256/kvint8-head/normal", ()),
        (f"prefill/f32/{_CHUNK}/full/softcap2/sinks/kvint4-token/normal", ()),
        # MoBA masks: a partial last chunk, whole chunks, all chunks chosen, later queries, one query, and operands.
        ("train/f32/B1.T321.S321.N2.K2.H64.V64/moba-65-3/normal", _SAVED),
        (f"train/f32/{_GROUPS}/moba-64-2/normal", _LSE),
        ("train/f32/B1.T100.S100.N2.K2.H64.V64/moba-24-99/normal", ()),
        (f"prefill/f32/{_CHUNK}/moba-41-3-o256/normal", _SAVED),
        ("decode/f32/B1.T1.S200.N2.K1.H64.V64/moba-41-3-o199/normal", ()),
        ("train/f32/B1.T128.S128.N2.K2.H64.V64/moba-26-3/softcap2/sinks/scale0.3/normal", ()),
        # Score functions (`score_mod`): each of them, with a mask, a cap, grouped heads, and one query.
        (f"train/f32/{_ONE}/full/score-relative/normal", _SAVED),
        (f"train/f32/{_GROUPS}/causal/score-alibi/normal", _LSE),
        (f"train/f32/{_ONE}/window-l63-r15/softcap2/score-rows/normal", ()),
        ("train/f32/B1.T128.S384.N2.K2.H64.V64/causal/scale0.3/score-cap/normal", ()),
        (f"decode/f32/{_STEP}/lengths-101-200/score-relative/normal", ()),
        *(case for form in load_all_form_cases().values() for case in form.error_profile_cases),
    )
)
"""All error profile cases, in the order in which they run."""
