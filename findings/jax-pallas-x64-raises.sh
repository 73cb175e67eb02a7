#!/usr/bin/env bash
# Four attention kernels of JAX raise with `jax_enable_x64`.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU.
# Guess: `jax_enable_x64` changes nothing for operands whose dtypes are given.
#
# Output seen:
#   mha lax.div requires arguments to have the same dtypes, got int32, int64. (Tip:
#   gqa lax.div requires arguments to have the same dtypes, got int32, int64. (Tip:
#   paged_attention lax.div requires arguments to have the same dtypes, got int32, int64. (Tip:
#   flash_attention lax.select requires arguments to have the same dtypes, got int64, int32. (T
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import sys

import jax
import numpy as np
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.gpu import attention, decode_attention, paged_attention
from jax.experimental.pallas.ops.tpu import flash_attention

jax.config.update("jax_enable_x64", True)
q, k, v = x = np.random.default_rng(0).normal(size=(3, 1, 128, 1, 64)).astype(np.float32)
p = np.exp(np.float64(q[0, -1, 0]) @ k[0, :, 0].T)  # The last query sees every key.
right, failed = p / p.sum() @ v[0, :, 0], False
pages = *x[1:].reshape(2, 1, 8, 16, 64), np.arange(8, dtype=np.int32)[None]
for name, call in {
    "mha": lambda: attention.mha(q, k, v, None, causal=True, interpret=True),
    "gqa": lambda: decode_attention.gqa(q[:, -1], k, v, sm_scale=1.0, k_splits=2, interpret=True),
    "paged_attention": lambda: paged_attention.paged_attention(q[:, -1], *pages, None, k_splits=2, interpret=True),
    "flash_attention": lambda: flash_attention.flash_attention(*x.swapaxes(2, 3), causal=True),
}.items():
    with tpu.force_tpu_interpret_mode():
        try:
            print(name, f"largest error {np.abs(np.asarray(call()).reshape(-1, 64)[-1] - right).max():.1e}")
        except TypeError as error:
            failed = print(name, str(error)[:75]) is None
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
