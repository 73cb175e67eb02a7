#!/usr/bin/env bash
# The gradient of a cast to float8 and back is itself rounded to float8: NaN beyond 464, and NaN for a negative one in
# e8m0.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: The cast is a straight-through estimator: a float32 cotangent comes back as it is, or rounded to 3 bits at
# worst.
# Seen: In torch 2.13 the cotangent is rounded too, but 500 saturates at 448, and -1 is 1 in e8m0.
#
# Output seen:
#   float8_e4m3fn {1.1: 1.125, 500.0: nan, -1.0: -1.0, 0.0001: 0.0}
#   float8_e8m0fnu {1.1: 1.0, 500.0: 512.0, -1.0: nan, 0.0001: 0.0001220703125}
#   float4_e2m1fn {1.1: 1.0, 500.0: 6.0, -1.0: -1.0, 0.0001: 0.0}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp


def find_gradient(dtype, cotangent):
    return jax.grad(lambda x: x.astype(dtype).astype(jnp.float32) * cotangent)(1.0)


for dtype in ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn"):
    print(dtype, {c: float(find_gradient(dtype, c)) for c in (1.1, 500.0, -1.0, 1e-4)})
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
