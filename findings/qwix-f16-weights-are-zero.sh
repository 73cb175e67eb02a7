#!/usr/bin/env bash
# qwix quantises a float16 array whose largest magnitude is below 0.99 to int8 with a scale of 1: ordinary weights
# become 0.
#
# Versions: qwix 0.1.8, Python 3.12, CPU.
# Guess: float16 weights of ordinary size, such as 0.02, come back within half a step of int8, as in bfloat16 and
# float32.
# Seen: A scale below the root of the smallest normal number is taken for 0 and replaced by 1. In float16 that root is
# 0.0078. int4 loses weights below 0.058 so. `scale_dtype=float32` does not help.
#
# Output seen:
#   float32, largest 2.0: stored [127 -64  32], largest again 1.99
#   float32, largest 0.9: stored [127 -64  32], largest again 0.90
#   float32, largest 0.02: stored [127 -64  32], largest again 0.02
#   bfloat16, largest 2.0: stored [127 -64  32], largest again 2.00
#   bfloat16, largest 0.9: stored [127 -64  32], largest again 0.89
#   bfloat16, largest 0.02: stored [127 -64  32], largest again 0.02
#   float16, largest 2.0: stored [127 -64  32], largest again 1.99
#   float16, largest 0.9: stored [1 0 0], largest again 1.00
#   float16, largest 0.02: stored [0 0 0], largest again 0.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check qwix==0.1.8 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp
import numpy as np
import qwix

for dtype in ("float32", "bfloat16", "float16"):
    for largest in (2.0, 0.9, 0.02):
        x = jnp.asarray(np.array([1.0, -0.5, 0.25]) * largest, dtype)
        found = qwix.quantize(x, "int8")
        print(f"{dtype}, largest {largest}: stored {found.qvalue}, largest again {qwix.dequantize(found)[0]:.2f}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
