#!/usr/bin/env bash
# MoBA of MaxText chooses blocks at default precision, whatever `matmul_precision` requests.
#
# Versions: maxtext 0.2.5, Python 3.12, CPU.
# Guess: one precision for all products of the model is also that of the gate.
#
# Output seen:
#   products in the gate: 1 with a precision: 0
#   queries that get other blocks if operands are rounded to bf16, as on a TPU: 0.2%
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check maxtext==0.2.5 flax==0.12.12 jax==0.12.0.1 aqtp==0.9.0 jinja2 omegaconf pathwaysutils pydantic qwix tensorboardx tokamax==0.0.17
cat >"$folder/script.py" <<'PYTHON'
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from maxtext.layers.attention_op import AttentionOp

config = types.SimpleNamespace(moba_chunk_size=32, moba_topk=2, matmul_precision="highest")
operation = types.SimpleNamespace(config=config)
values = np.random.default_rng(0)
q, k = (jnp.asarray(values.normal(size=s), jnp.float32) for s in ((512, 4, 64), (512, 4, 64)))


def choose(q, k):
    return AttentionOp.calculate_moba_gate_logic(operation, q, k, jnp.arange(512))[-1]


program = str(jax.make_jaxpr(choose)(q, k))
print("products in the gate:", program.count("dot_general["), "with a precision:", program.count("precision="))
rounded = choose(q.astype(jnp.bfloat16).astype(jnp.float32), k.astype(jnp.bfloat16).astype(jnp.float32))
changed = np.asarray(choose(q, k) != rounded).any(-1).mean()
print(f"queries that get other blocks if operands are rounded to bf16, as on a TPU: {changed:.1%}")
sys.exit("precision=" not in program)
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
