#!/usr/bin/env bash
# A positive float32 below 1.2e-38 is not greater than 0 in JAX on a CPU, while its value is kept.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: CPUs compute with subnormal numbers, and NumPy and torch do, so JAX does.
# Seen: Weights of `exp` vanish from logits of -88 on, and a sum or a comparison takes a subnormal for 0.
#
# Output seen:
#   NumPy value True x > 0 True x + x > 0 True exp(-90) > 0 True
#   JAX value True x > 0 False x + x > 0 False exp(-90) > 0 False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp
import numpy as np

for name, module in (("NumPy", np), ("JAX", jnp)):
    x = module.asarray(np.float32(1e-40))
    print(name, "value", float(x) > 0, "x > 0", bool(x > 0), "x + x > 0", float(x + x) > 0, end=" ")
    print("exp(-90) > 0", float(module.exp(module.asarray(np.float32(-90)))) > 0)
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
