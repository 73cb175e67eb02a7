#!/usr/bin/env bash
# qwix's product of two int8 or float8 arrays with float16 scales is infinite where the right result is 1,024.
#
# Versions: qwix 0.1.8, Python 3.12, CPU.
# Guess: The sum of int8 products is scaled in float32, and the result of 64 products of 4 and 4 is a float16 of
# 1,024.
# Seen: The sum of stored numbers, about a million, is converted to float16 before it is scaled. Weights alone
# quantised do no harm.
#
# Output seen:
#   float32 int8: 1016, with quantised weights alone 1020
#   float32 float8_e4m3fn: 1024, with quantised weights alone 1024
#   bfloat16 int8: 1024, with quantised weights alone 1024
#   bfloat16 float8_e4m3fn: 1024, with quantised weights alone 1024
#   float16 int8: inf, with quantised weights alone 1020
#   float16 float8_e4m3fn: inf, with quantised weights alone 1024
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check qwix==0.1.8 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp
import qwix

numbers = (((1,), (0,)), ((), ()))
for dtype in ("float32", "bfloat16", "float16"):
    a, b = jnp.full((1, 64), 4, dtype), jnp.full((64, 1), 4, dtype)
    for kind in ("int8", "float8_e4m3fn"):
        quantized = qwix.quantize(a, kind, channelwise_axes=[0]), qwix.quantize(b, kind, channelwise_axes=[1])
        product = qwix.dot_general(*quantized, numbers)[0, 0]
        weights_only = qwix.dot_general(a, quantized[1], numbers)[0, 0]
        print(f"{dtype} {kind}: {float(product):.0f}, with quantised weights alone {float(weights_only):.0f}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
