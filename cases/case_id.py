"""Parse case ids, and match them with queries. `cases.case.Case.id` writes them."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from cases.case import Case, CaseIdError
from cases.operand_registry import OPTIONAL
from cases.storage_forms import form_registry

_SHAPE = re.compile(r"B(\d+)\.T(\d+)\.S(\d+)\.N(\d+)\.K(\d+)\.H(\d+)\.V(\d+)")
_DROPOUT = re.compile(r"dropout(\d+(?:\.\d+)?)")
_FRONT_END = re.compile(r"front-([a-z0-9-]+)")
_SEED = re.compile(r"s(\d+)")
_LONGEST = 4000  # most characters of an id; Python refuses to parse integers of more than 4,300 digits


def parse_case_id(text: str) -> Case:
    """Parse a case id. Raises `CaseIdError` naming the component that is wrong."""
    if len(text) > _LONGEST:
        raise CaseIdError(f"{text[:60]!r}... is not a case id: it has {len(text):,} characters, at most {_LONGEST:,}")
    components = text.strip().split("/")
    if len(components) < 6:
        raise CaseIdError(
            f"{text!r} is not a case id: it has {len(components)} components, at least 6 are needed: phase/dtype/shape/"
            f"mask/[{'/'.join(one.form for one in OPTIONAL)}/qfp8/dropoutP/{form_registry.SYNTAX}/front-STEPS/]"
            "distribution/sSEED"
        )
    phase, dtype, shape, mask, *options, distribution, seed = components
    sizes = _SHAPE.fullmatch(shape)
    if not sizes:
        raise CaseIdError(f"{shape!r} in {text!r} is not a shape such as B2.T128.S128.N4.K2.H64.V64")
    numbered = _SEED.fullmatch(seed)
    if not numbered:
        raise CaseIdError(f"{seed!r} in {text!r} is not a seed such as s7")
    b, t, s, n, k, h, v = map(int, sizes.groups())
    fields: dict[str, Any] = {}
    for option in options:
        name, value = _parse_option(option, text)
        if name in fields:
            raise CaseIdError(f"{option!r} in {text!r} sets {name} a second time")
        fields[name] = value
    return Case(
        phase=phase,
        dtype=dtype,
        batch=b,
        q_length=t,
        kv_length=s,
        num_q_heads=n,
        num_kv_heads=k,
        head_dim=h,
        v_head_dim=v,
        mask=mask,
        distribution=distribution,
        seed=int(numbered[1]),
        **fields,
    )


def _parse_option(option: str, text: str) -> tuple[str, Any]:
    """Parse an optional component into a field of the case and its value."""
    for operand in OPTIONAL:
        if (value := operand.read(option)) is not None:
            return operand.field, value
    if option == "qfp8":
        return "q_fp8", True
    if found := _DROPOUT.fullmatch(option):
        return "dropout_rate", float(found[1])
    if form_registry.read_storage(option) is not None:
        return "storage", option
    if found := _FRONT_END.fullmatch(option):
        return "front_end", found[1]
    known = [one for operand in OPTIONAL for one in operand.id_components]
    raise CaseIdError(
        f"{option!r} in {text!r} is none of {', '.join(known)}, qfp8, dropoutP, {form_registry.SYNTAX}, front-STEPS"
    )


def matches_query(query: str, case_id: str) -> bool:
    """Return whether `case_id` matches `query`.

    A query is the first components of a case id, with `*` for any run of characters: `train/bf16`, `train/*/causal`,
    `*/softcap*`. Trailing components may be left out.
    """
    pattern = query.strip().rstrip("/")
    return fnmatch.fnmatchcase(case_id, pattern) or fnmatch.fnmatchcase(case_id, f"{pattern}/*")
