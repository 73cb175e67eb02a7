#!/usr/bin/env bash
# A cast to int4 clips what is too large if it comes from float32, and wraps it if it comes from int32.
#
# Versions: jax 0.12.0.1, ml_dtypes 0.6.0, Python 3.12, CPU.
# Guess: The source makes no difference, as in NumPy, so a quantiser may round before or after the cast.
#
# Output seen:
#   int4 from float32, JAX: [7, 7, 7, 7, -8]
#   int4 from int32, JAX: [7, -8, -7, 4, 7]
#   int4 from float32, NumPy: [7, -8, -7, 4, 7]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1 ml_dtypes==0.6.0
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

x = np.array([7, 8, 9, 100, -9], np.float32)
print(f"int4 from float32, JAX: {jnp.asarray(x).astype(jnp.int4).astype(int).tolist()}")
print(f"int4 from int32, JAX: {jnp.asarray(x).astype(int).astype(jnp.int4).astype(int).tolist()}")
print(f"int4 from float32, NumPy: {x.astype(ml_dtypes.int4).astype(int).tolist()}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
