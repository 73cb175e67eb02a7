#!/usr/bin/env bash
# `jax.random.normal` in bfloat16 has 128 different values, and none beyond 2.9 in a million.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: bfloat16 normals are float32 normals, rounded: 4.6 is the largest of a million, and there are thousands of
# values.
# Seen: They are made of uniform numbers with 7 bits. The smallest and the largest differ. torch 2.13 has 3,600
# values, from -4.75 to 4.66.
#
# Output seen:
#   float32 from -4.65 to 4.52, over 900,000 values
#   float16 from -3.49 to 3.18, 1024 values
#   bfloat16 from -2.89 to 2.52, 128 values
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import numpy as np

for dtype in ("float32", "float16", "bfloat16"):
    x = np.asarray(jax.random.normal(jax.random.key(0), (1_000_000,), dtype)).astype(np.float64)
    values = len(np.unique(x))
    print(dtype, f"from {x.min():.2f} to {x.max():.2f},", "over 900,000" if values > 900_000 else values, "values")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
