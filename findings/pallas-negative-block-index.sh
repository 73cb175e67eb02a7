#!/usr/bin/env bash
# Page -1 of a page table is the last page under `interpret=True`, and a page past the end is the last one too.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: A block outside an operand is NaN, as the part of a block that hangs over the end is.
# Seen: A kernel that computes with unused pages, marked by -1, gets finite numbers. `InterpretParams` raises.
#
# Output seen:
#   pages 0, -1 and 7 of 3: [0. 2. 2.]
#   InterpretParams names the block: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def copy(table, pages, out):
    out[...] = pages[...]


pages = jnp.repeat(jnp.arange(3.0), 8)[:, None] * jnp.ones((1, 128))
table = jnp.array([0, -1, 7])
for interpret in (True, pltpu.InterpretParams()):
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(3,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, table: (table[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, table: (i, 0)),
    )
    out_shape = jax.ShapeDtypeStruct((24, 128), jnp.float32)
    try:
        out = pl.pallas_call(copy, grid_spec=spec, out_shape=out_shape, interpret=interpret)(table, pages)
        print("pages 0, -1 and 7 of 3:", np.asarray(out)[::8, 0])
    except Exception as error:
        print("InterpretParams names the block:", "Out-of-bounds block index (-1, 0)" in str(error))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
