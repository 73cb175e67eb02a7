#!/usr/bin/env bash
# NaN becomes minus zero in float4_e2m1fn, so an invalid key or value of an nvfp4 cache is read as zero.
#
# Versions: jax 0.12.0.1, ml_dtypes 0.6.0, Python 3.12, CPU.
# Guess: fp4 has no NaN, so NaN becomes the largest number, as infinity does; a later isnan can be relied on as for fp8.
#
# Output seen:
#   float8_e4m3fn: NaN is stored as nan, infinity as nan, 1000 as nan
#   float4_e2m1fn: NaN is stored as -0.0, infinity as 6.0, 1000 as 6.0
#   weighted sum of values, one of which was NaN: float8_e4m3fn nan, float4_e2m1fn 1.5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1 ml_dtypes==0.6.0
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp

stored = jnp.array([jnp.nan, jnp.inf, 1000.0], jnp.float32)
values, weights = jnp.array([1.0, jnp.nan, 2.0], jnp.float32), jnp.array([0.5, 0.0, 0.5], jnp.float32)
sums = []
for dtype in (jnp.float8_e4m3fn, jnp.float4_e2m1fn):
    nan, infinity, large = (float(x) for x in stored.astype(dtype).astype(jnp.float32))
    print(f"{dtype.dtype.name}: NaN is stored as {nan}, infinity as {infinity}, 1000 as {large}")
    sums.append(f"{dtype.dtype.name} {float(weights @ values.astype(dtype).astype(jnp.float32))}")
print(f"weighted sum of values, one of which was NaN: {', '.join(sums)}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
