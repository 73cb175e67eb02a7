#!/usr/bin/env bash
# In the interpreter, a Triton atomic_add adds one of several elements with the same index.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: Atomic additions to the same place add up: that is what they are for.
#
# Output seen:
#   atomic_add of ones at 0, 0, 0 and 1: [1. 1. 0. 0.]
#   right: [3. 1. 0. 0.]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def add(index, x, out):
    out[...] = jnp.zeros_like(out)
    plt.atomic_add(out, index[...], x[...])


index, x = jnp.array([0, 0, 0, 1]), jnp.ones(4)
out = pl.pallas_call(add, out_shape=jax.ShapeDtypeStruct((4,), jnp.float32), interpret=True)(index, x)
print("atomic_add of ones at 0, 0, 0 and 1:", out)
print("right:", jnp.zeros(4).at[index].add(x))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
