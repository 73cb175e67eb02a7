#!/usr/bin/env bash
# `jax.nn.standardize` of 10000, 10001, 10002 is less than half of what it should be.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints 316.2.
# Guess: Layer normalisation in float32 is right to four digits where the mean is 10,000 times the spread.
# Seen: The variance is the mean of the squares less the square of the mean, which cancels.
#
# Output seen:
#   right 1.22, jax.nn.standardize 0.58
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

x = np.array([10_000.0, 10_001.0, 10_002.0], np.float32)
right = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
got = jax.nn.standardize(jnp.asarray(x))
print(f"right {right[2]:.2f}, jax.nn.standardize {got[2]:.2f}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
