#!/usr/bin/env bash
# `attention` of ejkernel with a dropout rate of 1 is NaN.
#
# Versions: ejkernel 0.0.80.3, jax 0.10.2, Python 3.12, CPU.
# Guess: a rate of 1 drops everything, or raises.
#
# Output seen:
#   rate 0.999: NaN False
#   rate 1.0: NaN True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ejkernel==0.0.80.3 jax==0.10.2
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from ejkernel.kernels._xla.attention import attention

x = jnp.ones((1, 4, 2, 8))
for rate in (0.999, 1.0):
    out, _ = attention(
        x, x, x, dtype=x.dtype, deterministic=False, dropout_rng=jax.random.PRNGKey(0), dropout_prob=rate
    )
    print(f"rate {rate}: NaN {bool(jnp.isnan(out).any())}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
