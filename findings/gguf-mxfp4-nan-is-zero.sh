#!/usr/bin/env bash
# MXFP4 of gguf makes a block with a NaN or an infinity zeros; Q8_0 makes it NaN.
#
# Versions: gguf 0.19.0, Python 3.12.
# Guess: A NaN among the numbers is seen after quantisation: a scale of NaN exists in e8m0, and all formats agree.
# Seen: There is neither an error nor, for a NaN, a warning.
#
# Output seen:
#   MXFP4 of ones with 1.0: first block [1.] second [1.]
#   Q8_0 of ones with 1.0: first block [0.99993896] second [0.99993896]
#   MXFP4 of ones with nan: first block [0.] second [1.]
#   Q8_0 of ones with nan: first block [nan] second [0.99993896]
#   MXFP4 of ones with inf: first block [0.] second [1.]
#   Q8_0 of ones with inf: first block [nan] second [0.99993896]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check gguf==0.19.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import gguf
import numpy as np
from gguf import quants

for value in (1.0, np.nan, np.inf):
    x = np.ones((1, 64), np.float32)
    x[0, 5] = value
    for kind in ("MXFP4", "Q8_0"):
        kind = gguf.GGMLQuantizationType[kind]
        found = quants.dequantize(quants.quantize(x, kind), kind)
        print(f"{kind.name} of ones with {value}: first block", np.unique(found[0, :32]), "second", np.unique(found[0, 32:]))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
