#!/usr/bin/env bash
# A negative int4 index selects another element than the same index in int32.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: An integer index of any dtype selects the same element, or is refused. NumPy refuses int4.
# Seen: The length is added to a negative index in the dtype of the index: 20 - 1 wraps to 3 in int4.
#
# Output seen:
#   int32 x[[1, -1, -2]] = [ 1 19 18]
#   int4 x[[1, -1, -2]] = [1 3 2]
#   set: [3]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp

x = jnp.arange(20)
for dtype in ("int32", "int4"):
    print(dtype, "x[[1, -1, -2]] =", x[jnp.array([1, -1, -2], dtype)])
print("set:", jnp.flatnonzero(jnp.zeros(20).at[jnp.array([-1], jnp.int4)].set(1)))
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
