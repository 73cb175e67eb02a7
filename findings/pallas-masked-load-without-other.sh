#!/usr/bin/env bash
# In the interpreter, a masked Triton load without `other` reads what the mask hides.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: Elements that the mask hides are NaN or 0 in the interpreter, since they are undefined on a GPU.
# Seen: The mask has no effect, so a kernel that forgets `other` is right in the interpreter as long as memory is
# there.
#
# Output seen:
#   other = None [1. 2. 3. 4. 5. 6. 7. 8.]
#   other = 0.0 [1. 2. 3. 4. 5. 0. 0. 0.]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

for other in (None, 0.0):

    def load(x, out, other=other):
        out[...] = plt.load(x.at[pl.ds(0, 8)], mask=jnp.arange(8) < 5, other=other)

    out = pl.pallas_call(load, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)(jnp.arange(1.0, 9))
    print("other =", other, out)
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
