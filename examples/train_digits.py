#!/usr/bin/env python3
"""Train the digits model and write examples/models/digits: a dense net, 64 -> 64 -> 10.

Needs scikit-learn and onnx. Everything is seeded, and the weights are rounded to 1/4096, so that a
machine whose last bits differ still writes the same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from digits import Digits, held_out_digits, training_digits
from onnx import TensorProto, helper, numpy_helper
from sklearn.neural_network import MLPClassifier

MODEL = Path(__file__).parent / "models" / "digits" / "1" / "model.onnx"
WHITE = 16.0  #: the highest value of a pixel
GRAIN = 4096.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=MODEL, help="the file to write (default: %(default)s)")
    output: Path = parser.parse_args(arguments).output
    net = train(training_digits())
    output.write_bytes(export(net).SerializeToString(deterministic=True))
    print(
        f"{output}: {output.stat().st_size} bytes, {accuracy(net, held_out_digits()):.1%} of the held-out digits right"
    )


def train(digits: Digits) -> MLPClassifier:
    """Return a net that was trained with ``digits``; always the same one."""
    net = MLPClassifier(hidden_layer_sizes=(64,), alpha=1e-2, batch_size=100, max_iter=500, random_state=0, tol=1e-3)
    return net.fit(_pixels(digits), digits.numbers)


def accuracy(net: MLPClassifier, digits: Digits) -> float:
    """Return the share of ``digits`` that ``net`` classifies right, 0 to 1."""
    return float((net.predict(_pixels(digits)) == digits.numbers).mean())


def export(net: MLPClassifier) -> onnx.ModelProto:
    """``image`` u8[rows, 8, 8] -> ``probabilities`` f32[rows, 10]; the scaling is part of the graph."""
    nodes = [
        helper.make_node("Flatten", ["image"], ["pixels"], axis=1),
        helper.make_node("Cast", ["pixels"], ["levels"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["levels", "white"], ["scaled"]),
        helper.make_node("Gemm", ["scaled", "weight0", "bias0"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "weight1", "bias1"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=1),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["rows", 8, 8])
    probabilities = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["rows", 10])
    graph = helper.make_graph(nodes, "digits", [image], [probabilities], initializer=_constants(net))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="train_digits.py")
    model.ir_version = 8  # the version of opset 17, which old engines read, too
    onnx.checker.check_model(model)
    return model


def weights(net: MLPClassifier) -> dict[str, npt.NDArray[np.float32]]:
    """``weight0`` f32[64, 64], ``bias0`` f32[64], ``weight1`` f32[64, 10] and ``bias1`` f32[10]."""
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    for layer, (weight, bias) in enumerate(zip(net.coefs_, net.intercepts_, strict=True)):
        arrays |= {f"weight{layer}": _rounded(weight), f"bias{layer}": _rounded(bias)}
    return arrays


def _constants(net: MLPClassifier) -> list[TensorProto]:
    arrays = {"white": np.array(WHITE, np.float32), **weights(net)}
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]


def _rounded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    return (np.round(values * GRAIN) / GRAIN).astype(np.float32)


def _pixels(digits: Digits) -> npt.NDArray[np.float64]:
    return digits.images.reshape(len(digits.images), -1) / WHITE


if __name__ == "__main__":
    main()
