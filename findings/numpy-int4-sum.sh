#!/usr/bin/env bash
# NumPy sums and means of int4 wrap in 4 bits, while `x + 1` is int8 and `x * 1e-8` is float16 zeros.
#
# Versions: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.12.
# Guess: Sums are widened as those of int8 are, and codes times a Python scale are a float64 array, as those of int8
# are.
#
# Output seen:
#   int8 sum 28 mean 7.0 x + 1: int8 x * 1e-8: float64 7e-08
#   int4 sum -4 mean -1.0 x + 1: int8 x * 1e-8: float16 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import ml_dtypes
import numpy as np

for dtype in (np.int8, ml_dtypes.int4):
    x = np.full(4, 7, dtype)
    print(np.dtype(dtype).name, "sum", int(x.sum()), "mean", float(x.mean()), "x + 1:", (x + 1).dtype.name, end=" ")
    print("x * 1e-8:", (x * 1e-8).dtype.name, float((x * 1e-8)[0]))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
