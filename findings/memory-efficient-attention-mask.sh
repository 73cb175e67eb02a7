#!/usr/bin/env bash
# A mask without a bias raises, and a bias without a mask, in `efficient_dot_product_attention`.
#
# Versions: memory-efficient-attention 0.1.3, Python 3.12, CPU.
# Guess: a mask and a bias are two optional parameters, of which either may be given alone.
#
# Output seen:
#   mask AttributeError: 'NoneType' object has no attribute 'shape'
#   bias AttributeError: 'NoneType' object has no attribute 'shape'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0.1
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps memory-efficient-attention==0.1.3
cat >"$folder/script.py" <<'PYTHON'
import importlib.util
import sys
from pathlib import Path

import numpy as np

package = importlib.util.find_spec("memory_efficient_attention").submodule_search_locations[0]
spec = importlib.util.spec_from_file_location("attention_jax", Path(package) / "attention_jax.py")
library = importlib.util.module_from_spec(spec)  # the package itself imports PyTorch
spec.loader.exec_module(library)

x = np.random.default_rng(0).normal(size=(1, 8, 2, 16)).astype(np.float32)
failures = 0
for options in ({"mask": np.ones((1, 2, 8, 8), bool)}, {"bias": np.zeros((1, 2, 8, 8), np.float32)}):
    try:
        print(*options, library.efficient_dot_product_attention(x, x, x, **options).shape)
    except AttributeError as error:
        print(*options, f"AttributeError: {error}")
        failures += 1
sys.exit(bool(failures > 0))
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
