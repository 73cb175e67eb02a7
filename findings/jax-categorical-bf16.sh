#!/usr/bin/env bash
# `jax.random.categorical` of 4,096 equal bfloat16 logits never draws the upper half of the classes.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU; jax 0.10.2 prints the same.
# Guess: Equal logits are drawn equally often in every dtype; bfloat16 costs a percent at most.
# Seen: The Gumbel noise is drawn in the dtype of the logits. In bfloat16 it has 128 values, so that many classes tie
# for the largest and the first of them wins.
#
# Output seen:
#   float32 first eighth of the classes: 12% upper half: 50%
#   bfloat16 first eighth of the classes: 98% upper half: 0%
#   float32 a class of 0.001 is drawn with about 0.001
#   bfloat16 a class of 0.001 is drawn with less than 0.0001
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

for dtype in ("float32", "bfloat16"):
    drawn = np.asarray(jax.random.categorical(jax.random.key(0), jnp.zeros(4096, dtype), shape=(20_000,)))
    first = (drawn < 512).mean()
    print(dtype, "first eighth of the classes:", f"{first:.0%}", "upper half:", f"{(drawn >= 2048).mean():.0%}")
p = np.array([0.6, 0.3, 0.09, 0.009, 0.001])
for dtype in ("float32", "bfloat16"):
    logits = jnp.asarray(np.log(p), dtype)
    drawn = np.asarray(jax.random.categorical(jax.random.key(0), logits, shape=(1_000_000,)))
    print(dtype, "a class of 0.001 is drawn with", "about 0.001" if (drawn == 4).mean() > 8e-4 else "less than 0.0001")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
