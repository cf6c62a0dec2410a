"""One small net in every format that an engine here reads: the files from which mutants are made.

``python seeds.py ENGINE DIRECTORY`` writes those of one engine, each as a model with a config, and says their names.
``y = relu(x @ w) + b`` for x f32[rows, 4]; the one for llama.cpp is a language model.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
BIAS = np.array([0.1, 0.2, 0.3], np.float32)
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 3 }
"""


def _model(root: Path, name: str, config: str) -> Path:
    version = root / name / "1"
    version.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(f"max_batch_size: 4 {config}")
    return version


# ---------------------------------------------------------------------- ONNX


def onnx_files(root: Path) -> None:
    """The weights in the file, and beside it."""
    import onnx

    net = _onnx_net()
    onnx.save(net, str(_model(root, "onnx", 'backend: "onnxruntime"') / "model.onnx"))
    _save_apart(net, _model(root, "onnx_external", 'backend: "onnxruntime"'))


def _save_apart(net: Any, version: Path) -> None:
    import onnx

    settings: dict[str, Any] = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save(net, str(version / "model.onnx"), **settings)


def _onnx_net() -> Any:
    from onnx import TensorProto, helper, numpy_helper

    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size])] for name, size in (("x", 4), ("y", 3))
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["wx"]),
        helper.make_node("Relu", ["wx"], ["r"]),
        helper.make_node("Add", ["r", "b"], ["y"]),
    ]
    weights = [numpy_helper.from_array(WEIGHTS, "w"), numpy_helper.from_array(BIAS, "b")]
    graph = helper.make_graph(nodes, "net", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# ---------------------------------------------------------------------- OpenVINO


def openvino_files(root: Path) -> None:
    """IR, ONNX with weights beside it, and a program of PaddlePaddle."""
    import openvino

    from tests.backends.openvino.test_paddle_files import parameters, program

    net = openvino.Core().read_model(_onnx_net().SerializeToString())
    version = _model(root, "openvino", 'backend: "openvino"')
    openvino.save_model(net, str(version / "model.xml"), compress_to_fp16=False)
    _save_apart(_onnx_net(), _model(root, "openvino_onnx", _openvino("model.onnx")))
    version = _model(root, "openvino_paddle", _openvino("model.pdmodel"))
    (version / "model.pdmodel").write_bytes(program())
    (version / "model.pdiparams").write_bytes(parameters())


def _openvino(file: str) -> str:
    return f'backend: "openvino" default_model_filename: "{file}"'


# ---------------------------------------------------------------------- PyTorch


def torch_files(root: Path) -> None:
    """TorchScript, a program of torch.export, and weights in both forms for a ``model.py``."""
    import torch
    from safetensors.torch import save_file

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = torch.nn.Parameter(torch.tensor(WEIGHTS)), torch.nn.Parameter(torch.tensor(BIAS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ self.w) + self.b

    config = f'backend: "pytorch" {TENSORS}'
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.trace(Net(), torch.zeros(2, 4))  # type: ignore[no-untyped-call]
        script.save(str(_model(root, "torchscript", config) / "model.pt"))
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(Net(), (torch.zeros(2, 4),), dynamic_shapes={"x": {0: rows}})
    torch.export.save(program, str(_model(root, "exported", config.replace('"y"', '"OUTPUT__0"')) / "model.pt2"))
    for name, file, save in (("state_dict", "model.pt", torch.save), ("safetensors", "model.safetensors", save_file)):
        version = _model(root, name, f'{config} runtime: "model.py"')
        (version / "model.py").write_text(MODULE)
        save(Net().state_dict(), str(version / file))


MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return torch.relu(x @ self.w) + self.b
"""


# ---------------------------------------------------------------------- TensorFlow


def tensorflow_files(root: Path) -> None:
    """A SavedModel with variables, a frozen graph, and what OpenVINO reads of both; TensorFlow Lite."""
    import tensorflow as tf

    module = tf.Module()
    module.w, module.b = tf.Variable(WEIGHTS), tf.Variable(BIAS)
    takes = [tf.TensorSpec([None, 4], tf.float32, name="x")]
    module.net = tf.function(lambda x: {"y": tf.nn.relu(x @ module.w) + module.b}, input_signature=takes)
    saved = _model(root, "savedmodel", 'backend: "tensorflow"') / "model.savedmodel"
    tf.saved_model.save(module, str(saved), signatures=module.net)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="x")
        tf.identity(tf.nn.relu(x @ WEIGHTS) + BIAS, name="y")
    frozen = graph.as_graph_def().SerializeToString()
    config = f'platform: "tensorflow_graphdef" {TENSORS}'
    (_model(root, "graphdef", config) / "model.graphdef").write_bytes(frozen)
    (_model(root, "openvino_graphdef", _openvino("model.pb")) / "model.pb").write_bytes(frozen)
    lite = tf.lite.TFLiteConverter.from_saved_model(str(saved)).convert()
    (_model(root, "openvino_tflite", _openvino("model.tflite")) / "model.tflite").write_bytes(lite)


# ---------------------------------------------------------------------- llama.cpp


def gguf_files(root: Path) -> None:
    """A language model of one layer."""
    from tests.backends.llamacpp.gguf_files import write_tiny

    version = root / "gguf" / "1"
    version.mkdir(parents=True)
    settings = {"context": "64", "slots": "1", "threads": "1"}
    members = (f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in settings.items())
    (version.parent / "config.pbtxt").write_text('backend: "llamacpp"' + " ".join(members))
    write_tiny(version / "model.gguf")


ENGINES: dict[str, Callable[[Path], None]] = {
    "onnxruntime": onnx_files,
    "openvino": openvino_files,
    "torch": torch_files,
    "tensorflow": tensorflow_files,
    "xllamacpp": gguf_files,
}

if __name__ == "__main__":
    ENGINES[sys.argv[1]](Path(sys.argv[2]))
