#!/usr/bin/env bash
# jax.lax.top_k puts a computed NaN last and jnp.nan first, and takes 0.0 before an earlier -0.0 that equals it.
#
# Versions: jax 0.12.0.1, Python 3.12, CPU.
# Guess: NaN has one place whatever its sign, as in argsort and argmax, and of equal elements the first comes first, as
# the documentation says. An indexer's scores of keys without a match are 0.0 or -0.0, by the signs of its weights.
#
# Output seen:
#   jnp.nan among 1 and 2: top_k [0, 2, 1], argsort from the largest [0, 2, 1], argmax 0
#   infinity - infinity among 1 and 2: top_k [2, 1, 0], argsort from the largest [0, 2, 1], argmax 0
#   -0.0 and 0.0, equal True: top_k [1, 0], argsort from the largest [0, 1], argmax 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import jax
import jax.numpy as jnp


def describe(x):
    order = jnp.argsort(x, descending=True).tolist()
    return f"top_k {jax.lax.top_k(x, len(x))[1].tolist()}, argsort from the largest {order}, argmax {jnp.argmax(x)}"


given = jnp.array([jnp.nan, 1.0, 2.0])
computed = jnp.array([jnp.inf, 1.0, 2.0]) - jnp.array([jnp.inf, 0.0, 0.0])
zeros = jnp.array([-0.0, 0.0])
print(f"jnp.nan among 1 and 2: {describe(given)}")
print(f"infinity - infinity among 1 and 2: {describe(computed)}")
print(f"-0.0 and 0.0, equal {bool(zeros[0] == zeros[1])}: {describe(zeros)}")
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
