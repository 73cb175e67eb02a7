#!/usr/bin/env bash
# `jnp.repeat` with uint8 counts repeats the wrong elements where the counts add up to more than 255.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: The dtype of the counts does not matter as long as it holds each of them. So it is in NumPy.
# Seen: The counts are added in their own dtype. int8 counts raise instead.
#
# Output seen:
#   int32 NumPy [200 200   1] jnp [200 200   1]
#   uint8 NumPy [200 200   1] jnp [144  56 201]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp
import numpy as np

for dtype in (np.int32, np.uint8):
    counts = np.array([200, 200, 1], dtype)
    right = np.repeat(np.arange(3), counts)
    got = jnp.repeat(jnp.arange(3), jnp.asarray(counts), total_repeat_length=401)
    print(dtype.__name__, "NumPy", np.bincount(right), "jnp", np.bincount(got))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
