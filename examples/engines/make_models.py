#!/usr/bin/env python3
"""Train one small net on handwritten digits and write it in every format that Headrace serves: a model repository.

Needs scikit-learn and onnx. A format whose engine is not installed is skipped, with a line.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.neural_network import MLPClassifier

sys.path.append(str(Path(__file__).resolve().parents[1]))  # modules that all examples with digits share

from digits import training_digits
from train_digits import WHITE, export, train, weights

if TYPE_CHECKING:
    from torch_net import DigitsNet

HERE = Path(__file__).resolve().parent
#: In all configs. ONNX, OpenVINO, SavedModel and exported files need none, and would then have batches of up to 4.
BATCHES = "max_batch_size: 64\ndynamic_batching { }\n"
#: The fields that other files lack, without the axis of the rows.
TENSORS = """\
input [ { name: "image" data_type: TYPE_UINT8 dims: [ 8, 8 ] } ]
output [ { name: "probabilities" data_type: TYPE_FP32 dims: [ 10 ] } ]
"""
#: Without it, a ``model.py`` is a Python model.
EAGER = 'backend: "pytorch"\nruntime: "model.py"\n'
#: For native code.
TRUST = 'parameters { key: "trust" value { string_value: "true" } }\n'


def write_onnx(net: MLPClassifier, version: Path) -> None:
    (version / "model.onnx").write_bytes(export(net).SerializeToString(deterministic=True))


def write_openvino(net: MLPClassifier, version: Path) -> None:
    """Converted from ONNX, with the same weights."""
    import openvino

    model = openvino.Core().read_model(export(net).SerializeToString())
    openvino.save_model(model, str(version / "model.xml"), compress_to_fp16=False)


def write_torchscript(net: MLPClassifier, version: Path) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch recommends torch.export
        torch.jit.script(torch_net(net)).save(str(version / "model.pt"))  # type: ignore[no-untyped-call]


def write_eager(net: MLPClassifier, version: Path) -> None:
    """The class and its weights."""
    from safetensors.torch import save_file

    shutil.copy(HERE / "torch_net.py", version / "model.py")
    save_file(torch_net(net).state_dict(), version / "model.safetensors")


def write_exported(net: MLPClassifier, version: Path) -> None:
    """The result is a dictionary with the names of outputs as keys."""
    import torch

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch_net(net)

        def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"probabilities": self.net(image)}

    torch.export.save(_exported(Named()), str(version / "model.pt2"))


def write_aoti(net: MLPClassifier, version: Path) -> None:
    """Compiled to native code for this kind of machine, which takes half a minute."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler about itself
        torch._inductor.aoti_compile_and_package(_exported(torch_net(net)), package_path=str(version / "model.pt2"))


def _exported(module: Any) -> Any:
    import torch

    rows = torch.export.Dim("rows", min=1, max=64)
    example = torch.zeros(2, 8, 8, dtype=torch.uint8)
    return torch.export.export(module, (example,), dynamic_shapes={"image": {0: rows}})


def torch_net(net: MLPClassifier) -> DigitsNet:
    import torch
    from torch_net import DigitsNet

    arrays = weights(net)
    module = DigitsNet()
    for layer, linear in enumerate((module.hidden, module.scores)):
        linear.weight.data = torch.tensor(arrays[f"weight{layer}"].T).contiguous()
        linear.bias.data = torch.tensor(arrays[f"bias{layer}"])
    return module.eval()


def write_saved_model(net: MLPClassifier, version: Path) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.arrays = {name: tf.Variable(array) for name, array in weights(net).items()}

    def read(image: Any) -> dict[str, Any]:
        return {"probabilities": _probabilities(tf, image, module.arrays)}

    takes = [tf.TensorSpec([None, 8, 8], tf.uint8, name="image")]
    module.read = tf.function(read, input_signature=takes)
    tf.saved_model.save(module, str(version / "model.savedmodel"), signatures=module.read)


def write_graphdef(net: MLPClassifier, version: Path) -> None:
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        image = tf.compat.v1.placeholder(tf.uint8, [None, 8, 8], name="image")
        tf.identity(_probabilities(tf, image, weights(net)), name="probabilities")
    (version / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())


def _probabilities(tf: Any, image: Any, arrays: Any) -> Any:
    pixels = tf.reshape(tf.cast(image, tf.float32), [-1, 64]) / WHITE
    hidden = tf.nn.relu(pixels @ arrays["weight0"] + arrays["bias0"])
    return tf.nn.softmax(hidden @ arrays["weight1"] + arrays["bias1"])


def write_tensorrt(net: MLPClassifier, version: Path) -> None:
    """Built from ONNX, for the GPU of this machine. Not run yet."""
    import tensorrt

    builder = tensorrt.Builder(tensorrt.Logger(tensorrt.Logger.WARNING))
    network, config = builder.create_network(0), builder.create_builder_config()
    parser = tensorrt.OnnxParser(network, builder.logger)
    if not parser.parse(export(net).SerializeToString()):
        raise SystemExit(f"TensorRT does not read the net: {parser.get_error(0)}")
    profile = builder.create_optimization_profile()
    profile.set_shape("image", (1, 8, 8), (16, 8, 8), (64, 8, 8))
    config.add_optimization_profile(profile)
    (version / "model.plan").write_bytes(bytes(builder.build_serialized_network(network, config)))


def write_python(net: MLPClassifier, version: Path) -> None:
    shutil.copy(HERE / "numpy_model.py", version / "model.py")
    arrays: dict[str, Any] = {**weights(net)}
    np.savez(version / "weights.npz", **arrays)


@dataclass(frozen=True, slots=True)
class Format:
    """``write`` puts the files into the directory of a version. It imports ``modules`` of ``packages``, and
    runs ``compiler``."""

    write: Callable[[MLPClassifier, Path], None]
    config: str = BATCHES
    modules: tuple[str, ...] = ()
    packages: str = ""
    compiler: str = ""

    def why_not(self) -> str:
        """Return the missing package and the command that installs it; empty if nothing is missing."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed; run: pip install {self.packages}"
        if self.compiler and shutil.which(self.compiler) is None:
            return f"{self.compiler} is not installed; run: apt-get install {self.compiler}"
        return ""


#: The formats, by the suffix of the model's name after ``digits_``.
FORMATS = {
    "onnx": Format(write_onnx),
    "openvino": Format(write_openvino, BATCHES, ("openvino",), "openvino"),
    "torchscript": Format(write_torchscript, BATCHES + TENSORS, ("torch",), "torch"),
    "eager": Format(write_eager, EAGER + BATCHES + TENSORS, ("torch", "safetensors"), "torch safetensors"),
    "exported": Format(write_exported, BATCHES, ("torch",), "torch"),
    "aoti": Format(write_aoti, TRUST + BATCHES + TENSORS, ("torch",), "torch", "g++"),
    "savedmodel": Format(write_saved_model, BATCHES, ("tensorflow",), "tensorflow-cpu"),
    "graphdef": Format(write_graphdef, BATCHES + TENSORS, ("tensorflow",), "tensorflow-cpu"),
    "tensorrt": Format(write_tensorrt, BATCHES, ("tensorrt",), "tensorrt-cu13"),
    "python": Format(write_python, BATCHES + TENSORS),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    net = train(training_digits())
    for name in options.formats:
        form, model = FORMATS[name], options.models / f"digits_{name}"
        shutil.rmtree(model, ignore_errors=True)
        if reason := form.why_not():
            print(f"{model.name:20} left out: {reason}")
            continue
        began, version = time.monotonic(), model / "1"
        version.mkdir(parents=True)
        form.write(net, version)
        (model / "config.pbtxt").write_text(form.config)
        files = ", ".join(sorted(path.name for path in version.iterdir()))
        print(f"{model.name:20} {files} ({time.monotonic() - began:.1f} s)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", metavar="DIR", type=Path, default=HERE / "models", help="where to write (default: %(default)s)")
    known = ", ".join(FORMATS)
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="FORMAT", help=f"of {known} (default: all)")
    return parser


if __name__ == "__main__":
    main()
