#!/usr/bin/env bash
# Attention of flax.linen with a dropout rate of 1 is NaN, where flax's own `Dropout` gives zeros and flax.nnx raises.
#
# Versions: flax 0.12.12, Python 3.12, CPU. In flax 0.12.8, flax.nnx is NaN too.
# Guess: A rate of 1 drops everything: zeros, as `linen.Dropout(1.0)` gives, or an error.
#
# Output seen:
#   flax 0.12.12
#   flax.linen attention, rate 0.999: NaN False
#   flax.linen attention, rate 1.0: NaN True
#   flax.nnx attention, rate 1.0: ValueError
#   flax.linen.Dropout, rate 1.0: NaN False largest 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flax==0.12.12 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import flax
import jax
import jax.numpy as jnp
from flax import linen, nnx

x = jnp.ones((1, 4, 2, 8))
print("flax", flax.__version__)
for rate in (0.999, 1.0):
    out = linen.dot_product_attention(x, x, x, dropout_rate=rate, dropout_rng=jax.random.key(0))
    print(f"flax.linen attention, rate {rate}: NaN {bool(jnp.isnan(out).any())}")
try:
    nnx.dot_product_attention(x, x, x, dropout_rate=1.0, dropout_rng=jax.random.key(0))
except ValueError as error:
    print("flax.nnx attention, rate 1.0:", type(error).__name__)
out = linen.Dropout(1.0, deterministic=False).apply({}, x, rngs={"dropout": jax.random.key(0)})
print(f"flax.linen.Dropout, rate 1.0: NaN {bool(jnp.isnan(out).any())} largest {out.max()}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
