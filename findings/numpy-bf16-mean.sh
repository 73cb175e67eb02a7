#!/usr/bin/env bash
# `np.mean` of 4,096 bfloat16 ones is 0.0625.
#
# Versions: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.12.
# Guess: 1, as in float16, whose sums NumPy widens in `mean`; NumPy's pairwise sums help besides.
# Seen: The sum stops at 256, where adding 1 changes nothing. The variance of equal numbers is not 0 either.
#
# Output seen:
#   float16 mean 1.0 sum 4096.0 var 0.0
#   bfloat16 mean 0.0625 sum 256.0 var 0.0625
#   float8_e4m3fn mean 0.00390625 sum 16.0 var 0.00390625
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import ml_dtypes
import numpy as np

for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    ones = np.ones(4096, dtype)
    print(np.dtype(dtype).name, "mean", float(ones.mean()), "sum", float(ones.sum()), "var", float(ones.var()))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
