#!/usr/bin/env bash
# `np.save` writes a float8_e5m2 array that `np.load` refuses; e4m3fn, int4 and bfloat16 load as bytes without a
# dtype.
#
# Versions: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.12.
# Guess: All dtypes of ml_dtypes behave alike in a file: each loads as raw bytes, or each is refused when it is saved.
# Seen: e5m2 says that it is a float of one byte, and NumPy writes `<f1`, which it cannot read. The numbers are in the
# file.
#
# Output seen:
#   bfloat16 loads as |V2
#   int4 loads as |V1
#   float8_e4m3fn loads as |V1
#   float8_e5m2 ValueError: descr is not a valid dtype descriptor: '<f1'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import io

import ml_dtypes
import numpy as np

for name in ("bfloat16", "int4", "float8_e4m3fn", "float8_e5m2"):
    file = io.BytesIO()
    np.save(file, np.ones(2, getattr(ml_dtypes, name)))
    file.seek(0)
    try:
        print(name, "loads as", np.load(file).dtype)
    except ValueError as error:
        print(name, "ValueError:", error)
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
