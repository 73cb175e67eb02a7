#!/usr/bin/env bash
# An int8 index of an array of 128 or more elements raises, or selects a wrong element in `jnp.take`.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: An int8 index that is in bounds works for an array of any length, as in NumPy.
# Seen: Indexing raises even for positive indices. `jnp.take` adds 300 to -1 in int8, which makes 43.
# `take_along_axis` is right.
#
# Output seen:
#   NumPy [  1 299]
#   jnp OverflowError: Python integer 300 out of bounds for int8
#   jnp.take [ 1 43]
#   jnp.take_along_axis [  1 299]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp
import numpy as np

index = np.array([1, -1], np.int8)
print("NumPy", np.arange(300)[index])
try:
    print("jnp", jnp.arange(300)[jnp.asarray(index)])
except OverflowError as error:
    print("jnp", "OverflowError:", error)
print("jnp.take", jnp.take(jnp.arange(300), index))
print("jnp.take_along_axis", jnp.take_along_axis(jnp.arange(300), jnp.asarray(index), 0))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
