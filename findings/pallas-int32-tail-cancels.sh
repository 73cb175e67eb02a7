#!/usr/bin/env bash
# A kernel that sums the tail of a block without a mask is right in int32 under `interpret=True`.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: What hangs over the end of an operand is filled such that a forgotten mask shows: NaN, or the smallest
# integer.
# Seen: It is filled with the smallest integer, and an even number of these adds up to 0. An odd number shows.
#
# Output seen:
#   float32 12 rows of ones in blocks of 8: the tail's sum is nan
#   float32 14 rows of ones in blocks of 8: the tail's sum is nan
#   float32 13 rows of ones in blocks of 8: the tail's sum is nan
#   int32 12 rows of ones in blocks of 8: the tail's sum is 4
#   int32 14 rows of ones in blocks of 8: the tail's sum is 6
#   int32 13 rows of ones in blocks of 8: the tail's sum is -2147483643
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def add_up(x, out):
    out[...] = jnp.sum(x[...], axis=0, keepdims=True) * jnp.ones_like(out)


for dtype in ("float32", "int32"):
    for rows in (12, 14, 13):
        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        call = pl.pallas_call(
            add_up,
            grid=(2,),
            in_specs=[block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct((16, 128), dtype),
            interpret=True,
        )
        print(dtype, rows, "rows of ones in blocks of 8: the tail's sum is", call(jnp.ones((rows, 128), dtype))[8, 0])
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
