#!/usr/bin/env bash
# tokamax's lightning indexer lets a query choose a compressed position that contains up to three later tokens.
#
# Versions: tokamax 0.0.17, Python 3.12, CPU.
# Guess: With a compression ratio of 4, a query chooses among the blocks of 4 tokens that end before it or at it.
# Seen: It also chooses the block that it is in. In a prefill this block is in the cache with the tokens after the
# query.
#
# Output seen:
#   query at token 0 chooses blocks [0, -1]: tokens up to 3
#   query at token 1 chooses blocks [0, -1]: tokens up to 3
#   query at token 2 chooses blocks [0, -1]: tokens up to 3
#   query at token 3 chooses blocks [0, -1]: tokens up to 3
#   query at token 4 chooses blocks [0, 1]: tokens up to 7
#   query at token 5 chooses blocks [0, 1]: tokens up to 7
#   query at token 6 chooses blocks [0, 1]: tokens up to 7
#   query at token 7 chooses blocks [0, 1]: tokens up to 7
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check tokamax==0.0.17 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax.numpy as jnp
import numpy as np
from tokamax._src.ops.lightning_indexer import api

tokens, ratio = 8, 4
cache = np.zeros((1, 4, 4, 256), np.uint8)  # 16 compressed positions
cache[..., :128] = np.asarray(jnp.ones((), jnp.float8_e4m3fn)).view(np.uint8)  # keys
cache[..., 128] = 127  # scales of 1 in e8m0
chosen = api.lightning_indexer(
    jnp.ones((tokens, 1, 128), jnp.bfloat16),
    jnp.ones((tokens, 1)),
    jnp.asarray(cache),
    seq_lens=jnp.array([tokens]),
    page_indices=jnp.array([0]),
    cu_q_lens=jnp.array([0, tokens]),
    distribution=jnp.array([0, 1, 1]),
    k=2,
    compression_ratio=ratio,
    implementation="xla",
)
for token, blocks in enumerate(np.asarray(chosen).tolist()):
    last = max(blocks) * ratio + ratio - 1
    print(f"query at token {token} chooses blocks {blocks}: tokens up to {last}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
