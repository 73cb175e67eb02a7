#!/usr/bin/env bash
# Attention of tokamax with a dropout rate of 1 is NaN outside jit, and under jit zero or infinite.
#
# Versions: tokamax 0.0.17, jax 0.12.0.1, Python 3.12, CPU.
# Guess: a rate of 1 gives zeros or an error, and jit changes nothing.
#
# Output seen:
#   tokamax 0.0.17
#   xla, all dropped: outside jit nan, under jit 0.0
#   xla, half dropped: outside jit nan, under jit inf
#   xla_chunked, all dropped: outside jit nan, under jit 0.0
#   xla_chunked, half dropped: outside jit nan, under jit inf
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check tokamax==0.0.17 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import importlib.metadata

import jax
import jax.numpy as jnp
from tokamax._src.ops.attention import base, xla_chunked

print("tokamax", importlib.metadata.version("tokamax"))
x = jnp.ones((1, 4, 2, 8))
masks = {"all": jnp.zeros((1, 2, 4, 4), bool), "half": jnp.arange(4) % 2 == jnp.zeros((1, 2, 4, 1))}
operators = {"xla": base.DotProductAttention(), "xla_chunked": xla_chunked.XlaChunkedDotProductAttention()}
for name, operator in operators.items():
    for share, mask in masks.items():

        def attend(mask, operator=operator):
            return operator(x, x, x, dropout_mask=mask, dropout_rate=1.0)

        outside, inside = attend(mask)[0, 0, 0, 0], jax.jit(attend)(mask)[0, 0, 0, 0]
        print(f"{name}, {share} dropped: outside jit {outside}, under jit {inside}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
