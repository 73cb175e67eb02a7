#!/usr/bin/env bash
# `jnp.max` on a CPU drops NaN in arrays of 4,096 elements or more.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: `jnp.max` is NaN where an element is NaN, as in NumPy, or else never; the size of the array does not count.
# Seen: The largest error of a wrong kernel is 0, and that of a kernel whose result is NaN throughout is -inf.
# `jnp.argmax` finds the NaN.
#
# Output seen:
#   1024 elements: max nan min nan argmax 7
#   2048 elements: max nan min nan argmax 7
#   4096 elements: max 0.0 min 0.0 argmax 7
#   65536 elements: max 0.0 min 0.0 argmax 7
#   all of 4096 NaN: max -inf
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp

for n in (1024, 2048, 4096, 65536):
    x = jnp.zeros(n).at[7].set(jnp.nan)
    print(n, "elements: max", jnp.max(x), "min", jnp.min(x), "argmax", jnp.argmax(x))
print("all of 4096 NaN: max", jnp.max(jnp.full(4096, jnp.nan)))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
