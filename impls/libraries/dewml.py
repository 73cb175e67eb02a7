"""Adapters of `dew.nn.attention.scaled_dot_product_attention`, with its implementations `reference` and `xla`.

`causal` aligns the first query with the first key, and a window is causal or symmetric and counts the query's own key
(https://github.com/AshishKumar4/dew, `dew/nn/attention.py`). A bias is added after the soft cap, as in
`softcapped_attention` there. A soft cap raises together with sinks.
"""

from __future__ import annotations

from typing import Any

from dew.nn.attention import scaled_dot_product_attention

from impls.contract.declarations import declare


def _find_window(window: Any, causal: bool) -> tuple[int | None, bool]:
    """Return the library's window, and whether it is causal."""
    if window is None:
        return None, causal
    left, right = window
    if not causal and right not in (0, left):
        raise NotImplementedError("a window is causal or symmetric")
    return left + 1, causal or right == 0


def _call(implementation: str, q: Any, k: Any, v: Any, causal: bool, window: Any, **options: Any) -> Any:
    if options["soft_cap"] is not None and options["sinks"] is not None:
        raise NotImplementedError("a soft cap together with sinks raises")
    sliding_window, causal = _find_window(window, causal)
    options["softcap"] = options.pop("soft_cap")
    return scaled_dot_product_attention(
        q, k, v, implementation=implementation, causal=causal, sliding_window=sliding_window, **options
    )


@declare(
    behind_mask="finite",
    logits="input",
    scaled_q=True,
    group_sums="input",
    soft_cap="before_bias",
    open_sides="length",
)
def reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
) -> Any:
    """`scaled_dot_product_attention(implementation="reference")`, the portable one."""
    options = {"mask": mask, "soft_cap": soft_cap, "sinks": sinks, "bias": bias}
    return _call("reference", q, k, v, causal, window, **options)


@declare(
    behind_mask="finite",
    logits="input",
    scaled_q=True,
    group_sums="input",
    soft_cap="before_bias",
    open_sides="length",
)
def xla(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
) -> Any:
    """`scaled_dot_product_attention(implementation="xla")`, which calls `jax.nn.dot_product_attention`."""
    if v.shape[3] > q.shape[3]:
        raise NotImplementedError("values wider than keys raise")
    options = {"mask": mask, "soft_cap": soft_cap, "sinks": sinks, "bias": bias}
    return _call("xla", q, k, v, causal, window, **options)
