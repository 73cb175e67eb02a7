#!/usr/bin/env bash
# In Pallas's interpreters, an approximate reciprocal is that of x rounded to bfloat16: its error is 0.4%.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: A CPU has no such instruction, so that `approx=True` is 1 / x there and a tolerance for float32 is met.
# Seen: A softmax divided this way is judged at the precision of bfloat16, whatever the precision of the chip is.
#
# Output seen:
#   interpret=True, approx=False: error 0.0%, 1 / bfloat16(x): False
#   interpret=True, approx=True: error 0.4%, 1 / bfloat16(x): True
#   interpret=InterpretParams, approx=False: error 0.0%, 1 / bfloat16(x): False
#   interpret=InterpretParams, approx=True: error 0.4%, 1 / bfloat16(x): True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

x = jnp.linspace(1, 2, 1024).reshape(8, 128)
for interpret in (True, pltpu.InterpretParams()):
    for approx in (False, True):

        def divide(x, out, approx=approx):
            out[...] = pl.reciprocal(x[...], approx=approx)

        out = pl.pallas_call(divide, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(x)
        error = float(jnp.abs(out * x - 1).max())
        rounded = bool((out == 1 / x.astype(jnp.bfloat16).astype(jnp.float32)).all())
        name = "True" if interpret is True else "InterpretParams"
        print(f"interpret={name}, {approx=}: error {error:.1%}, 1 / bfloat16(x): {rounded}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
