#!/usr/bin/env bash
# A block scale in e8m0 is NaN for a block of zeros, and is rounded to nearest, below what its block needs.
#
# Versions: jax 0.12.0.1, ml_dtypes 0.6.0, Python 3.12, CPU. torch 2.13 gives 2**-127 for zero.
# Guess: Zero becomes the least scale, as 2**-130 does, and a cast rounds up, so that the block fits.
#
# Output seen:
#   block of zeros: scale nan
#   block of tiny: scale 5.877471754111438e-39
#   block of 624 in each place: scale 1.0
#   624 over its scale, stored: nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1 ml_dtypes==0.6.0
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp

block = jnp.full(32, 624.0)  # 624 / 448 is 1.39, so a scale of 2 keeps the block within float8_e4m3fn
for name, largest in (("zeros", 0.0), ("tiny", 2.0**-130), ("624 in each place", 624.0)):
    scale = jnp.float32(largest / 448 if largest > 1 else largest).astype(jnp.float8_e8m0fnu).astype(jnp.float32)
    print(f"block of {name}: scale {float(scale)}")
print(f"624 over its scale, stored: {float((block / scale).astype(jnp.float8_e4m3fn)[0])}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
