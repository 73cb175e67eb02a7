#!/usr/bin/env bash
# onnxruntime refuses masks of (1, S) and (T, 1) that ONNX's Attention broadcasts.
#
# Versions: onnxruntime 1.31.1, onnx 1.23.2, Python 3.12, CPU.
# Guess: A mask of one row for all queries works, since the operator takes masks that broadcast to (B, H, T, S).
# Seen: The axes of batch and heads are broadcast, those of queries and keys are not.
#
# Output seen:
#   (3, 5) equal: True
#   (1, 1, 3, 5) equal: True
#   (1, 5) refused: Fail
#   (3, 1) refused: Fail
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

onnxruntime.set_default_logger_severity(4)
floats = TensorProto.FLOAT
for shape in ((3, 5), (1, 1, 3, 5), (1, 5), (3, 1)):
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["out"])
    inputs = [helper.make_tensor_value_info(n, floats, [2, 2, t, 8]) for n, t in (("q", 3), ("k", 5), ("v", 5))]
    inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, shape))
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("out", floats, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    x = np.ones((2, 2, 5, 8), np.float32)
    feeds = {"q": x[:, :, :3], "k": x, "v": x, "mask": np.ones(shape, bool)}
    right = ReferenceEvaluator(model).run(["out"], feeds)[0]
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        print(shape, "equal:", np.allclose(session.run(["out"], feeds)[0], right))
    except Exception as error:
        print(shape, "refused:", type(error).__name__)
PYTHON
printed=$(cd "$folder" && JAX_PLATFORMS=cpu venv/bin/python script.py 2>/dev/null)
echo "$printed"
expected=$(sed -n 's/^#   //p' "$0")
if [ "$printed" != "$expected" ]; then
  echo "the output changed" >&2
  exit 1
fi
