"""Each claim of the tables of foreign conventions holds for the function itself, and no other answer would.

A library that is not installed is skipped. A nightly test asks the libraries of `impls/libraries` in environments of
their own. torch and onnxruntime (with onnx) are asked where they are installed.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.survey import environments
from impls.libraries.library_specs import load_libraries
from website import foreign_conventions as table

JAX, NNX, LINEN, KERAS, KERAS_LAYER, HAIKU, EQUINOX = (
    *("jax.nn", "flax.nnx", "flax.linen", "keras.ops", "keras.layers", "haiku", "equinox"),
)
EJ_ATTENTION, EJ_FLASH, EJ_SPARSE = "ejkernel.attention", "ejkernel.flash", "ejkernel.blocksparse"
TOKAMAX, SPLASH, MHA, TORCH, ONNX = "tokamax", "splash", "pallas.mha", "torch", "onnxruntime"
Call = Callable[..., Any]
AXES, SCALE, DEFAULT, CAUSAL, WINDOW, MASK, CAP, EMPTY, LOGSUMEXP, SINK, SOFTMAX = dict.fromkeys(
    one.question for one in table.ANSWERS
)
TOLERANCE = 2e-3  # of results near 1; another answer is off by hundreds of times as much
B, H = 2, 16


def sizes(function: str) -> tuple[int, int, int]:
    """Return the numbers of queries, keys and heads that a function takes; kernels want whole blocks."""
    return (128, 256, 2) if function in (SPLASH, MHA) else (6, 9, 4)


def load(function: str) -> Call:
    """Load a function as a call of its own arguments, in its own layout; skip where its library is not installed."""
    package = {"jax": "jax", "flax": "flax", "pallas": "jax", "splash": "jax"}.get(function.partition(".")[0])
    package = package or function.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: its conventions were not asked")
    return LOADERS[function]()


def load_named(function: str) -> Call:
    module, _, name = table.FUNCTIONS[function].rpartition(".")
    call: Call = getattr(importlib.import_module(module), name)
    return call


def load_ejkernel(name: str) -> Call:
    call: Call = getattr(importlib.import_module(f"ejkernel.kernels._xla.{name}"), name)

    def attention(*operands: Any, **options: Any) -> Any:
        # `attention` computes in bf16 unless it is told.
        result = call(*operands, **options, **({"dtype": operands[0].dtype} if name == "attention" else {}))
        return result[0] if isinstance(result, tuple) else result

    return attention


def load_splash() -> Call:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    def attention(q: Any, k: Any, v: Any, *, sinks: Any = None, **options: Any) -> Any:
        mask = masks.MultiHeadMask([masks.FullMask((q.shape[1], k.shape[1]))] * q.shape[0])
        kernel = kernels.make_splash_mha(mask, head_shards=1, q_seq_shards=1, interpret=True, **options)
        return kernel(q, k, v, **({} if sinks is None else {"sinks": sinks}))

    return attention


def load_mha() -> Call:
    from jax.experimental.pallas.ops.gpu import attention as kernels

    blocks = kernels.BlockSizes(block_q=64, block_k=64)
    return lambda q, k, v, **options: kernels.mha(q, k, v, None, block_sizes=blocks, interpret=True, **options)


def load_keras_layer() -> Call:
    from impls.libraries.identity_projections import initialize_identity

    adapter: Any = importlib.import_module("impls.libraries.keras")

    def attention(q: Any, k: Any, v: Any, *, sliding_window: int | None = None, **options: Any) -> Any:
        depth, heads = H, q.shape[2] // H
        layer = adapter._build_layer(
            adapter.layers.MultiHeadAttention, heads, heads, depth, depth, "float32", sliding_window
        )
        weights = [initialize_identity(None, one.shape, one.dtype) for one in layer.trainable_variables]
        return layer.stateless_call(weights, layer.non_trainable_variables, q, v, key=k, **options)[0]

    return attention


def load_haiku() -> Call:
    haiku = importlib.import_module("haiku")

    from impls.libraries.identity_projections import initialize_identity

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        def apply(*inputs: Any) -> Any:
            module = haiku.MultiHeadAttention(
                q.shape[2] // H, H, w_init=lambda shape, dtype: initialize_identity(None, shape, dtype), with_bias=False
            )
            return module(*inputs, **options)

        transformed = haiku.transform(apply)
        return transformed.apply(transformed.init(jax.random.key(0), q, k, v), None, q, k, v)

    return attention


def load_equinox() -> Call:
    equinox = importlib.import_module("equinox")

    from impls.libraries.identity_projections import initialize_identity

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        size = q.shape[1]
        module = equinox.nn.MultiheadAttention(size // H, size, dtype=q.dtype, key=jax.random.key(0))
        names = ("query_proj", "key_proj", "value_proj", "output_proj")
        pick = lambda m: [getattr(m, name).weight for name in names]  # noqa: E731
        identities = [initialize_identity(None, weight.shape, weight.dtype) for weight in pick(module)]
        return equinox.tree_at(pick, module, identities)(q, k, v, **options)

    return attention


def load_torch() -> Call:
    torch = importlib.import_module("torch")

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        tensors = (torch.tensor(np.asarray(x)) for x in (q, k, v))
        given = {name: torch.tensor(np.asarray(x)) if hasattr(x, "shape") else x for name, x in options.items()}
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **given).numpy()

    return attention


def load_onnx() -> Call:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: the conventions of onnxruntime were not asked")
    onnxruntime = importlib.import_module("onnxruntime")

    def attention(q: Any, k: Any, v: Any, *, attn_mask: Any = None, **attributes: Any) -> Any:
        arrays = {"q": q, "k": k, "v": v} | ({} if attn_mask is None else {"m": attn_mask})
        arrays = {name: np.asarray(x) for name, x in arrays.items()}
        kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in arrays.items()}
        inputs = [onnx.helper.make_tensor_value_info(name, kinds[name], x.shape) for name, x in arrays.items()]
        result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        node = onnx.helper.make_node("Attention", list(arrays), ["y"], **attributes)
        graph = onnx.helper.make_graph([node], "attention", inputs, [result])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, arrays)[0]

    return attention


LOADERS: Mapping[str, Callable[[], Call]] = {
    **{name: functools.partial(load_named, name) for name in (JAX, NNX, LINEN, TOKAMAX)},
    KERAS: lambda: importlib.import_module("impls.libraries.keras").ops.dot_product_attention,
    KERAS_LAYER: load_keras_layer,
    HAIKU: load_haiku,
    EQUINOX: load_equinox,
    EJ_ATTENTION: lambda: load_ejkernel("attention"),
    EJ_FLASH: lambda: load_ejkernel("flash_attention"),
    EJ_SPARSE: lambda: load_ejkernel("blocksparse_attention"),
    SPLASH: load_splash,
    MHA: load_mha,
    TORCH: load_torch,
    ONNX: load_onnx,
}


def call(function: str, q: Any, k: Any, v: Any, *, by_default: bool = False, **options: Any) -> np.ndarray:
    """Call a function in its own layout, with options by the contract's names, and return `[B, T, N, H]`.

    The layout is the one that the table states. A function that is causal by default is told not to be, unless
    `by_default`.
    """
    native = load(function)
    if function == EJ_SPARSE and not by_default:
        options = {"causal": False, **options}
    named = {table.PARAMETERS[function][name]: value for name, value in options.items()}
    layout = next(one.answer for one in table.ANSWERS if one.question == AXES and function in one.functions)
    with jax.default_matmul_precision("highest"):
        if layout == "`[B, T, N, H]`":
            return np.asarray(native(q, k, v, **named), np.float64)
        if layout == "`[B, N, T, H]`":
            out = native(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), **named)
            return np.asarray(out, np.float64).swapaxes(1, 2)
        if layout == "`[N, T, H]`":
            out = jax.vmap(functools.partial(native, **named))(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)))
            return np.asarray(out, np.float64).swapaxes(1, 2)
        merged = [x.reshape(*x.shape[:2], -1) for x in (q, k, v)]
        if layout == "`[B, T, N * H]`, and weights":
            out = native(*merged, **named)
        else:
            assert layout == "`[T, N * H]`, and weights"
            out = jnp.stack([native(*(x[b] for x in merged), **named) for b in range(B)])
    return np.asarray(out, np.float64).reshape(q.shape)


def compute(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = True,
    bias: Any = 0.0,
    cap: float = math.inf,
    cap_first: bool = False,
    scale: float = H**-0.5,
    empty: str = "mean",
) -> np.ndarray:
    """Compute attention in float64: `out [B, T, N, H]`."""  # fmt: skip
    logits = np.einsum("btnh,bsnh->bnts", *(np.asarray(x, np.float64) for x in (q, k))) * scale
    limit = (lambda x: cap * np.tanh(x / cap)) if math.isfinite(cap) else (lambda x: x)
    logits = limit(logits) + bias if cap_first else limit(logits + bias)
    mask = np.broadcast_to(mask, logits.shape)
    weights = np.where(mask, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    weights = np.where(total > 0, weights / np.where(total > 0, total, 1), 1 / k.shape[1] if empty == "mean" else 0)
    return np.einsum("bnts,bsnh->btnh", weights, np.asarray(v, np.float64))


def draw(function: str) -> tuple[Any, Any, Any]:
    t, s, n = sizes(function)
    random = np.random.default_rng(7)
    q, k, v = (random.normal(size=(B, length, n, H)).astype(np.float32) for length in (t, s, s))
    return jnp.asarray(2 * q), jnp.asarray(k), jnp.asarray(v)


def assert_only(got: np.ndarray, answers: Mapping[str, np.ndarray], claimed: str) -> None:
    """Check that the results are those of the claimed answer, and far from those of every other one."""
    errors = {answer: float(np.abs(got - right).max()) for answer, right in answers.items()}
    assert errors.pop(claimed) < TOLERANCE
    assert all(error > 20 * TOLERANCE for error in errors.values()), errors


def ask_axes(function: str, claimed: str) -> None:
    q, k, v = draw(function)
    scale = {"scale": H**-0.5} if function == MHA else {}
    q = q * (H**-0.5 if function == SPLASH else 1)
    assert_only(
        call(function, q, k, v, **scale),
        {claimed: compute(q, k, v, scale=1 if function == SPLASH else H**-0.5)},
        claimed,
    )


def ask_scale(function: str, claimed: str) -> None:
    q, k, v = draw(function)
    answers = {"1 / sqrt(H)": compute(q, k, v), "1": compute(q, k, v, scale=1)}
    assert_only(call(function, q, k, v), answers, claimed.partition(",")[0].strip("`"))
    if "scale" in table.PARAMETERS[function]:
        assert_only(call(function, q, k, v, scale=0.1), {**answers, "0.1": compute(q, k, v, scale=0.1)}, "0.1")


def ask_default(function: str, claimed: str) -> None:
    q, k, v = draw(function)
    t, s, _ = sizes(function)
    scale = 1 if function in (SPLASH, MHA) else H**-0.5
    answers = {
        "no": compute(q, k, v, scale=scale),
        "yes": compute(q, k, v, scale=scale, mask=np.tri(t, s, dtype=bool)),
    }
    assert_only(call(function, q, k, v, by_default=True), answers, claimed)


def ask_causal(function: str, claimed: str) -> None:
    q, k, v = draw(function)
    t, s, _ = sizes(function)
    scale = {"scale": H**-0.5} if function == MHA else {}
    ends = {"first query at the first key": 0, "last query at the last key": s - t}
    answers = {answer: compute(q, k, v, mask=np.tri(t, s, offset, dtype=bool)) for answer, offset in ends.items()}
    assert_only(call(function, q, k, v, causal=True, **scale), answers, claimed)


def ask_window(function: str, claimed: str) -> None:
    q, k, v = draw(function)
    t, s, _ = sizes(function)
    distance = np.abs(np.arange(s) - np.arange(t)[:, None])
    answers = {str(reach): compute(q, k, v, mask=distance <= reach) for reach in (2, 3, 4)}
    window: Any = 3 if function == KERAS_LAYER else (3, 3)
    assert_only(call(function, q, k, v, window=window), answers, claimed[0])


def build_mask(function: str, mask: np.ndarray) -> Any:
    """Give a mask `[B, T, S]` the axes that a function takes."""
    heads = sizes(function)[2]
    if function == KERAS_LAYER:
        return jnp.asarray(mask)
    mask = np.broadcast_to(mask[:, None], (B, heads, *mask.shape[1:]))
    if function in (EJ_ATTENTION, EJ_FLASH, EJ_SPARSE):
        mask = mask[:, :1]
    return jnp.asarray(mask)


def ask_with_mask(function: str, mask: np.ndarray) -> tuple[np.ndarray, tuple[Any, Any, Any]]:
    """Call a function with a mask that is the same in every batch row, since equinox maps over none of them."""
    q, k, v = draw(function)
    given = build_mask(function, mask)
    if function == EQUINOX:
        given = given[0]
    return call(function, q, k, v, mask=given), (q, k, v)


def ask_mask(function: str, claimed: str) -> None:
    t, s, _ = sizes(function)
    mask = np.broadcast_to(np.random.default_rng(3).random((1, t, s)) < 0.5, (B, t, s)).copy()
    mask[:, :, 0], mask[:, :, 1] = True, False
    got, operands = ask_with_mask(function, mask)
    answers = {answer: compute(*operands, mask=kept[:, None]) for answer, kept in (("attend", mask), ("hide", ~mask))}
    assert_only(got, answers, claimed)


def ask_empty(function: str, claimed: str) -> None:
    t, s, _ = sizes(function)
    mask = np.ones((B, t, s), bool)
    mask[:, 2] = False
    got, operands = ask_with_mask(function, mask)
    answers = {
        "mean of all values": compute(*operands, mask=mask[:, None]),
        "zeros": compute(*operands, mask=mask[:, None], empty="zero"),
    }
    assert_only(got, answers, claimed)


def ask_cap(function: str, claimed: str) -> None:
    q, k, v = draw(function)
    t, s, n = sizes(function)
    bias = 3 * np.random.default_rng(5).normal(size=(B, n, t, s)).astype(np.float32)
    answers = {
        "bias first": compute(q, k, v, bias=bias, cap=1.5),
        "cap first": compute(q, k, v, bias=bias, cap=1.5, cap_first=True),
    }
    options: dict[str, Any] = {"mask" if function == ONNX else "bias": jnp.asarray(bias), "soft_cap": 1.5}
    assert_only(call(function, q, k, v, **options), answers, claimed)


def ask_logsumexp(function: str, claimed: str) -> None:
    q, k, v = draw(function)
    natural = _compute_logsumexp(function, q, k)
    if function == JAX:
        got = load(function)(q, k, v, return_residual=True)[1].transpose(0, 2, 1)
        narrow = load(function)(*(x.astype(jnp.bfloat16) for x in (q, k, v)), return_residual=True)[1]
        assert narrow.dtype == jnp.bfloat16
    elif function == MHA:
        _, got = load(function)(q, k, v, return_residuals=True)
    else:
        got = _call_splash(q, k, v)
    base = "base 2" if claimed.startswith("base 2") else "natural"
    assert_only(np.asarray(got, np.float64), {"natural": natural, "base 2": natural / math.log(2)}, base)


def ask_sink(function: str, claimed: str) -> None:
    q, k, v = draw(function)
    q = q / 50  # so that the sinks count beside 256 keys
    sinks = np.asarray([5.0, 6.0], np.float32)
    without = _compute_logsumexp(function, q, k)
    answers = {"without the sink": without, "with the sink": np.logaddexp(without, sinks[None, :, None])}
    assert_only(np.asarray(_call_splash(q, k, v, jnp.asarray(sinks)), np.float64), answers, claimed)


def _compute_logsumexp(function: str, q: Any, k: Any) -> Any:
    """Compute the natural logsumexp `[B, N, T]` in float64, at the scale that the function has by default."""
    scale = 1 if function in (SPLASH, MHA) else H**-0.5
    logits = np.einsum("btnh,bsnh->bnts", *(np.asarray(x, np.float64) for x in (q, k))) * scale
    return np.log(np.exp(logits).sum(-1))


def _call_splash(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
    """Return the logsumexp `[B, N, T]` of splash attention."""
    kernel = functools.partial(load(SPLASH), save_residuals=True, **({} if sinks is None else {"sinks": sinks}))
    return jax.vmap(kernel)(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)))[1][0]


def ask_softmax(function: str, claimed: str) -> None:
    """Read the dtype of the exponential and of its argument off the traced program."""
    operands = tuple(x.astype(jnp.bfloat16) for x in draw(function))
    traced = jax.make_jaxpr(lambda *x: _call_traced(function, *x))(*operands)
    dtypes = {str(one.outvars[0].aval.dtype) for one in _list_equations(traced.jaxpr) if one.primitive.name == "exp"}
    products = [one for one in _list_equations(traced.jaxpr) if one.primitive.name == "dot_general"]
    logits = {str(one.outvars[0].aval.dtype) for one in products if sizes(function)[1] in one.outvars[0].aval.shape}
    assert dtypes == {"bfloat16" if claimed == "in bf16" else "float32"}
    if claimed != "in f32":
        assert "bfloat16" in logits


def _call_traced(function: str, q: Any, k: Any, v: Any) -> Any:
    native = load(function)
    if function == EJ_SPARSE:
        return native(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)))
    merged = [x.reshape(*x.shape[:2], -1) for x in (q, k, v)]
    if function == EQUINOX:
        return jax.vmap(native)(*merged)
    if function == HAIKU:
        return native(*merged)
    return native(q, k, v)


def _list_equations(jaxpr: Any) -> list[Any]:
    """List the equations of a traced program, those of inner programs too."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            found += _list_equations(inner) if hasattr(inner, "eqns") else []
    return found


ASK: Mapping[str, Callable[[str, str], None]] = {
    AXES: ask_axes,
    SCALE: ask_scale,
    DEFAULT: ask_default,
    CAUSAL: ask_causal,
    WINDOW: ask_window,
    MASK: ask_mask,
    CAP: ask_cap,
    EMPTY: ask_empty,
    LOGSUMEXP: ask_logsumexp,
    SINK: ask_sink,
    SOFTMAX: ask_softmax,
}


@pytest.mark.parametrize(("function", "question", "answer"), list(table.list_claims()))
def test_the_function_does_what_the_table_says(function: str, question: str, answer: str) -> None:
    ASK[question](function, answer)


def test_no_function_has_two_answers_to_a_question() -> None:
    claims = [(function, question) for function, question, _ in table.list_claims()]
    assert len(claims) == len(set(claims))
    assert {function for function, _ in claims} == set(table.FUNCTIONS) == set(table.PARAMETERS) == set(LOADERS)


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["flax", "keras", "dm_haiku", "equinox", "ejkernel", "tokamax"])
def test_the_table_is_true_of_the_newest_listed_version(library: str, tmp_path: Path) -> None:
    described = load_libraries()[library]
    environment = described.build_environment(described.versions[0])
    made = environments.create_environment(environment, tmp_path / "environment")
    asked = [str(made.python), "-m", "pytest", "-q", "-W", "ignore", "-m", "not nightly", str(Path(__file__))]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        asked, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The functions of JAX itself pass everywhere, and there are more claims about the library.
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > sum(function in (JAX, SPLASH, MHA) for function, *_ in table.list_claims()) + 1
