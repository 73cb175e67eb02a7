#!/usr/bin/env bash
# ONNX's Attention is NaN where a cache holds NaN behind `nonpad_kv_seqlen`, in the reference and in onnxruntime.
#
# Versions: onnxruntime 1.31.1, onnx 1.23.2, Python 3.12, CPU.
# Guess: Slots behind the length of a cache are not read: they may hold what an earlier sequence or nobody left there.
# Seen: They are multiplied by a weight of 0. Large finite numbers there do no harm.
#
# Output seen:
#   0.0 behind the length, reference: 1.0
#   0.0 behind the length, onnxruntime: 1.0
#   1e+30 behind the length, reference: 1.0
#   1e+30 behind the length, onnxruntime: 1.0
#   nan behind the length, reference: nan
#   nan behind the length, onnxruntime: nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

names, floats = ["q", "k", "v", "", "", "", "lengths"], TensorProto.FLOAT
node = helper.make_node("Attention", names, ["out"])
inputs = [helper.make_tensor_value_info(n, floats, [1, 1, t, 8]) for n, t in (("q", 2), ("k", 5), ("v", 5))]
inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, [1]))
graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("out", floats, None)])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
for left in (0.0, 1e30, np.nan):
    v = np.ones((1, 1, 5, 8), np.float32)
    v[:, :, 3:] = left
    feeds = {"q": v[:, :, :2], "k": np.ones_like(v), "v": v, "lengths": np.array([3], np.int64)}
    for name, run in (("reference", ReferenceEvaluator(model).run), ("onnxruntime", session.run)):
        print(f"{left} behind the length, {name}:", run(["out"], feeds)[0].ravel()[0])
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
