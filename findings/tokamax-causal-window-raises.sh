#!/usr/bin/env bash
# `tokamax.dot_product_attention` raises for a window with `is_causal=True` if queries and keys differ in number.
#
# Versions: tokamax 0.0.16, Python 3.12, CPU.
# Guess: a window and `is_causal=True` go together for any numbers of queries and keys.
#
# Output seen:
#   0.0.16, window None: no error
#   0.0.16, window (8, 4): TypeError: and got incompatible shapes for broadcasting: (32, 32), (16, 32).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check tokamax==0.0.16 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import sys

import jax.numpy as jnp
import numpy as np
import tokamax

q, k, v = np.random.default_rng(0).normal(size=(3, 1, 32, 1, 64))
q = q[:, :16]
ahead = np.arange(32) - np.arange(16)[:, None]
logits = np.where((ahead <= 0) & (ahead >= -8), q[0, :, 0] @ k[0, :, 0].T / 8, -np.inf)
weights = np.exp(logits)
right = weights / weights.sum(-1, keepdims=True) @ v[0, :, 0]
failed = False
for window in (None, (8, 4)):
    try:
        operands = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
        out = tokamax.dot_product_attention(*operands, is_causal=True, local_window_size=window, implementation="xla")
        error = f"largest error {np.abs(np.asarray(out)[0, :, 0] - right).max():.1e}" if window else "no error"
    except (TypeError, ValueError) as raised:
        failed, error = True, f"{type(raised).__name__}: {str(raised)[:90]}"
    print(f"{tokamax.__version__}, window {window}: {error}")
sys.exit(failed)
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
