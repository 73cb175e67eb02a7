"""Define what is known about a function (a `Recipe`), and write it as the Python code of an adapter."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from conformance.adaptation.encodings import Encoding
from conformance.adaptation.target import Target
from impls.contract.declarations import get_declaration

_WIDTH = 110
_DEFAULTS = {"causal": "False", "save_residuals": "False"}
_ORDER = (
    *("causal", "window", "kv_lengths", "mask", "segment_ids", "soft_cap", "sinks", "bias", "scale", "alibi_slopes"),
    "save_residuals",
)
_BATCHED = ("mask", "kv_lengths", "segment_ids", "bias")  # operands with an axis of batch rows


@dataclasses.dataclass(frozen=True)
class Layout:
    """The order of axes in which a function takes queries; keys and values have it with `S` and `V`.

    Attributes:
      axes: letters of the axes of queries as the function takes them. Without `B` the function takes one sequence, and
        without `N` one head, so that it is mapped over the others.
      code: what turns `x`, `[B, T, N, H]` or that without the mapped axes, into this layout.
    """

    axes: str
    code: str

    @property
    def mapped(self) -> str:
        """The axes over which the function is mapped by `jax.vmap`, the outer one first."""
        return "".join(letter for letter in "BN" if letter not in self.axes and letter.lower() not in self.axes)


LAYOUTS = (
    Layout("BTNH", "x"),
    Layout("BNTH", "x.swapaxes(1, 2)"),
    Layout("TBNH", "x.swapaxes(0, 1)"),
    Layout("TNH", "x"),
    Layout("NTH", "x.swapaxes(0, 1)"),
    Layout("TH", "x"),
    Layout("bTH", "x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])"),  # b is B times N
)
"""The layouts to try, the likeliest first."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The knowledge about a function: how its adapter calls it, and what it declares.

    Attributes:
      target: the function.
      layout: the order of axes of queries, keys and values.
      fixed: the code of values that each call passes, by parameter.
      encodings: how each operand is passed, by the adapter's parameter.
      scales_q: whether the adapter multiplies queries by the scale.
      is_causal: whether the function is causal in every call, although it has no parameter for it.
      out: the code that brings `result` to `out [B, T, N, V]`, in a call with residuals if there is a flag for them.
      plain_out: the code for a call without residuals, if there is a flag for them.
      residuals: the code that brings `result` to residuals, by name.
      flag: the parameter that asks for residuals; empty if there is none.
      declarations: what `declare` says.
      unsupported: features that it lacks, with the reason.
      refusals: lines of code that refuse calls.
      setup: lines of the adapter's module.
    """

    target: Target
    layout: Layout = LAYOUTS[0]
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    encodings: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)
    scales_q: bool = False
    is_causal: bool = False
    out: str = "result"
    plain_out: str = "result"
    residuals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flag: str = ""
    declarations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()

    def add(self, operand: str, encoding: Encoding) -> Recipe:
        """Return the recipe that also passes an operand."""
        return dataclasses.replace(
            self,
            encodings={**self.encodings, encoding.gives or operand: encoding},
            fixed={name: code for name, code in self.fixed.items() if name not in encoding.arguments},
            declarations={**self.declarations, **encoding.declarations},
        )

    def declare(self, **declarations: Any) -> Recipe:
        """Return the recipe that declares more; None takes a declaration back."""
        merged = {**self.declarations, **declarations}
        return dataclasses.replace(self, declarations={k: x for k, x in merged.items() if x is not None})

    def lack(self, feature: str, reason: str) -> Recipe:
        """Return the recipe that declares a feature unsupported."""
        return dataclasses.replace(self, unsupported={**self.unsupported, feature: reason})

    @property
    def parameters(self) -> tuple[str, ...]:
        """The adapter's optional parameters, in order."""
        given = {*self.encodings, *(("scale",) if self.scales_q else ()), *(("causal",) if self.is_causal else ())}
        given |= {"save_residuals"} if self.residuals else set()
        return tuple(name for name in _ORDER if name in given)


def write_adapter(recipe: Recipe, questions: tuple[str, ...] = ()) -> str:
    """Write the module of an adapter."""
    body = _write_body(recipe)
    declared = _write_declarations(recipe, questions)
    imports = [line for encoding in recipe.encodings.values() for line in encoding.imports]
    lines = [f'"""An adapter of `{recipe.target.name}`, found out by `python -m conformance adapt`."""', ""]
    used = [
        line
        for line, name in (("import jax", "jax."), ("import jax.numpy as jnp", "jnp."))
        if re.search(rf"\b{re.escape(name)}", "\n".join((*recipe.setup, *body)))
    ]
    used += ["from conformance import declare"] if declared else []
    used = [line for line in used if line not in recipe.target.imports]
    lines += [*used, *recipe.target.imports, *dict.fromkeys(imports), *recipe.setup, "", ""]
    options = ", ".join(f"{name}={_DEFAULTS.get(name, 'None')}" for name in recipe.parameters)
    if recipe.is_causal:
        options = options.replace("causal=False", "causal=True")
    signature = f"def attention(q, k, v{', *, ' if options else ''}{options}):"
    indented = (f"    {line}".rstrip() for line in body)
    return "\n".join([*lines, *([declared] if declared else []), signature, *indented, ""])


def _write_declarations(recipe: Recipe, questions: tuple[str, ...]) -> str:
    values = {name: [_write_value(value)] for name, value in recipe.declarations.items()}
    if recipe.unsupported:
        entries = [f"{_write_value(name)}: {_write_value(reason)}" for name, reason in recipe.unsupported.items()]
        values["unsupported"] = ["{", *entries, "}"]
    if questions:
        values["open_questions"] = ["(", *map(_write_value, questions), ")"]
    if not values:
        return ""
    flat = ", ".join(f"{name}={''.join(lines)}" for name, lines in values.items())
    if len(flat) < _WIDTH - 10 and all(len(lines) == 1 for lines in values.values()):
        return f"@declare({flat})"
    written = []
    for name, (first, *rest) in values.items():
        written.append(f"    {name}={first}" + ("" if rest else ","))
        written += [f"        {line}," for line in rest[:-1]] + [f"    {line}," for line in rest[-1:]]
    return "\n".join(["@declare(", *written, ")"])


def _write_value(value: Any) -> str:
    """Write a value as code, with double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _write_body(recipe: Recipe) -> list[str]:
    target = recipe.target
    arguments = dict(target.bound)
    arguments |= recipe.fixed
    for encoding in recipe.encodings.values():
        arguments |= encoding.arguments
    if recipe.residuals and recipe.flag:
        arguments[recipe.flag] = "save_residuals"
    prelude = list(recipe.refusals)
    if recipe.is_causal:
        full = "not causal and (window is None or window[1] != 0)" if "window" in recipe.encodings else "not causal"
        prelude += [f"if {full}:", '    raise NotImplementedError("attention is always causal")']
    for encoding in recipe.encodings.values():
        prelude += [line for line in encoding.prelude if line not in prelude]
    code = " ".join([*prelude, *arguments.values(), recipe.out, *recipe.residuals.values()])
    if re.search(r"(?<!\.)\bshape\b", code):
        prelude.insert(0, "shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])  # [B, N, T, S]")
    if recipe.scales_q:
        prelude.append("q = q * (q.shape[-1] ** -0.5 if scale is None else scale)")
    mapped = recipe.layout.mapped
    batched = [name for name in _BATCHED if name in recipe.encodings] if "B" in mapped else []
    if mapped:
        return [*prelude, *_write_mapped_call(recipe, arguments, batched)]
    if recipe.layout.code != "x":
        # The code of arguments reads shapes of the contract's layout, so operands keep their names until the call.
        values = ["q_", "k_", "v_"]
        prelude.append(f"{', '.join(values)} = ({recipe.layout.code} for x in (q, k, v))")
    else:
        values = ["q", "k", "v"]
    return [*prelude, *_write_result(recipe, _write_call(target, values, arguments))]


def _write_call(target: Target, values: list[str], arguments: Mapping[str, str], indent: str = "") -> list[str]:
    """Write the call of the function as lines; the first begins with its name."""
    if target.takes_operands_first:
        given = list(values)
    else:
        given = [f"{name}={value}" for name, value in zip(target.operands, values, strict=True)]
    positional = [p.name for p in target.parameters.values() if p.kind is p.POSITIONAL_ONLY]
    for name in positional:
        if name in arguments and name not in target.operands:
            given.append(arguments[name])
    given += [f"{name}={code}" for name, code in arguments.items() if name not in positional]
    flat = f"{target.expression}({', '.join(given)})"
    if len(flat) + len(indent) < _WIDTH - 14:
        return [flat]
    head = [", ".join(given[:3]) + ","] if target.takes_operands_first else [f"{one}," for one in given[:3]]
    return [f"{target.expression}(", *(f"    {line}" for line in (*head, *(f"{one}," for one in given[3:]))), ")"]


def _write_mapped_call(recipe: Recipe, arguments: Mapping[str, str], batched: list[str]) -> list[str]:
    """Write a call that is mapped over batch rows, and over heads too for a function of one head."""
    layout = recipe.layout
    # The code of arguments reads shapes of the contract's layout, so the mapped operands have other names.
    values = [re.sub(r"\bx\b", f"{name}_", layout.code) for name in "qkv"]
    inner = _write_call(recipe.target, values, arguments)
    lines = [f"def call({', '.join(('q_', 'k_', 'v_', *batched))}):"]
    lines += [f"    return {inner[0]}", *(f"    {line}" for line in inner[1:]), ""]
    if layout.mapped == "BN":
        over = "jax.vmap(jax.vmap(call, in_axes=1, out_axes=1))(q, k, v)"
    else:
        axes = "".join(f", None if {name} is None else 0" for name in batched)
        over = (
            f"jax.vmap(call{f', in_axes=(0, 0, 0{axes})' if batched else ''})({', '.join(('q', 'k', 'v', *batched))})"
        )
    return [*lines, *_write_result(recipe, [over])]


def _write_result(recipe: Recipe, call: list[str]) -> list[str]:
    if not recipe.residuals:
        if recipe.out == "result":
            return [f"return {call[0]}", *call[1:]]
        if re.fullmatch(r"result[\w.(), \[\]'-]*", recipe.out) and recipe.out.count("result") == 1:
            *first, last = call
            tail = recipe.out.removeprefix("result")
            return [f"return {line}" if n == 0 else line for n, line in enumerate([*first, last + tail])]
        return [f"result = {call[0]}", *call[1:], f"return {recipe.out}"]
    residuals = ", ".join(f'"{name}": {code}' for name, code in recipe.residuals.items())
    lines = [f"result = {call[0]}", *call[1:]]
    if recipe.flag:
        lines += ["if not save_residuals:", f"    return {recipe.plain_out}"]
        return [*lines, f"return {recipe.out}, {{{residuals}}}"]
    lines.append(f"out = {recipe.out}")
    return [*lines, f"return (out, {{{residuals}}}) if save_residuals else out"]


def load_adapter(recipe: Recipe) -> Callable[..., Any]:
    """Run the code of the adapter, and return its function."""
    alone = dataclasses.replace(recipe.target, imports=())
    source = write_adapter(dataclasses.replace(recipe, target=alone))
    first = recipe.target.expression.partition(".")[0]
    space: dict[str, Any] = {"__name__": "conformance_adapter", first: _find_root(recipe.target)}
    exec(compile(source, f"<adapter of {recipe.target.name}>", "exec"), space)
    function: Callable[..., Any] = space["attention"]
    get_declaration(function)
    return function


def _find_root(target: Target) -> Any:
    """Return what the first name of the adapter's expression stands for: the function, or what has it as attribute."""
    if "." not in target.expression:
        return target.function

    class Holder:
        pass

    root: Any = Holder()
    place = root
    *middle, last = target.expression.split(".")[1:]
    for name in middle:
        setattr(place, name, Holder())
        place = getattr(place, name)
    setattr(place, last, target.function)
    return root
