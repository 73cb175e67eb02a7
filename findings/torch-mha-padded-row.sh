#!/usr/bin/env bash
# A fully padded sequence of `torch.nn.MultiheadAttention` is NaN under `no_grad` and zeros with gradients.
#
# Versions: torch 2.13.0, Python 3.11, CPU.
# Guess: In evaluation mode, the result does not depend on whether gradients are recorded.
# Seen: Without gradients a fast path of its own runs. With `need_weights=True` both are NaN. The output bias is 0
# here.
#
# Output seen:
#   need_weights=False, gradients=False: padded row [nan]
#   need_weights=False, gradients=True: padded row [0.0]
#   need_weights=True, gradients=False: padded row [nan]
#   need_weights=True, gradients=True: padded row [nan]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import torch

torch.manual_seed(0)
layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
x = torch.randn(2, 5, 8)
padding = torch.tensor([[False] * 5, [True] * 5])
for need_weights in (False, True):
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            out = layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0]
        print(f"{need_weights=}, gradients={grad}: padded row", out[1].unique().tolist()[:1])
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
