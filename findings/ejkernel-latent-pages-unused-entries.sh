#!/usr/bin/env bash
# `multi_latent_ragged_page_attention` loses new latents if an unused table entry names a page of the same sequence.
#
# Versions: ejkernel 0.0.80.3, Python 3.12, CPU.
# Guess: entries of a table past the pages of a sequence change nothing.
#
# Output seen:
#   unused entry 1: 0 of 4 new latents are not in the pages
#   unused entry 0: 4 of 4 new latents are not in the pages
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ejkernel==0.0.80.3 jax==0.10.2
cat >"$folder/script.py" <<'PYTHON'
import sys

import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.multi_latent_ragged_page_attention import multi_latent_ragged_page_attention

q, rotary, latents, keys = (np.random.default_rng(n).standard_normal((4, 1, 128)).astype(np.float32) for n in range(4))
latents, keys = latents[:, 0], keys[:, 0]
lost = []
for unused in (1, 0):  # the second entry of the table: the only sequence has one page, which is page 0
    tables = (jnp.asarray(x, jnp.int32) for x in ([4], [0, unused], [0, 4], [0, 0, 1]))
    pages = jnp.zeros((2, 4, 1, 256), jnp.float32)
    operands = (jnp.asarray(x) for x in (q, rotary, latents, keys))
    _, pages = multi_latent_ragged_page_attention(*operands, pages, *tables, softmax_scale=0.1)
    right = np.concatenate([latents, keys], axis=-1)
    wrong = (np.asarray(pages)[0, :, 0] != right).any(axis=-1).sum()
    print(f"unused entry {unused}: {wrong} of 4 new latents are not in the pages")
    lost.append(bool(wrong))
sys.exit(lost == [False, True])
PYTHON
# The script ends with 1 while the fault is there.
status=0
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py) || status=$?
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$status" != 1 ] || [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
