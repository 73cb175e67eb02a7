"""Write strict JSON, which has no infinities and no NaN: they become the strings `inf`, `-inf` and `nan`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct


def serialize_strict_json(data: Mapping[str, Any]) -> str:
    """Serialize data to one line of strict JSON, infinities and NaN as strings."""
    return json.dumps(_encode_value(dict(data)), allow_nan=False)


def _encode_value(value: Any) -> Any:
    if isinstance(value, Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {name: _encode_value(item) for name, item in value.items() if item is not UNSET}
    if isinstance(value, list | tuple):
        return [_encode_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):  # a path that is not UTF-8 has lone surrogates, which UTF-8 cannot encode
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return value
