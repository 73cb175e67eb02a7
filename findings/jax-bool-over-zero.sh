#!/usr/bin/env bash
# Under jit, a boolean converted to a float and divided by zero is 0 for False, where 0 / 0 is NaN outside jit.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same. A mask of dropout is divided so, by 1 - rate.
# Guess: XLA keeps 0 / 0, as it keeps it for floats.
#
# Output seen:
#   booleans, outside jit: [nan inf]
#   booleans, under jit: [ 0. inf]
#   floats, outside jit: [nan inf]
#   floats, under jit: [nan inf]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np


def divide(x, by):
    return x.astype(jnp.float32) / by


for name, x in (("booleans", jnp.array([False, True])), ("floats", jnp.array([0.0, 1.0]))):
    print(f"{name}, outside jit: {np.asarray(divide(x, jnp.float32(0)))}")
    print(f"{name}, under jit: {np.asarray(jax.jit(divide)(x, jnp.float32(0)))}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
