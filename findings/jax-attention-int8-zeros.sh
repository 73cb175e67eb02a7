#!/usr/bin/env bash
# `jax.nn.dot_product_attention` takes int8 operands, and its result is 0.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: Operands of a quantised cache are refused, or attention of equal values is that value.
# Seen: The weights are converted to the dtype of the values, where all of them are 0. float8 is refused.
#
# Output seen:
#   float32 [3.]
#   int8 [0]
#   float8_e4m3fn TypePromotionError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

for dtype in ("float32", "int8", "float8_e4m3fn"):
    x = jnp.full((1, 4, 1, 8), 3, dtype)
    try:
        print(dtype, np.unique(jax.nn.dot_product_attention(x, x, x)))
    except Exception as error:
        print(dtype, type(error).__name__)
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
