"""Describe a case as text, for `explain`: the problem, its tolerances and their origin, how well it discriminates."""

from __future__ import annotations

import numpy as np

from cases import mask_spec, regressions
from cases.case import FEATURES, OPERAND_FEATURES, Case
from cases.operand_values import Problem, draw_problem
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.storage_layout import Storage
from conformance.check_api.subject import Subject
from conformance.execution.executor import Executor
from conformance.judging import discrimination
from conformance.truth import roundoff
from conformance.truth.tolerances import Tolerances
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation

_DISTRIBUTIONS = {
    "normal": "normal values, logits of standard deviation 1",
    "small": "small logits (0.3): a nearly flat softmax",
    "large": "large logits (4): a peaked softmax",
    "heavy": "heavy-tailed values, as real activations have",
    "dominant": "a few keys that win most rows, the strongest last",
    "cancel": "equal keys in pairs whose values nearly cancel",
    "ties": "three distinct keys repeated: exact ties",
    "knee": "logits as large as the soft cap, where it bends most",
    "levels": "logits around 80, 90, 105, 130, 1100 and 1.1e4, high and low; queries of zeros and equal keys",
    "low": "logits around -120, -400 and -1.1e4, for all keys of a head",
    "apart": "logits that rise or fall by 18, 95 or 200 from one stretch of keys to the next",
    "huge": "logits beyond the float16 range, high for one query and low for the next",
    "aligned": "positive values and cotangents, keys with a mean: sums of one sign",
    "opposed": "values of one sign in each eighth of the keys, and of both in all: partial sums far above the whole",
    "rising": "logits that rise from the first key to the last, by 4 to 128 from row to row",
}
# Operands that have their own line in the description.
_DESCRIBED_OPERANDS = {"segment_ids", "soft_cap", "sinks", "bias", "scale"}


def explain_case(case: Case, tolerances: Tolerances) -> str:
    """Describe a case as text."""
    problem = draw_problem(case)
    named = regressions.find_regression(case.id)
    about = [f"Regression  {named.name}: {named.shows} ({named.reference})", ""] if named else []
    lines = [case.id, "", *about, *_describe_problem(case, problem), "", *_describe_tolerances(case, tolerances), ""]
    lines += [
        *_describe_margins(case, tolerances),
        "",
        "Run it:",
        f"  python -m conformance run --impl=NAME --case={case.id}",
    ]
    return "\n".join(lines)


def _describe_problem(case: Case, problem: Problem) -> list[str]:
    allowed = problem.allowed
    share = float(np.mean(allowed))
    lines = [
        f"Phase       {case.phase}: {FEATURES[case.phase]}",
        f"Operands    q [{case.batch}, {case.q_length}, {case.num_q_heads}, {case.head_dim}], "
        f"k [{case.batch}, {case.kv_length}, {case.num_kv_heads}, {case.head_dim}], "
        f"v [{case.batch}, {case.kv_length}, {case.num_kv_heads}, {case.v_head_dim}] in {case.dtype}",
        f"Heads       {case.num_q_heads // case.num_kv_heads} query head(s) to each key/value head",
        f"Values      {_DISTRIBUTIONS[case.distribution]}; seed {case.seed}",
        f"Mask        {case.mask} ({', '.join(FEATURES[name] for name in mask_spec.list_mask_features(case.mask))})",
        f"            with segment ids, {share:.1%} of all pairs are allowed, "
        f"{int(problem.empty_rows.sum())} rows may attend to nothing, "
        f"{int(problem.dead_keys.sum())} keys are hidden from every query",
        f"Scale       {problem.effective_scale:.6g}{' (1/sqrt(H))' if case.scale is None else ''}",
    ]
    if problem.tied:
        lines.append(f"Latent      the first {case.v_head_dim} of {case.head_dim} coordinates of k are v")
    if problem.storage is not None:
        lines += _describe_storage(case, problem.storage)
    if problem.segment_ids is not None:
        kinds = {
            "segpad": ", with padding on both sides",
            "segwild": ", with ids from -2**31 to 2**31 - 1, and ids that recur",
            "segmany": ", of one to twelve positions each",
            "segamid": ": text under one id, with pictures in between under other ids",
        }
        padding = kinds.get(case.segments or "", "")
        lines.append(f"Segments    packed sequences, ids not monotone{padding}")
    if case.soft_cap is not None:
        lines.append(
            f"Soft cap    {case.soft_cap:g} * tanh(x / {case.soft_cap:g}), after scale and bias, before the mask"
        )
    if problem.sinks is not None:
        sinks = ", ".join(f"{sink:.2f}" for sink in problem.sinks)
        lines.append(f"Sinks       one logit a query head: {sinks}")
    if problem.bias is not None:
        lines.append(f"Bias        shape {list(problem.bias.shape)} in {roundoff.get_dtype_name(problem.bias.dtype)}")
    if more := [FEATURES[name] for name in case.features if name in OPERAND_FEATURES - _DESCRIBED_OPERANDS]:
        lines.append(f"With        {'; '.join(more)}")
    return lines


def _describe_storage(case: Case, stored: Storage) -> list[str]:
    """Describe how the operands of a stored case are laid out in memory."""
    sequences = ", ".join(f"{q} of {n}" for q, n in zip(case.q_lengths, case.kv_lengths, strict=True))
    form, total = FORMS[stored.form], stored.q_rows.size
    where = "" if form.describe_layout is None else form.describe_layout(stored)
    rows = next(len(table) - name.startswith("cu_") for name, table in stored.tables.items())
    return [
        f"Storage     {form.description}",
        f"            queries of keys: {sequences}; the queries of a sequence are the last of T={case.q_length}",
        f"            {total} stored queries, {total - sum(case.q_lengths)} of them padding; {where}; "
        f"tables for {rows} sequences, of which there are {case.batch}",
    ]


def _describe_tolerances(case: Case, tolerances: Tolerances) -> list[str]:
    lines = ["Judged by the largest |got - expected| / bound over the elements, and if there are enough of them by the"]
    lines.append(
        "root mean square. The bound is the first-order rounding error of each element "
        "(conformance/truth/rounding_bounds.py)."
    )
    for row in tolerances.rows():
        if row["dtype"] == case.dtype:
            lines.append(f"  {row['observable']:<15} max {row['limit']:<5g} rms {row['rms_limit']:<5g} {row['source']}")
    return lines


def _describe_margins(case: Case, tolerances: Tolerances) -> list[str]:
    def never(*args: object, **options: object) -> None:
        raise NotImplementedError

    declared = Implementation(name="oracle", call=never, arithmetic=Arithmetic(), empty_rows="zero")
    margins = discrimination.compute_margins(Subject(Executor(declared), case, tolerances))
    lines = [
        "Simple wrong results that must fail this case, with their ratio in units of the limit "
        f"(at least {discrimination.REQUIRED_MARGIN:g} is required):"
    ]
    lines += [f"  {name:<22} {margin:.3g}" for name, margin in sorted(margins.items(), key=lambda item: item[1])]
    return lines
