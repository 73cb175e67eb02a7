#!/usr/bin/env bash
# A sum of float8 numbers is kept in float8: 32 halves give 8, and their mean is a quarter.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU.
# Guess: Sums of all narrow floats are kept in f32, as those of bfloat16 and float16 are.
#
# Output seen:
#   bfloat16, 32 halves: sum 16.0, mean 0.5
#   bfloat16, 1024 halves: sum 512.0, mean 0.5
#   float16, 32 halves: sum 16.0, mean 0.5
#   float16, 1024 halves: sum 512.0, mean 0.5
#   float8_e4m3fn, 32 halves: sum 8.0, mean 0.25
#   float8_e4m3fn, 1024 halves: sum 128.0, mean nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1 ml_dtypes==0.6.0
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp

for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
    for count in (32, 1024):
        x = jnp.full(count, 0.5, dtype)
        print(f"{dtype}, {count} halves: sum {float(x.sum())}, mean {float(x.mean())}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
