#!/usr/bin/env bash
# `force_fp32_for_softmax` of `flax.linen` changes the dtype of the result.
#
# Versions: flax 0.12.12, Python 3.12, CPU.
# Guess: `force_fp32_for_softmax` changes the precision of the softmax, and not the dtype of the result.
#
# Output seen:
#   flax 0.12.12
#   force_fp32_for_softmax = False out: bfloat16
#   force_fp32_for_softmax = True out: float32
#   module, weights and inputs in bf16: float32
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flax==0.12.12 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import sys

import flax
import jax
import jax.numpy as jnp
from flax import linen

x = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
print("flax", flax.__version__)
for force in (False, True):
    out = linen.dot_product_attention(x, x, x, force_fp32_for_softmax=force)
    print("force_fp32_for_softmax =", force, "out:", out.dtype)
module = linen.MultiHeadDotProductAttention(2, param_dtype=jnp.bfloat16, force_fp32_for_softmax=True)
print("module, weights and inputs in bf16:", module.init_with_output(jax.random.key(0), x[:, :, 0])[0].dtype)
sys.exit(out.dtype != jnp.bfloat16)
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
