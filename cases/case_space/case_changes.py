"""Change one number or one property of a case, and keep the case valid and cheap.

The search for cases that reach a kernel's branches (`conformance.executor_tasks.branch_search`) makes its cases so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cases.case import Case, CaseIdError
from cases.case_space.alternatives import MASKS, NothingToDraw, Supports, build_space
from cases.operand_registry import OPTIONAL

Number = int | float

_LENGTHS = ("T", "S", "TS")
_SIZES = ("T", "S", "TS", "B", "N", "K", "G", "H", "V", "HV")
_MASK_NUMBER = re.compile(r"\d+")
_LONGEST = 2**17
_DEEPEST = 1024
# A case that is judged takes about a second at these limits.
_MAX_PAIRS = 2**21
_MAX_ELEMENTS = 2**23
# What a case with one large size is reduced to until it is cheap, in this order.
_REDUCTIONS: tuple[tuple[str, int], ...] = (("B", 1), ("G", 1), ("K", 1), ("HV", 16), ("T", 8), ("T", 1), ("S", 64))
_OPEN_WINDOWS = "window-linf-r5", "window-l31-rinf"
_KEPT = ("phase", "seed", "storage", "q_length", "kv_length", "head_dim", "v_head_dim")
_SHARED = {"TS": {"T", "S"}, "N": {"N", "K", "G"}, "K": {"N", "K"}, "G": {"N", "G"}, "HV": {"H", "V"}}


def list_numbers(case: Case) -> Mapping[str, Number]:
    """List the numbers of a case that `change_number` changes, by name.

    They are its sizes, the numbers of its mask, its soft cap and its scale. `TS` stands for both lengths at once, `HV`
    for both depths, and `G` for the heads of a group.
    """
    found: dict[str, Number] = {name: _get_size(case, name) for name in _SIZES if _has_size(case, name)}
    found |= {f"mask{place}": int(number[0]) for place, number in enumerate(_MASK_NUMBER.finditer(case.mask))}
    found |= {name: value for name in ("soft_cap", "scale") if (value := getattr(case, name)) is not None}
    return found


def change_number(case: Case, name: str, value: Number) -> Case | None:
    """Return the case with another number, adapted to be valid and cheap; None if there is none."""
    if name in ("soft_cap", "scale"):
        return _build(case, {name: float(value)}) if 0 < value < 1e6 else None
    whole = round(value)
    if name.startswith("mask"):
        numbers = list(_MASK_NUMBER.finditer(case.mask))
        place = int(name[4:])
        if not 0 <= whole <= _LONGEST or place >= len(numbers):
            return None
        start, end = numbers[place].span()
        return _build(case, {"mask": f"{case.mask[:start]}{whole}{case.mask[end:]}"})
    if not 1 <= whole <= (_LONGEST if name in (*_LENGTHS, "B") else _DEEPEST):
        return None
    changed = _set_size(case, name, whole)
    return None if changed is None else _make_cheap(changed, kept=_SHARED.get(name, {name}))


def list_properties(case: Case, supports: Supports) -> Iterator[Case]:
    """Yield the case with another dtype, phase, mask or optional operand, or without one, one change at a time."""
    try:
        space = build_space(supports)
    except NothingToDraw:  # a kernel that takes operands in a storage form supports no dense case
        for dtype in ("bf16", "f16", "f32"):
            yield from _iter_built(case, {"dtype": dtype})
        return
    changes: list[dict[str, Any]] = [{"dtype": dtype} for dtype in space.dtypes]
    for operand in OPTIONAL:
        usual = [level for level in (operand.absent, *operand.grid_levels) if level in space.operands[operand.field]]
        changes += [{operand.field: level} for level in usual]
    changes += [{"mask": MASKS[kind]} for kind in space.masks]
    changes += [{"mask": mask} for mask in _OPEN_WINDOWS if "window" in space.masks]
    changes += [{"mask": f"{MASKS[kind]}-o3"} for kind in space.offsets]
    changes += [{"phase": phase} for phase in space.phases]
    changes += [{"phase": "decode", "q_length": 1}] if "decode" in space.phases else []
    for change in changes:
        yield from _iter_built(case, change)


def reduce_case(case: Case) -> Iterator[Case]:
    """Yield plainer forms of a case, one change at a time: smaller sizes, f32, no mask, no operand."""
    plain = Case()
    for field in dataclasses.fields(Case):
        value, other = getattr(case, field.name), getattr(plain, field.name)
        if field.name not in _KEPT and value != other:
            yield from _iter_built(case, {field.name: other})
    for name, value in (("TS", 128), ("T", 16), ("S", 64), ("HV", 16)):
        if _has_size(case, name) and _get_size(case, name) > value and (changed := _set_size(case, name, value)):
            yield changed


def _iter_built(case: Case, change: Mapping[str, Any]) -> Iterator[Case]:
    if (changed := _build(case, change)) is not None and changed != case:
        yield changed


def _has_size(case: Case, name: str) -> bool:
    if name == "TS":
        return case.q_length == case.kv_length
    return name != "HV" or case.head_dim == case.v_head_dim


def _get_size(case: Case, name: str) -> int:
    return {
        "T": case.q_length,
        "S": case.kv_length,
        "TS": case.q_length,
        "B": case.batch,
        "N": case.num_q_heads,
        "K": case.num_kv_heads,
        "G": case.num_q_heads // case.num_kv_heads,
        "H": case.head_dim,
        "V": case.v_head_dim,
        "HV": case.head_dim,
    }[name]


def _set_size(case: Case, name: str, value: int) -> Case | None:
    """Return the case with another size: `N` keeps `K` if it can, `K` keeps the heads of a group."""
    group = case.num_q_heads // case.num_kv_heads
    kept = case.num_kv_heads if value % case.num_kv_heads == 0 else value
    changes = {
        "T": {"q_length": value},
        "S": {"kv_length": value},
        "TS": {"q_length": value, "kv_length": value},
        "B": {"batch": value},
        "N": {"num_q_heads": value, "num_kv_heads": kept},
        "K": {"num_q_heads": value * group, "num_kv_heads": value},
        "G": {"num_q_heads": value * case.num_kv_heads},
        "H": {"head_dim": value},
        "V": {"v_head_dim": value},
        "HV": {"head_dim": value, "v_head_dim": value},
    }
    return _build(case, changes[name])


def _make_cheap(case: Case, kept: set[str]) -> Case | None:
    """Reduce sizes other than the `kept` ones until the case is cheap to judge; None if it stays too large."""
    for name, value in _REDUCTIONS:
        if _is_cheap(case):
            break
        shared = _SHARED.get(name, {name})
        if not shared & kept and _get_size(case, name) > value:
            case = _set_size(case, name, value) or case
    return case if _is_cheap(case) else None


def _is_cheap(case: Case) -> bool:
    depth = case.head_dim + case.v_head_dim
    tokens = case.batch * (case.q_length * case.num_q_heads + case.kv_length * case.num_kv_heads)
    pairs = case.batch * case.num_q_heads * case.q_length * case.kv_length
    return tokens * depth <= _MAX_ELEMENTS and pairs <= _MAX_PAIRS


def _build(case: Case, changes: Mapping[str, Any]) -> Case | None:
    """Return the case with these changes, with another mask if its own no longer fits; None if there is none."""
    for mask in _list_masks(case, changes):
        try:
            return dataclasses.replace(case, **{**changes, "mask": mask})
        except CaseIdError:
            continue
    return None


def _list_masks(case: Case, changes: Mapping[str, Any]) -> list[str]:
    """List masks for a changed case: with all keys or the last query at the last key still, as it is, causal, none."""
    if "mask" in changes:
        return [changes["mask"]]
    before = case.kv_length - case.q_length
    after = changes.get("kv_length", case.kv_length) - changes.get("q_length", case.q_length)
    moved = [case.mask.replace(f"-o{before}", f"-o{after}" if after else "")] if before and after >= 0 else []
    keys = changes.get("kv_length", case.kv_length)
    filled = (
        [f"{case.mask.removesuffix(f'-{case.kv_length}')}-{keys}"] if case.mask.endswith(f"-{case.kv_length}") else []
    )
    return [*filled, *moved, case.mask, "causal", "full"]
