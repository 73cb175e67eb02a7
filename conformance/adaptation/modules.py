"""Write a function that calls an attention module with projections that change nothing.

Modules project their inputs before they attend. With identity weights a module computes attention alone.
"""

from __future__ import annotations

import inspect
from typing import Any


class CannotAdapt(Exception):
    """No adapter can be written for an object; the message says why, and what to do."""


_INPUTS = "inputs = [x.reshape(*x.shape[:2], -1) for x in (q, k, v)]"
_OUT = "return out.reshape(*q.shape[:3], -1)"
_KERAS_CALL = (
    _INPUTS,
    "with jax.ensure_compile_time_eval():",
    "    module = {name}(**sizes, use_bias=False, dtype=q.dtype.name)",
    "    shapes = [(None, None, x.shape[2]) for x in inputs]",
    "    module.build(shapes[0], shapes[2], shapes[1])",
    "    weights = [initialize_identity(None, w.shape, q.dtype) for w in module.trainable_variables]",
    "options = dict(key=inputs[1], attention_mask=attention_mask, use_causal_mask=use_causal_mask)",
    "with jax.default_matmul_precision('highest'):",
    "    out, _ = module.stateless_call(",
    "        weights, module.non_trainable_variables, inputs[0], inputs[2], **options",
    "    )",
    _OUT,
)
_FORMS = {
    ("flax.linen", "MultiHeadDotProductAttention"): (
        ("mask",),
        (
            "sizes = dict(qkv_features=q.shape[2] * q.shape[3], out_features=q.shape[2] * v.shape[3])",
            "options = dict(dtype=q.dtype, use_bias=False, kernel_init=initialize_identity, precision='highest')",
            "module = {name}(q.shape[2], **sizes, **options)",
            _INPUTS,
            "out, _ = module.init_with_output(jax.random.key(0), *inputs, mask=mask)",
            _OUT,
        ),
    ),
    ("flax.nnx", "MultiHeadAttention"): (
        ("mask", "is_causal"),
        (
            "sizes = dict(in_features=q.shape[2] * q.shape[3], in_kv_features=k.shape[2] * k.shape[3])",
            "options = dict(param_dtype=q.dtype, use_bias=False, kernel_init=initialize_identity, precision='highest')",
            "heads = dict(num_heads=q.shape[2], num_kv_heads=k.shape[2])",
            "module = {name}(**heads, **sizes, **options, decode=False, rngs=nnx.Rngs(0))",
            _INPUTS,
            "out = module(*inputs, mask=mask, is_causal=is_causal)",
            _OUT,
        ),
    ),
    ("haiku", "MultiHeadAttention"): (
        ("mask",),
        (
            "def apply(*inputs):",
            "    sizes = dict(key_size=q.shape[3], value_size=v.shape[3], model_size=q.shape[2] * v.shape[3])",
            "    return {name}(q.shape[2], **sizes, w_init=make_identity, with_bias=False)(*inputs)",
            "",
            "def make_identity(shape, dtype):",
            "    return initialize_identity(None, shape, dtype)",
            "",
            _INPUTS,
            "module = haiku.transform(apply)",
            "with jax.default_matmul_precision('highest'):",
            "    out = module.apply(module.init(jax.random.key(0), *inputs, mask), None, *inputs, mask)",
            _OUT,
        ),
    ),
    ("equinox", "MultiheadAttention"): (
        ("mask",),
        (
            "size, v_size = q.shape[2] * q.shape[3], q.shape[2] * v.shape[3]",
            "sizes = dict(query_size=size, value_size=v_size, output_size=v_size)",
            "sizes |= dict(qk_size=q.shape[3], vo_size=v.shape[3])",
            "module = {name}(q.shape[2], **sizes, dtype=q.dtype, key=jax.random.key(0))",
            "weights, rest = equinox.partition(module, equinox.is_array)",
            "weights = jax.tree.map(lambda w: initialize_identity(None, w.shape, w.dtype), weights)",
            _INPUTS,
            "with jax.default_matmul_precision('highest'):",
            "    out = jax.vmap(equinox.combine(weights, rest))(*inputs, mask)",
            _OUT,
        ),
    ),
    ("keras", "MultiHeadAttention"): (
        ("attention_mask", "use_causal_mask"),
        (
            "sizes = dict(num_heads=q.shape[2], key_dim=q.shape[3], value_dim=v.shape[3])",
            "sizes['output_shape'] = q.shape[2] * v.shape[3]",
            *_KERAS_CALL,
        ),
    ),
    ("keras", "GroupedQueryAttention"): (
        ("attention_mask", "use_causal_mask"),
        (
            "sizes = dict(head_dim=q.shape[3], num_query_heads=q.shape[2], num_key_value_heads=k.shape[2])",
            *_KERAS_CALL,
        ),
    ),
}
"""The parameters of a call that an adapter may pass, and the code of the call, by package and class."""
_IMPORTS = {"flax.nnx": ("from flax import nnx",), "haiku": ("import haiku",), "equinox": ("import equinox",)}
_DEFAULTS = {"is_causal": "False", "use_causal_mask": "False"}


def is_module(found: Any) -> bool:
    """Return whether an object is a class of modules of flax, haiku, equinox or keras."""
    return inspect.isclass(found) and found.__module__.partition(".")[0] in ("flax", "haiku", "equinox", "keras")


def define_module_call(module: type, name: str, imported: tuple[str, ...], expression: str) -> tuple[str, ...]:
    """Write the imports and the definition of `call_module`, which calls a module as a function of q, k and v.

    Args:
      module: the class.
      name: the name by which users know it.
      imported: the lines that import it.
      expression: what the code calls it.

    Raises:
      CannotAdapt: if the class is none that is known.
    """
    found = [
        (package, form)
        for (package, kind), form in _FORMS.items()
        if kind == module.__name__ and _is_of(module, package)
    ]
    if not found:
        known = ", ".join(f"{package}.{kind}" for package, kind in _FORMS)
        raise CannotAdapt(f"{name} is a module; only {known} are known. Wrap it, as docs/how-to/other-layout.md shows")
    package, (options, lines) = found[0]
    signature = ", ".join(f"{one}={_DEFAULTS.get(one, 'None')}" for one in options)
    imports = ("import jax", "from conformance import initialize_identity", *_IMPORTS.get(package, ()), *imported)
    head = f"def call_module(q, k, v, *, {signature}):"
    about = '    """Call the module with projections that change nothing."""'
    return (*imports, "", "", head, about, *(f"    {line.format(name=expression)}" if line else "" for line in lines))


def _is_of(module: type, package: str) -> bool:
    top, _, inner = package.partition(".")
    own = module.__module__.split(".")
    return own[0] == top and (not inner or inner in own)
