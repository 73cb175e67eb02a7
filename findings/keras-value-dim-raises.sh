#!/usr/bin/env bash
# `keras.layers.MultiHeadAttention` raises if `value_dim` is not `key_dim`.
#
# Versions: keras 3.15.1, Python 3.12, CPU.
# Guess: `value_dim` may differ from `key_dim`, since it is a parameter of its own.
#
# Output seen:
#   keras 3.15.1
#   with return_attention_scores: (1, 5, 16)
#   without: TypeError Exception encountered when calling MultiHeadAttention.call().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check keras==3.15.1 jax==0.12.0.1
cat >"$folder/script.py" <<'PYTHON'
import logging
import os
import sys

logging.disable(logging.CRITICAL)
os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

layer = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8, value_dim=4)
x = np.ones((1, 5, 16), np.float32)
print("keras", keras.__version__)
print("with return_attention_scores:", layer(x, x, return_attention_scores=True)[0].shape)
try:
    print("without:", layer(x, x).shape)
except Exception as error:
    print("without:", type(error).__name__, str(error).splitlines()[0])
    sys.exit(1)
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
