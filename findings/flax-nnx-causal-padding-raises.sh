#!/usr/bin/env bash
# `flax.nnx.dot_product_attention` refuses a causal mask together with a padding mask `[B, 1, 1, S]`.
#
# Versions: flax 0.12.12, Python 3.12, CPU.
# Guess: a padding mask that broadcasts over queries goes with `is_causal=True`, as without it.
#
# Output seen:
#   flax 0.12.12
#   fused: (2, 4, 1, 8)
#   weights first: ValueError Incompatible types for broadcasting: input type=float32[4,4] and requested type=float32[2,1,1,4]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flax==0.12.12 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import sys

import flax
import jax.numpy as jnp
import numpy as np
from flax import nnx

x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 1, 8)), jnp.float32)
padding = jnp.asarray([[True] * 4, [True] * 2 + [False] * 2])[:, None, None, :]  # [B, 1, 1, S]
print("flax", flax.__version__)
print("fused:", nnx.dot_product_attention(x, x, x, mask=padding, is_causal=True).shape)
try:
    out = nnx.dot_product_attention(x, x, x, mask=padding, is_causal=True, dropout_rate=0.1, deterministic=True)
except ValueError as error:
    print("weights first:", type(error).__name__, str(error).splitlines()[0])
    sys.exit(1)
print("weights first:", out.shape)
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
