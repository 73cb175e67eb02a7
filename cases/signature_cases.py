"""Cases of one feature each, always the same, on which kernels are told apart by how wrong they are.

The operands of a case are the same bits everywhere, and so are the exact results and their bounds. Two kernels that
compute the same wrong thing are therefore wrong by the same ratio, however different they are inside. The cases of a
grid are chosen by what a kernel supports, so that those of two kernels differ; these are the same for all, and each
kernel is asked those that it supports.
"""

from __future__ import annotations

import dataclasses

from cases.case import Case, parse_case_id


@dataclasses.dataclass(frozen=True)
class SignatureCase:
    """A case, and the names of the checks that it is asked: those that say there what no other case says."""

    case: Case
    checks: tuple[str, ...]


_ONE = "B2.T256.S256.N2.K2.H64.V64"
_GROUPS = "B2.T256.S256.N4.K2.H64.V64"
_CHUNK = "B1.T64.S320.N2.K2.H64.V64"
_STEP = "B2.T1.S200.N4.K2.H64.V64"
_MIXED = "B4.T13.S45.N4.K2.H64.V64"
_LATENT = "B2.T40.S40.N4.K1.H80.V64"
_LATENTS = "B4.T13.S45.N4.K1.H80.V64"
_PACKED = "B4.T30.S30.N4.K2.H64.V64"

# Beside `forward` and `gradients`: what is saved beside the results, its gradient, and what lies behind the mask.
_SAVED = ("residuals",)
_LSE = ("residuals", "gradients_lse")
_BEHIND = ("residuals", "poison")

SIGNATURE_CASES: tuple[SignatureCase, ...] = tuple(
    SignatureCase(parse_case_id(f"{case}/s0"), ("forward", "gradients", *beside))
    for case, beside in (
        # Nothing but attention; then what every kernel has in some form.
        (f"train/f32/{_ONE}/full/normal", _SAVED),
        (f"train/f32/{_GROUPS}/full/normal", _LSE),
        (f"train/f32/{_ONE}/causal/normal", _SAVED),
        (f"train/f32/{_GROUPS}/causal/seg/normal", ()),
        # Lengths: those that no block divides, more queries than keys, and more keys than queries.
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
        # Chosen chunks: a last one that is not whole, whole ones, all of them, later queries, one query, and operands.
        ("train/f32/B1.T321.S321.N2.K2.H64.V64/moba-65-3/normal", _SAVED),
        (f"train/f32/{_GROUPS}/moba-64-2/normal", _LSE),
        ("train/f32/B1.T100.S100.N2.K2.H64.V64/moba-24-99/normal", ()),
        (f"prefill/f32/{_CHUNK}/moba-41-3-o256/normal", _SAVED),
        ("decode/f32/B1.T1.S200.N2.K1.H64.V64/moba-41-3-o199/normal", ()),
        ("train/f32/B1.T128.S128.N2.K2.H64.V64/moba-26-3/softcap2/sinks/scale0.3/normal", ()),
        # Functions of places: each score, beside a mask, a cap and grouped heads, and one query.
        (f"train/f32/{_ONE}/full/score-relative/normal", _SAVED),
        (f"train/f32/{_GROUPS}/causal/score-alibi/normal", _LSE),
        (f"train/f32/{_ONE}/window-l63-r15/softcap2/score-rows/normal", ()),
        ("train/f32/B1.T128.S384.N2.K2.H64.V64/causal/scale0.3/score-cap/normal", ()),
        (f"decode/f32/{_STEP}/lengths-101-200/score-relative/normal", ()),
        # In pages: steps that are mixed, single tokens, windows and operands, sequences that have come to nothing.
        (f"prefill/f32/{_MIXED}/own-linf-45-16-17-9/paged16-q13-1-1-9/normal", _BEHIND),
        ("decode/f32/B3.T1.S48.N4.K2.H64.V64/own-linf-48-33-15/paged16/normal", _SAVED),
        (f"prefill/f32/{_MIXED}/own-l7-45-16-17-9/softcap2/paged16-q13-1-1-9/normal", ()),
        (f"prefill/f32/{_MIXED}/own-linf-45-16-17-9/sinks/scale0.3/shared16-q13-1-1-9/normal", _SAVED),
        ("prefill/f32/B5.T5.S32.N2.K2.H64.V64/own-linf-18-32-21-0-0/paged16-q1-0-5-0-1/normal", _SAVED),
        ("prefill/f32/B2.T40.S300.N2.K1.H64.V64/own-linf-300-40/paged64/normal", ()),
        (f"prefill/bf16/{_MIXED}/own-linf-45-16-17-9/paged16-q13-1-1-9/normal", ()),
        # Pages with scales.
        (f"prefill/f32/{_MIXED}/own-linf-45-16-17-9/kvint8-token/paged16-q13-1-1-9/normal", _BEHIND),
        ("decode/f32/B3.T1.S48.N4.K2.H64.V64/own-linf-48-33-15/kvint8-token/paged16/normal", _SAVED),
        (f"prefill/f32/{_MIXED}/own-l7-45-16-17-9/softcap2/kvfp8-token/paged16-q13-1-1-9/normal", ()),
        (f"prefill/f32/{_MIXED}/own-linf-45-16-17-9/sinks/scale0.3/kvint8-token/shared16-q13-1-1-9/normal", ()),
        ("prefill/f32/B5.T5.S32.N2.K2.H64.V64/own-linf-18-32-21-0-0/kvfp8-token/paged16-q1-0-5-0-1/normal", _SAVED),
        ("prefill/f32/B2.T40.S300.N2.K1.H64.V64/own-linf-300-40/kvint8-token/paged64/normal", ()),
        (f"prefill/bf16/{_MIXED}/own-linf-45-16-17-9/kvint8-token/paged16-q13-1-1-9/normal", ()),
        # One scale for all keys and one for all values.
        (f"prefill/f32/{_MIXED}/own-linf-45-16-17-9/kvint8-tensor/paged16-q13-1-1-9/normal", _BEHIND),
        ("decode/f32/B3.T1.S48.N4.K2.H64.V64/own-linf-48-33-15/softcap2/kvfp8-tensor/paged16/normal", _SAVED),
        # Packed: as they are trained, without a mask, and as they are served.
        (f"train/f32/{_PACKED}/own-linf-24-1-17-30/packed-q24-1-17-30/normal", _LSE),
        (f"train/f32/{_PACKED}/own-l5-24-1-17-30/softcap2/packed-q24-1-17-30/normal", ()),
        (f"train/f32/{_PACKED}/own-linf-24-1-17-30/sinks/scale0.3/packed-q24-1-17-30/normal", _SAVED),
        ("train/f32/B4.T20.S30.N2.K2.H64.V64/lengths-30-7-16-9/packed-q12-20-1-9/normal", _BEHIND),
        ("train/f32/B5.T21.S21.N2.K2.H64.V64/own-linf-10-6-0-0-21/packed-q10-0-5-0-21/normal", _SAVED),
        ("prefill/f32/B4.T13.S45.N4.K2.H64.V64/own-linf-45-32-33-9/packed-q13-1-1-9/normal", ()),
        (f"train/bf16/{_PACKED}/own-linf-24-1-17-30/packed-q24-1-17-30/normal", ()),
        # Latents: as they are trained, with operands, a chunk, one query; then in pages, like the pages above.
        (f"train/f32/{_LATENT}/full/scale0.144/latent/normal", _LSE),
        (f"train/f32/{_LATENT}/causal/seg/scale0.144/latent/normal", ()),
        (f"train/f32/{_LATENT}/causal/softcap2/sinks/bias/scale0.3/latent/normal", _SAVED),
        (f"train/bf16/{_LATENT}/causal/scale0.144/latent/normal", ()),
        ("prefill/f32/B2.T16.S80.N6.K1.H64.V64/causal-o64/scale0.072/latent/normal", _SAVED),
        ("decode/f32/B3.T1.S40.N4.K1.H80.V64/lengths-40-33-26/scale0.144/latent/normal", _BEHIND),
        (f"prefill/f32/{_LATENTS}/own-linf-45-16-17-9/scale0.144/latent16-q13-1-1-9/normal", _BEHIND),
        ("decode/f32/B3.T1.S48.N4.K1.H80.V64/own-linf-48-33-15/scale0.144/latent16/normal", _SAVED),
        (f"prefill/f32/{_LATENTS}/own-l7-45-16-17-9/softcap2/scale0.3/latent16-q13-1-1-9/normal", ()),
        (f"prefill/f32/{_LATENTS}/own-linf-45-16-17-9/sinks/scale0.3/latentshared16-q13-1-1-9/normal", _SAVED),
        (f"prefill/bf16/{_LATENTS}/own-linf-45-16-17-9/scale0.144/latent16-q13-1-1-9/normal", ()),
        # Pages that are written, some of them whole, some of them others' too.
        (f"prefill/f32/{_MIXED}/own-linf-45-32-33-9/paged16-q13-1-1-9/normal", _SAVED),
        ("prefill/f32/B2.T17.S49.N4.K2.H64.V64/own-linf-49-40/sinks/shared16-q17-1/normal", ()),
    )
)
"""All of them, in the order in which they are asked."""
