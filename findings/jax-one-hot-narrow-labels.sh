#!/usr/bin/env bash
# `jax.nn.one_hot` of int8, uint8 or int4 labels sets several ones in a row.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: A row has one 1, whatever the integer dtype of the labels.
# Seen: The positions are counted in the dtype of the labels and wrap: in uint8 position 257 equals label 1.
#
# Output seen:
#   int32 label 1 of 300 classes: ones at [1]
#   uint8 label 1 of 300 classes: ones at [  1 257]
#   int8 label 1 of 300 classes: ones at [  1 257]
#   int4 label 1 of 20 classes: ones at [ 1 17]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp

for dtype, classes in (("int32", 300), ("uint8", 300), ("int8", 300), ("int4", 20)):
    row = jax.nn.one_hot(jnp.array(1, dtype), classes)
    print(dtype, "label 1 of", classes, "classes: ones at", jnp.flatnonzero(row))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
