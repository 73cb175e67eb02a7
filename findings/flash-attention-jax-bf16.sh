#!/usr/bin/env bash
# bfloat16 and float16 give float32 results and no gradients in flash-attention-jax.
#
# Versions: flash-attention-jax 0.3.1, Python 3.12, CPU.
# Guess: a function that takes bfloat16 returns bfloat16 and can be differentiated, as in float32.
#
# Output seen:
#   dtype of the result float32
#   gradient TypeError: scan body function carry input and carry output must have equal types, but they differ:
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flash-attention-jax==0.3.1 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flash_attention_jax import flash_attention

x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 8, 16)), jnp.bfloat16)
mask = jnp.ones((1, 8), bool)
print("dtype of the result", flash_attention(x, x, x, mask).dtype)
try:
    dq = jax.grad(lambda q: flash_attention(q, x, x, mask).astype(jnp.float32).sum())(x)
except TypeError as error:
    print(f"gradient {type(error).__name__}: {str(error).splitlines()[0]}")
    sys.exit(1)
print("dtype of the gradient", dq.dtype)
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
