#!/usr/bin/env bash
# onnxruntime's GroupQueryAttention returns a score of 0 for hidden keys: the softmax of its scores is not its weights.
#
# Versions: onnxruntime 1.31.1, onnx 1.23.2, Python 3.12, CPU.
# Guess: scores "before softmax" (qk_output=1) are minus infinity where a key is hidden, so that their softmax is what
# qk_output=2 returns; or they are the products, hidden or not.
#
# Output seen:
#   scores of the last query with a window of 2: [0.0, 0.0, -8.0, -4.0]
#   their softmax:                               [0.4954, 0.4954, 0.0002, 0.0091]
#   weights that it returns with qk_output=2:    [0.0, 0.0, 0.018, 0.982]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.2
cat >"$folder/script.py" <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

NAMES = ["q", "k", "v", "past_k", "past_v", "seqlens_k", "total"]
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT32
DOMAINS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]


def attend(qk_output, feeds):
    results = ["out", "present_k", "present_v", "qk"]
    options = {"num_heads": 1, "kv_num_heads": 1, "scale": 1.0, "local_window_size": 2, "qk_output": qk_output}
    node = helper.make_node("GroupQueryAttention", NAMES, results, domain="com.microsoft", **options)
    inputs = [helper.make_tensor_value_info(x, INT if x in ("seqlens_k", "total") else FLOAT, None) for x in NAMES]
    outputs = [helper.make_tensor_value_info(x, FLOAT, None) for x in results]
    model = helper.make_model(helper.make_graph([node], "graph", inputs, outputs), opset_imports=DOMAINS, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["qk"], feeds)[0][0, 0, -1]


q, k = np.zeros((1, 4, 16), np.float32), np.zeros((1, 4, 16), np.float32)
q[..., 0], k[0, :, 0] = 1.0, [-16.0, -12.0, -8.0, -4.0]
empty = np.zeros((1, 1, 0, 16), np.float32)
lengths = np.array([3], np.int32), np.array([4], np.int32)
feeds = dict(zip(NAMES, (q, k, k, empty, empty, *lengths), strict=True))
scores, weights = attend(1, feeds), attend(2, feeds)
softmax = np.exp(scores) / np.exp(scores).sum()
print(f"scores of the last query with a window of 2: {scores.tolist()}")
print(f"their softmax:                               {[round(float(x), 4) for x in softmax]}")
print(f"weights that it returns with qk_output=2:    {[round(float(x), 4) for x in weights]}")
PYTHON
printed=$(cd "$folder" && venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
