#!/usr/bin/env bash
# Attention of flax with a dropout rate of 1 is NaN, where flax's own `Dropout` gives zeros.
#
# Versions: flax 0.12.12, Python 3.12, CPU.
# Guess: A rate of 1 drops everything: zeros, as `nnx.Dropout(1.0)` gives, or an error.
#
# Output seen:
#   flax 0.12.12
#   linen attention, rate 0.999: NaN False
#   linen attention, rate 1.0: NaN True
#   nnx attention, rate 0.999: NaN False
#   nnx attention, rate 1.0: NaN True
#   nnx.Dropout, rate 1.0: NaN False largest 0.0
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
for name, attention in (("linen", linen.dot_product_attention), ("nnx", nnx.dot_product_attention)):
    for rate in (0.999, 1.0):
        out = attention(x, x, x, dropout_rate=rate, dropout_rng=jax.random.key(0))
        print(f"{name} attention, rate {rate}: NaN {bool(jnp.isnan(out).any())}")
out = nnx.Dropout(1.0, rngs=nnx.Rngs(0))(x)
print(f"nnx.Dropout, rate 1.0: NaN {bool(jnp.isnan(out).any())} largest {out.max()}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
