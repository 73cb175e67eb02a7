#!/usr/bin/env bash
# Pallas's fast interpreter fills fresh scratch memory with a value that shows, except in int16.
#
# Versions: jax and jaxlib 0.10.2 on Python 3.11; jax 0.12.0.1 on Python 3.12 prints the same.
# Guess: under `interpret=True`, scratch memory that nobody has written holds NaN or the smallest integer of its dtype,
# so an accumulator that a kernel forgets to clear gives a wrong sum.
# Seen: so it is in float32, bfloat16, int8 and int32. In int16 it holds 0, so the forgotten accumulator is right in the
# interpreter. The interpreter keeps semaphores in int16, and fills every int16 buffer as it fills these.
#
# Output seen:
#   int8 1 + fresh = -127
#   int16 1 + fresh = 1
#   int32 1 + fresh = -2147483647
#   bfloat16 1 + fresh = nan
#   float32 1 + fresh = nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2
cat >"$folder/fresh.py" <<'PYTHON'
import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def add_one(out, total):
    out[...] = total[...] + 1  # `total` was never cleared


for name in ("int8", "int16", "int32", "bfloat16", "float32"):
    shape = jax.ShapeDtypeStruct((8, 128), name)
    scratch = pltpu.VMEM(shape.shape, shape.dtype)
    out = pl.pallas_call(add_one, out_shape=shape, scratch_shapes=[scratch], interpret=True)()
    (value,) = np.unique(np.asarray(out).astype(float))
    print(f"{name} 1 + fresh = {value:g}" if name[0] != "i" else f"{name} 1 + fresh = {int(value)}")
PYTHON
printed=$(JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/fresh.py")
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
