#!/usr/bin/env bash
# `np.sort` of a bfloat16 array with a NaN does not sort the other elements.
#
# Versions: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.12.
# Guess: NaN goes to the end and the rest is sorted, as in float16 and float32.
# Seen: The same in float8. `np.unique` keeps every NaN of bfloat16, and drops all of float8_e5m2.
#
# Output seen:
#   float16 sort [ 1.  2.  3. nan]
#   bfloat16 sort [ 3. nan  1.  2.]
#   float8_e4m3fn sort [ 3. nan  1.  2.]
#   float16 unique [ 1. nan]
#   bfloat16 unique [ 1. nan nan]
#   float8_e5m2 unique [1.]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import ml_dtypes
import numpy as np

x = np.array([3, np.nan, 2, 1])
for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    print(np.dtype(dtype).name, "sort", np.sort(x.astype(dtype)).astype(np.float64))
for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
    print(np.dtype(dtype).name, "unique", np.unique(np.array([1, np.nan, np.nan], dtype)).astype(np.float64))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
