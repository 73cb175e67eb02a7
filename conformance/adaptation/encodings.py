"""List how libraries pass each operand of the contract to their functions, as code of an adapter.

An `Encoding` is one way to pass an operand. Encodings with the same `reading` are forms of one meaning, such as None
and -1 for the open side of a window. Different readings are different meanings of the same parameter, such as a window
that counts the query's own key or does not. In the code of an encoding stand the names of the contract's operands as
they come to the adapter: `q [B, T, N, H]`, `mask`, `window` and so on, and `shape`, which is `(B, N, T, S)`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cases.parameter_names import is_tuning
from conformance.adaptation.target import Target


@dataclasses.dataclass(frozen=True)
class Encoding:
    """One way to pass an operand to a function.

    Attributes:
      arguments: the code of the value of each parameter.
      says: what the encoding means, for people.
      prelude: lines of code that the adapter runs first.
      reading: which meaning of the parameter this is; empty for the contract's.
      question: what is to be asked before this reading counts as meant; empty if nothing else would explain it.
      declarations: what `declare` says with it.
      imports: lines that the adapter's module needs.
      gives: the adapter's parameter, if it is another than the operand that is asked about.
      is_known: whether a library reads the parameter so. Other readings explain a result, and are never adopted.
      is_fallback: whether it says less than the encodings before it, and is only tried if none of these passes.
    """

    arguments: Mapping[str, str]
    says: str
    prelude: tuple[str, ...] = ()
    reading: str = ""
    question: str = ""
    declarations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    imports: tuple[str, ...] = ()
    gives: str = ""
    is_known: bool = True
    is_fallback: bool = False


def list_encodings(target: Target, operand: str) -> list[Encoding]:
    """List the ways in which a function may take an operand, the likeliest first; none without a parameter for it."""
    parameters = target.find_parameters(operand)
    return list(_ENCODINGS[operand](target, parameters)) if parameters and operand in _ENCODINGS else []


def write_code(value: Any) -> str:
    """Write a default as code."""
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def write_off(target: Target, parameter: str, code: str, name: str) -> str:
    """Return the code that passes `code` where the operand `name` is given, and else what turns the parameter off."""
    default = target.get_default(parameter)
    if default is None:
        return f"None if {name} is None else {code}" if code != name else name
    if isinstance(default, int | float | tuple | str):
        return f"{write_code(default)} if {name} is None else {code}"
    return f"None if {name} is None else {code}"


def _list_causal(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    parameter = parameters[0]
    yield Encoding({parameter: "causal"}, "first query at the first key, if the lengths differ")
    yield Encoding(
        {parameter: "causal"},
        "last query at the last key, if the lengths differ",
        reading="end",
        question="causal is aligned at the end, as in flash-attention since 2.1, MLX and ejkernel's decoding; at the "
        "start in jax.nn, torch and cuDNN. Is the end meant?",
        declarations={"causal": "end"},
    )
    yield Encoding(
        {parameter: "causal"},
        "equal lengths only",
        prelude=(
            "if causal and q.shape[1] != k.shape[1]:",
            '    raise NotImplementedError("causal attention has equal lengths")',
        ),
        question="causal attention is aligned neither at the start nor at the end if the lengths differ. Is it meant "
        "for equal lengths only?",
        reading="equal lengths",
        is_fallback=True,
    )


def _list_scale(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    parameter, default = parameters[0], "q.shape[-1] ** -0.5"
    if target.get_default(parameter) is None and not target.is_required(parameter):
        yield Encoding({parameter: "scale"}, "factor of <q, k>; 1 / sqrt(H) by default")
    yield Encoding({parameter: f"{default} if scale is None else scale"}, "factor of <q, k>, always passed")
    yield Encoding(
        {parameter: "q.shape[-1] ** 0.5 if scale is None else 1 / scale"},
        "divisor of <q, k>",
        reading="divisor",
        question=f"{parameter} divides <q, k>. Is that meant?",
    )
    yield Encoding(
        {parameter: "1.0 if scale is None else scale * q.shape[-1] ** 0.5"},
        "a factor beside 1 / sqrt(H)",
        reading="beside",
        question=f"{parameter} multiplies <q, k> / sqrt(H). Is that meant?",
    )


def _list_soft_cap(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    parameter = parameters[0]
    default = target.get_default(parameter)
    off = "soft_cap" if default is None else f"{write_code(default)} if soft_cap is None else soft_cap"
    yield Encoding({parameter: off}, f"soft_cap * tanh(x / soft_cap); {write_code(default)} is off")


def _list_window(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    if len(parameters) == 2:
        left, right = sorted(parameters, key=lambda name: "right" in name)
        for open_side, says in (("None", "None"), ("-1", "-1"), ("max(q.shape[1], k.shape[1])", "the length")):
            code = "{open} if window is None or window[{n}] is None else window[{n}]"
            yield Encoding(
                {name: code.format(open=open_side, n=n) for n, name in enumerate((left, right))},
                f"keys beside the query's own to the left and right; {says} is open",
            )
        return
    parameter = parameters[0]
    default = target.get_default(parameter)
    if default is None:
        for open_sides, says in ((None, "None"), (-1, "-1"), ("length", "the length")):
            declarations = {} if open_sides is None else {"open_sides": open_sides}
            yield Encoding(
                {parameter: "window"},
                f"(left, right), keys beside the query's own; {says} is open",
                declarations=declarations,
            )
    elif isinstance(default, tuple):
        code = f"{write_code(default)} if window is None else tuple(-1 if side is None else side for side in window)"
        yield Encoding({parameter: code}, "(left, right), keys beside the query's own; -1 is open")
    if isinstance(default, tuple) or default is None:
        # Readings that no library has; they say how a wrong window is wrong.
        for change, counts in (("+ 1", "counts the query's own key"), ("- 1", "reaches one key further")):
            both = f"tuple(None if side is None else side {change} for side in window)"
            for sides, says in (
                (both, "(left, right), each"),
                (f"(window[0] {change}, window[1])", "(left, right), left"),
            ):
                code = write_off(target, parameter, sides, "window")
                yield Encoding({parameter: code}, f"{says} {counts}", reading=f"{says} {counts}", is_known=False)
    if not isinstance(default, tuple):
        yield from _list_one_sided_windows(target, parameter)


def _list_one_sided_windows(target: Target, parameter: str) -> Iterator[Encoding]:
    """List readings of a window that is one number of keys."""
    off = "None" if target.get_default(parameter) is None else write_code(target.get_default(parameter))
    sets_causal = bool(target.find_parameters("causal"))
    readings = (
        (1, "counts the query's own key, as in transformers and keras"),
        (0, "does not count the query's own key, as local_window_size of jax.nn"),
    )
    shapes = (
        (
            "causal or both sides",
            "window[1] not in (0, window[0])",
            "causal = causal or window is not None and window[1] == 0",
        ),
        ("causal", "window[1] != 0", "causal = causal or window is not None"),
        ("left only", "window[1] is not None", ""),
    )
    for (shape, refused, prelude), (more, counts) in itertools.product(shapes, readings):
        width = "window[0] + 1" if more else "window[0]"
        lines = [
            f"if window is not None and {refused}:",
            f'    raise NotImplementedError("{parameter} is one number of keys: {shape}")',
        ]
        if prelude and sets_causal:
            lines.append(prelude)
        code = f"{off} if window is None or window[0] is None else {width}"
        if shape != "left only" and not sets_causal:
            code = code.replace(" or window[0] is None", "")
        yield Encoding(
            {parameter: code},
            f"one number, which {counts.split(',')[0]}; {shape}",
            prelude=tuple(lines),
            reading=f"{shape} {more}",
            question=f"{parameter} {counts}; other libraries read it the other way. Is it meant so?",
            is_fallback=True,
        )


def _list_masks(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    parameter = parameters[0]
    required = target.is_required(parameter)
    forms = (
        ("as it is", "mask", "jnp.ones((1, 1, 1, 1), bool)"),
        ("[B, N, T, S]", "jnp.broadcast_to(mask, shape)", "jnp.ones(shape, bool)"),
        (
            "[B, 1 or N, T, S]",
            "jnp.broadcast_to(mask, (shape[0], mask.shape[1], *shape[2:]))",
            "jnp.ones((shape[0], 1, *shape[2:]), bool)",
        ),
        (
            "[B, T, S]",
            "jnp.broadcast_to(mask, (shape[0], mask.shape[1], *shape[2:]))[:, 0]",
            "jnp.ones((shape[0], *shape[2:]), bool)",
        ),
        ("[T, S]", "jnp.broadcast_to(mask, (*mask.shape[:2], *shape[2:]))[0, 0]", "jnp.ones(shape[2:], bool)"),
    )
    meanings: tuple[tuple[str, Callable[[str], str], str], ...] = (
        ("", lambda x: x, "True keeps"),
        ("drops", lambda x: f"~{x}", "True drops"),
        ("added", lambda x: f"jnp.where({x}, 0.0, -1e30)", "added to the logits"),
        ("added inf", lambda x: f"jnp.where({x}, 0.0, -jnp.inf)", "added to the logits, -inf hides"),
    )
    for (reading, convert, says), (form, code, all_kept) in itertools.product(meanings, forms):
        prelude: tuple[str, ...] = ()
        if form in ("[B, T, S]", "[T, S]"):
            axes = "mask.shape[1] != 1" if form == "[B, T, S]" else "mask.shape[:2] != (1, 1)"
            prelude = (
                f"if mask is not None and {axes}:",
                f'    raise NotImplementedError("{parameter} is {form}")',
            )
        if required:
            value = f"{convert(all_kept)} if mask is None else {convert(code)}"
        else:
            value = write_off(target, parameter, convert(code), "mask")
        yield Encoding(
            {parameter: value},
            f"{says}; {form}",
            prelude=prelude,
            reading=reading,
            question=f"in {parameter}, True drops a key. Is that meant?" if reading == "drops" else "",
        )
    for dtype, (keeps, reading) in itertools.product(("bool", "jnp.int32"), (("<", ""), (">=", "drops"))):
        kept = f"(jnp.arange(shape[3]) {keeps} kv_lengths[:, None]).astype({dtype})"
        all_kept = f"jnp.{'ones' if keeps == '<' else 'zeros'}((shape[0], shape[3]), {dtype})"
        off = all_kept if required else "None"
        yield Encoding(
            {parameter: f"{off} if kv_lengths is None else {kept}"},
            f"a mask of keys, [B, S]; {'true' if keeps == '<' else 'false'} keeps",
            reading=reading,
            gives="kv_lengths",
            question=f"in {parameter}, True drops a key. Is that meant?" if reading else "",
        )


def _list_biases(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    parameter = parameters[0]
    full = "jnp.broadcast_to(bias, shape)"
    over = "(q.shape[-1] ** -0.5 if scale is None else scale)"
    for form, code in (
        ("as it is", "bias"),
        ("[B, N, T, S]", full),
        ("[B, N, T, S] in q's dtype", f"{full}.astype(q.dtype)"),
    ):
        yield Encoding({parameter: write_off(target, parameter, code, "bias")}, f"added after the scale; {form}")
    yield Encoding(
        {parameter: write_off(target, parameter, f"{full} / {over}", "bias")},
        "added before the scale; [B, N, T, S]",
        reading="before the scale",
        question=f"{parameter} is added before the scale, as `ab` of JAX's TPU kernel. Is that meant?",
    )


def _list_segment_ids(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    if len(parameters) >= 2:
        q_ids = next((name for name in parameters if name.startswith(("q", "Q"))), parameters[0])
        kv_ids = next(name for name in parameters if name != q_ids)
        codes = {name: f"None if segment_ids is None else segment_ids[{n}]" for n, name in enumerate((q_ids, kv_ids))}
        yield Encoding(codes, "ids of queries and of keys")
        yield Encoding(
            codes,
            "ids of queries and of keys; negative ids are padding",
            declarations={"negative_ids": "padding"},
            question="tokens with a negative segment id attend to nothing, as in ejkernel. Is that meant?",
        )
        return
    parameter = parameters[0]
    if (kind := target.find_type(parameter, "SegmentIds")) is not None:
        yield Encoding(
            {parameter: "None if segment_ids is None else SegmentIds(*segment_ids)"},
            "SegmentIds(q, kv)",
            imports=(f"from {kind.__module__} import SegmentIds",),
        )
    yield Encoding({parameter: "segment_ids"}, "a pair of ids of queries and keys")
    yield Encoding(
        {parameter: "None if segment_ids is None else segment_ids[0]"},
        "one array of ids, for queries and keys",
        prelude=(
            "if segment_ids is not None and q.shape[1] != k.shape[1]:",
            f'    raise NotImplementedError("{parameter} is one array for queries and keys")',
        ),
    )


def _list_lengths(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    yield Encoding(
        {parameters[0]: write_off(target, parameters[0], "kv_lengths", "kv_lengths")}, "lengths of keys, [B]"
    )


def _list_sinks(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    parameter = parameters[0]
    off = "jnp.full(shape[1], -jnp.inf)" if target.is_required(parameter) else "None"
    forms = (
        ("[N]", "sinks"),
        ("[N] in q's dtype", "sinks.astype(q.dtype)"),
        ("[N, 1]", "sinks[:, None]"),
        ("[1, N, 1, 1]", "sinks[:, None, None]"),
    )
    for form, code in forms:
        yield Encoding(
            {parameter: f"{off} if sinks is None else {code}" if off != "None" or code != "sinks" else code}, form
        )


def _list_slopes(target: Target, parameters: list[str]) -> Iterator[Encoding]:
    parameter = parameters[0]
    yield Encoding({parameter: "alibi_slopes"}, "[N], slopes of distances from the last key")
    batched = "jnp.broadcast_to(alibi_slopes, shape[:2])"
    yield Encoding({parameter: write_off(target, parameter, batched, "alibi_slopes")}, "[B, N]")


_ENCODINGS: Mapping[str, Callable[[Target, list[str]], Iterator[Encoding]]] = {
    "causal": _list_causal,
    "scale": _list_scale,
    "soft_cap": _list_soft_cap,
    "window": _list_window,
    "mask": _list_masks,
    "bias": _list_biases,
    "segment_ids": _list_segment_ids,
    "kv_lengths": _list_lengths,
    "sinks": _list_sinks,
    "alibi_slopes": _list_slopes,
}
"""The ways to pass each operand that is asked about, in the order of the questions."""

OPERANDS = tuple(_ENCODINGS)

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "causal": ("False", "True"),
    "scale": ("q.shape[-1] ** -0.5", "None"),
    "soft_cap": ("None", "0.0"),
    "window": ("None", "(-1, -1)", "-1"),
    "mask": (
        "None",
        "jnp.ones((1, 1, 1, 1), bool)",
        "jnp.ones(shape, bool)",
        "jnp.ones((shape[0], 1, *shape[2:]), bool)",
        "jnp.ones((shape[0], shape[3]), bool)",
        "jnp.ones((shape[0], shape[3]), jnp.int32)",
        "jnp.ones(shape[2:], bool)",
        "jnp.zeros(shape)",
        "jnp.zeros(shape, bool)",
    ),
    "bias": ("None", "jnp.zeros(shape)"),
    "segment_ids": ("None",),
    "kv_lengths": ("None", "jnp.full(shape[0], shape[3])"),
    "sinks": ("None", "jnp.full(shape[1], -jnp.inf)"),
    "save_residuals": ("False",),
}
"""The values, as code, that turn off an operand whose parameter has no default; they are tried in this order."""

_REQUIRED_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("head_dim", "d_k", "depth", "head_size", "dim_head"), ("q.shape[-1]",)),
    **dict.fromkeys(("num_heads", "num_q_heads", "n_heads", "heads", "num_attention_heads"), ("q.shape[2]",)),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_key_value_heads"), ("k.shape[2]",)),
    **dict.fromkeys(("dtype", "out_dtype", "output_dtype", "logits_dtype", "softmax_dtype"), ("q.dtype", "None")),
    **dict.fromkeys(("deterministic", "inference"), ("True",)),
    **dict.fromkeys(("train", "training", "is_training"), ("False",)),
    **dict.fromkeys(("dropout", "dropout_rate", "dropout_p", "dropout_prob", "attn_pdrop"), ("0.0",)),
    "mask_value": ("-1e30", "float('-inf')"),
    "interpret": ('jax.default_backend() == "cpu"',),
    "backend": ('"xla"', '"jax"', "None"),
    "float32_logits": ("True",),
}


def list_required_values(target: Target, parameter: str) -> tuple[str, ...]:
    """List the code of values to try for a parameter without a default."""
    if parameter in target.roles:
        return REQUIRED.get(target.roles[parameter], ("None",))
    if parameter in _REQUIRED_NAMES:
        return _REQUIRED_NAMES[parameter]
    if "block" in parameter or "chunk" in parameter or parameter in ("bq", "bk", "bkv"):
        length = "k.shape[1]" if "k" in parameter.replace("block", "").replace("chunk", "") else "q.shape[1]"
        return (f"min(128, {length})", f"min(64, {length})", "128", "64")
    return ("None", "False", "0")


def is_guess(target: Target, parameter: str) -> bool:
    """Return whether a value of a parameter without a default was guessed, and not taken from a known name."""
    known = parameter in target.roles or parameter in _REQUIRED_NAMES or is_tuning(parameter)
    return target.is_required(parameter) and not known


def list_fixed_values(target: Target) -> dict[str, str]:
    """Return values for parameters whose default is not what is to be judged: no dropout, interpreted on a CPU."""
    fixed = {}
    for name in target.parameters:
        default = target.get_default(name)
        if name in target.bound or name in target.roles or name in target.operands:
            continue
        if name == "interpret" and default is False:
            fixed[name] = 'jax.default_backend() == "cpu"'
        elif name.startswith("dropout") and isinstance(default, float) and default:
            fixed[name] = "0.0"
    return fixed
