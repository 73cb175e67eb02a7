#!/usr/bin/env bash
# In mlx's mxfp8 and mxfp4, a block of tiny numbers is infinite, and a NaN makes its block of mxfp8 896 or -896.
#
# Versions: mlx 0.32.4, Python 3.12, CPU.
# Guess: what is too small for a scale becomes zero or takes the least scale, and a NaN or infinity stays visible: e8m0
# has a NaN. Instead the exponent of the scale wraps in its 8 bits: 2**-120 gets the scale 255.
#
# Output seen:
#   mxfp8: 2**-119 is 1.5e-36 with scale 0, 2**-120 is inf with scale 255, 2**-130 is 8.5e+37 with scale 245
#   mxfp4: 2**-119 is 1.5e-36 with scale 6, 2**-120 is 7.5e-37 with scale 5, 2**-130 is 8.5e+37 with scale 251
#   mxfp8: ones with one nan are [896.0], ones with one inf are [896.0]
#   mxfp4: ones with one nan are [0.0], ones with one inf are [0.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.2
cat >"$folder/script.py" <<'PYTHON'
import mlx.core as mx
import numpy as np

FORMATS = {"mxfp8": {"mode": "mxfp8", "bits": 8, "group_size": 32}, "mxfp4": {"mode": "mxfp4", "bits": 4, "group_size": 32}}


def store(block, format):
    stored = mx.quantize(mx.array(block)[None], **format)
    return np.array(mx.dequantize(*stored, **format, dtype=mx.float32))[0], int(stored[1].item())


for name, format in FORMATS.items():
    seen = []
    for exponent in (-119, -120, -130):
        block, scale = store(np.full(32, 2.0**exponent, np.float32), format)
        seen.append(f"2**{exponent} is {block[0]:.1e} with scale {scale}")
    print(f"{name}: {', '.join(seen)}")
for name, format in FORMATS.items():
    seen = []
    for bad in (np.nan, np.inf):
        block, _ = store(np.array([bad] + [1.0] * 31, np.float32), format)
        seen.append(f"ones with one {bad} are {sorted(set(block.tolist()))}")
    print(f"{name}: {', '.join(seen)}")
PYTHON
printed=$(cd "$folder" && venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
