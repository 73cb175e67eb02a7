#!/usr/bin/env bash
# A Python float makes a bfloat16 array float32, so 0.1 in bfloat16 does not equal 0.1; an int does not.
#
# Versions: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.12.
# Guess: Python numbers are weak in NumPy 2: `x * 2.5` has the dtype of x, as for float16 and in JAX.
#
# Output seen:
#   float16 * 2: float16 * 2.5: float16 == 0.1: True
#   bfloat16 * 2: bfloat16 * 2.5: float32 == 0.1: False
#   float8_e4m3fn * 2: float8_e4m3fn * 2.5: float32 == 0.1: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import ml_dtypes
import numpy as np

for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    x = np.array([0.1], dtype)
    print(np.dtype(dtype).name, "* 2:", (x * 2).dtype.name, "* 2.5:", (x * 2.5).dtype.name, "== 0.1:", bool(x == 0.1))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
