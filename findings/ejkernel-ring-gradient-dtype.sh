#!/usr/bin/env bash
# `ring_attention` returns f32 gradients for bf16 queries and keys, so a residual connection raises.
#
# Versions: ejkernel 0.0.80.3, Python 3.12, CPU.
# Guess: a gradient has the dtype of its argument, as `jax.grad` documents it.
#
# Output seen:
#   operands in bfloat16, gradients: dq float32 dk float32 dv bfloat16
#   with a residual connection: lax.add requires arguments to have the same dtypes, got bfloat16, float32
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ejkernel==0.0.80.3 jax==0.10.2
cat >"$folder/script.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.ring_attention import ring_attention

q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in np.random.default_rng(0).standard_normal((3, 1, 64, 2, 32)))
gradients = jax.grad(lambda *x: ring_attention(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)
wrong = any(gradient.dtype != jnp.bfloat16 for gradient in gradients)
print("operands in bfloat16, gradients:", *(f"{name} {x.dtype}" for name, x in zip(("dq", "dk", "dv"), gradients)))
try:
    jax.grad(lambda q: (q + ring_attention(q, k, v)).astype(jnp.float32).sum())(q)
    print("with a residual connection: no error")
except TypeError as raised:
    print("with a residual connection:", str(raised).split(". ")[0])
sys.exit(int(wrong))
PYTHON
# The script ends with 1 while the fault is there. Numbers in its output differ between machines.
status=0
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py) || status=$?
echo "$printed"
hide_numbers() { sed -E 's/[0-9]+([.][0-9]+)?(e[-+]?[0-9]+)?/#/g'; }
expected=$(sed -n 's/^#   //p' "$0")
if [ "$status" != 1 ] || [ "$(hide_numbers <<<"$printed")" != "$(hide_numbers <<<"$expected")" ]; then
  echo "the output changed" >&2
  exit 1
fi
