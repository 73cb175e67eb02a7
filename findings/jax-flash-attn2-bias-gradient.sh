#!/usr/bin/env bash
# The gradient of a bias is zero in `jax_flash_attention` of jax-flash-attn2.
#
# Versions: jax-flash-attn2 0.0.3, Python 3.12, CPU.
# Guess: an operand that changes the result has a gradient, or its differentiation raises.
#
# Output seen:
#   derivative along a step of the bias: 0.0 by differences: 7.896614074707031
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1 flax==0.12.12 chex==0.1.91 einops==0.8.2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps jax-flash-attn2==0.0.3
cat >"$folder/script.py" <<'PYTHON'
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

for name in ("eformer", "eformer.escale", "jax_flash_attn2.flash_attention_triton"):
    sys.modules[name] = mock.MagicMock()  # they do not import with current JAX
from jax_flash_attn2.flash_attention_jax import jax_flash_attention

draw = np.random.default_rng(0)
q, k, v = draw.normal(size=(3, 1, 8, 1, 16)).astype(np.float32)
bias, step = draw.normal(size=(2, 1, 1, 8, 8)).astype(np.float32)
loss = lambda bias: jnp.sum(jax_flash_attention(q, k, v, None, bias, dtype=jnp.float32) ** 2)
slope = float(np.sum(np.asarray(jax.grad(loss)(bias)) * step))
right = float(loss(bias + 1e-2 * step) - loss(bias - 1e-2 * step)) / 2e-2
print("derivative along a step of the bias:", slope, "by differences:", right)
sys.exit(bool(abs(slope - right) > 0.01 * abs(right)))
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
