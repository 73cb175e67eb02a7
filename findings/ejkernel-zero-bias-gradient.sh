#!/usr/bin/env bash
# The gradient of `bias` is zero in `flash_attention` and `ring_attention`.
#
# Versions: ejkernel 0.0.80.3, Python 3.12, CPU.
# Guess: an operand that changes the result has a gradient, or its differentiation raises.
#
# Output seen:
#   flash_attention: largest dbias 0.000, right 3.040
#   ring_attention: largest dbias 0.000, right 3.040
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ejkernel==0.0.80.3 jax==0.10.2
cat >"$folder/script.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.flash_attention import flash_attention
from ejkernel.kernels._xla.ring_attention import ring_attention

random = np.random.default_rng(0)
q, k, v, g = random.standard_normal((4, 1, 32, 2, 16)).astype(np.float32)
bias = random.standard_normal((1, 2, 32, 32)).astype(np.float32)
logits = np.einsum("btnh,bsnh->bnts", q, k, dtype=np.float64) / 4 + bias
p = np.exp(logits - logits.max(-1, keepdims=True))
p /= p.sum(-1, keepdims=True)
dp = np.einsum("btnh,bsnh->bnts", g, v, dtype=np.float64)
right = p * (dp - (p * dp).sum(-1, keepdims=True))

wrong = False
for attention in flash_attention, ring_attention:
    _, pull = jax.vjp(lambda b: attention(*map(jnp.asarray, (q, k, v)), bias=b), jnp.asarray(bias))
    (found,) = pull(jnp.asarray(g))
    wrong |= np.abs(found - right).max() > 1e-3
    print(f"{attention.__name__}: largest dbias {np.abs(found).max():.3f}, right {np.abs(right).max():.3f}")
sys.exit(int(wrong))
PYTHON
# The script ends with 1 while the fault is there. Numbers in its output differ between machines.
status=0
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py) || status=$?
echo "$printed"
hide_numbers() { sed -E 's/[0-9]+([.][0-9]+)?(e[-+]?[0-9]+)?/#/g'; }
expected=$(sed -n 's/^#   //p' "$0")
if [ "$status" != 1 ] || [ "$(hide_numbers <<<"$printed")" != "$(hide_numbers <<<"$expected")" ]; then
  echo "the output changed" >&2
  exit 1
fi
