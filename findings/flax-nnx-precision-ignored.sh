#!/usr/bin/env bash
# `flax.nnx.dot_product_attention` ignores `precision` unless weights are dropped or sown.
#
# Versions: flax 0.12.12, Python 3.12, CPU.
# Guess: `precision` reaches the products of attention, whether or not weights are dropped.
#
# Output seen:
#   flax 0.12.12
#   dropout_rate 0.1 products: 2 with precision highest: 2
#   dropout_rate 0.0 products: 2 with precision highest: 0
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
from flax import nnx

x = jnp.ones((1, 4, 2, 8))
print("flax", flax.__version__)
for dropout_rate in (0.1, 0.0):

    def attend(x, rate=dropout_rate):
        return nnx.dot_product_attention(x, x, x, precision="highest", dropout_rate=rate, deterministic=True)

    program = jax.jit(attend).lower(x).as_text()
    products, highest = program.count("stablehlo.dot_general"), program.count("HIGHEST, HIGHEST")
    print("dropout_rate", dropout_rate, "products:", products, "with precision highest:", highest)
sys.exit(highest < products)
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
