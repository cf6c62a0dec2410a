#!/usr/bin/env python3
"""Train a recurrent net that reads digits row by row, and write it twice: for one row, and unrolled over all eight.

Needs scikit-learn, for its digits, and onnx. The training is NumPy's: Elman's net, gradients through time, Adam.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from digits import Digits, held_out_digits, training_digits
from onnx import TensorProto, helper, numpy_helper

Array: TypeAlias = "npt.NDArray[np.float32]"
Weights: TypeAlias = "dict[str, Array]"

MODELS = Path(__file__).parent / "rows/models"
WHITE = 16.0  #: the highest value of a pixel
ROWS, COLUMNS, MEMORY, NUMBERS = 8, 8, 32, 10
EPOCHS, BATCH, RATE = 30, 32, 0.005


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=MODELS, help="where to write (default: %(default)s)")
    models: Path = parser.parse_args(arguments).models
    weights = train(training_digits())
    for name, model in (("reader", reader(weights)), ("unrolled", unrolled(weights))):
        (models / name / "1").mkdir(parents=True, exist_ok=True)
        (models / name / "1/model.onnx").write_bytes(model.SerializeToString(deterministic=True))
    digits = held_out_digits()
    right = (probabilities(weights, digits.images)[-1].argmax(1) == digits.numbers).mean()
    print(f"{models}: {right:.1%} of the held-out digits right after the last row")


def train(digits: Digits) -> Weights:
    """Return weights that were trained with ``digits``; always the same, except for the last bits on other machines."""
    rng = np.random.default_rng(0)
    shapes = {"see": (COLUMNS, MEMORY), "remember": (MEMORY, MEMORY), "say": (MEMORY, NUMBERS)}
    weights = {name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {"bias": np.zeros(MEMORY, np.float32), "bias_said": np.zeros(NUMBERS, np.float32)}
    means, squares = ({name: np.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    for step, batch in enumerate(_batches(len(digits.numbers), rng), 1):
        for name, gradient in gradients(weights, digits.images[batch], digits.numbers[batch]).items():
            means[name] += 0.1 * (gradient - means[name])
            squares[name] += 0.001 * (gradient**2 - squares[name])
            mean, square = means[name] / (1 - 0.9**step), squares[name] / (1 - 0.999**step)
            weights[name] -= (RATE * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
    return weights


def _batches(count: int, rng: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
    for _ in range(EPOCHS):
        order = rng.permutation(count)
        yield from (order[begin : begin + BATCH] for begin in range(0, count, BATCH))


def memories(weights: Weights, images: npt.NDArray[np.uint8]) -> list[Array]:
    """Return the state of the net before the first row, and after each: ``f32[digits, 32]``."""
    seen = [np.zeros((len(images), MEMORY), np.float32)]
    for row in range(ROWS):
        pixels = images[:, row].astype(np.float32) / np.float32(WHITE)
        seen.append(np.tanh(pixels @ weights["see"] + weights["bias"] + seen[-1] @ weights["remember"]))
    return seen


def probabilities(weights: Weights, images: npt.NDArray[np.uint8]) -> list[Array]:
    """Return the probabilities after each row: ``f32[digits, 10]``."""
    scores = [memory @ weights["say"] + weights["bias_said"] for memory in memories(weights, images)[1:]]
    raised = [np.exp(each - each.max(1, keepdims=True)) for each in scores]
    return [each / each.sum(1, keepdims=True) for each in raised]


def gradients(weights: Weights, images: npt.NDArray[np.uint8], numbers: npt.NDArray[np.int64]) -> Mapping[str, Array]:
    """Return the gradients of the cross entropy of the probabilities after each row. Later rows have more weight."""
    seen, scores = memories(weights, images), probabilities(weights, images)
    found = {name: np.zeros_like(weight) for name, weight in weights.items()}
    later = np.zeros_like(seen[0])
    for row in reversed(range(ROWS)):
        wrong = scores[row].copy()
        wrong[np.arange(len(numbers)), numbers] -= 1
        wrong *= np.float32((row + 1) / ROWS / len(numbers))
        found["say"] += seen[row + 1].T @ wrong
        found["bias_said"] += wrong.sum(0)
        through = (wrong @ weights["say"].T + later) * (1 - seen[row + 1] ** 2)
        pixels = images[:, row].astype(np.float32) / np.float32(WHITE)
        found["see"] += pixels.T @ through
        found["remember"] += seen[row].T @ through
        found["bias"] += through.sum(0)
        later = through @ weights["remember"].T
    return found


def reader(weights: Weights) -> onnx.ModelProto:
    """``row`` u8[n, 8] and ``memory`` f32[n, 32] -> ``probabilities`` f32[n, 10] and ``next_memory`` f32[n, 32]."""
    row = helper.make_tensor_value_info("row", TensorProto.UINT8, ["n", COLUMNS])
    memory, following = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", MEMORY]) for name in ("memory", "next_memory")
    )
    probabilities = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["n", NUMBERS])
    return _model(
        _step("", "row", "memory", "next_memory", "probabilities"), [row, memory], [probabilities, following], weights
    )


def unrolled(weights: Weights) -> onnx.ModelProto:
    """``image`` u8[n, 8, 8] -> ``probabilities`` f32[n, 8, 10]: eight steps of the net."""
    nodes = [helper.make_node("Split", ["image"], [f"slice{row}" for row in range(ROWS)], axis=1, num_outputs=ROWS)]
    nodes.append(helper.make_node("Gather", ["image", "columns"], ["corner"], axis=1))
    nodes.append(helper.make_node("Cast", ["corner"], ["pixels"], to=TensorProto.FLOAT))
    nodes.append(helper.make_node("MatMul", ["pixels", "nothing"], ["memory0"]))
    for row in range(ROWS):
        nodes.append(helper.make_node("Squeeze", [f"slice{row}", "axis"], [f"row{row}"]))
        nodes += _step(str(row), f"row{row}", f"memory{row}", f"memory{row + 1}", f"probabilities{row}")
        nodes.append(helper.make_node("Unsqueeze", [f"probabilities{row}", "axis"], [f"spread{row}"]))
    nodes.append(helper.make_node("Concat", [f"spread{row}" for row in range(ROWS)], ["probabilities"], axis=1))
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", ROWS, COLUMNS])
    probabilities = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["n", ROWS, NUMBERS])
    constants: dict[str, npt.NDArray[Any]] = {
        "axis": np.array([1], np.int64),
        "columns": np.array(0, np.int64),
        "nothing": np.zeros((COLUMNS, MEMORY), np.float32),
    }
    return _model(nodes, [image], [probabilities], {**weights, **constants})


def _step(mark: str, row: str, memory: str, following: str, probabilities: str) -> list[onnx.NodeProto]:
    """Return the nodes for one row."""
    return [
        helper.make_node("Cast", [row], [f"levels{mark}"], to=TensorProto.FLOAT),
        helper.make_node("Div", [f"levels{mark}", "white"], [f"scaled{mark}"]),
        helper.make_node("Gemm", [f"scaled{mark}", "see", "bias"], [f"seen{mark}"]),
        helper.make_node("Gemm", [memory, "remember"], [f"remembered{mark}"]),
        helper.make_node("Add", [f"seen{mark}", f"remembered{mark}"], [f"both{mark}"]),
        helper.make_node("Tanh", [f"both{mark}"], [following]),
        helper.make_node("Gemm", [following, "say", "bias_said"], [f"scores{mark}"]),
        helper.make_node("Softmax", [f"scores{mark}"], [probabilities], axis=1),
    ]


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, npt.NDArray[Any]],
) -> onnx.ModelProto:
    tensors = {**constants, "white": np.array(WHITE, np.float32)}
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()]
    graph = helper.make_graph(list(nodes), "rows", list(inputs), list(outputs), initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


if __name__ == "__main__":
    main()
