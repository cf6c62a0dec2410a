"""Graphs that compute in float16, in part or altogether, against the same computed in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(17)
WEIGHTS = [RNG.normal(size=shape) / np.sqrt(shape[0]) for shape in ((32, 64), (64, 8))]
#: Half an ulp of a float16 is 2**-11 of it; a few roundings of sums of this size stay below this.
TOLERANCE = 0.01


def exact(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``tanh(x @ W0) @ W1`` in float64."""
    answer: np.ndarray[Any, Any] = np.tanh(x.astype(np.float64) @ WEIGHTS[0]) @ WEIGHTS[1]
    return answer


def write(graphs: Any, kind: str) -> Any:
    """``half`` is float16 throughout, ``mixed`` has float32 at its ends and in the middle."""
    node = helper.make_node
    io = TensorProto.FLOAT16 if kind == "half" else TensorProto.FLOAT
    weights = [
        numpy_helper.from_array(each.astype(np.float16), name) for each, name in zip(WEIGHTS, ("W0", "W1"), strict=True)
    ]
    if kind == "half":
        nodes = [node("MatMul", ["x", "W0"], ["a"]), node("Tanh", ["a"], ["b"]), node("MatMul", ["b", "W1"], ["y"])]
    else:
        nodes = [
            node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16),
            node("MatMul", ["x16", "W0"], ["a16"]),
            node("Cast", ["a16"], ["a"], to=TensorProto.FLOAT),
            node("Tanh", ["a"], ["b"]),
            node("Cast", ["b"], ["b16"], to=TensorProto.FLOAT16),
            node("MatMul", ["b16", "W1"], ["y16"]),
            node("Cast", ["y16"], ["y"], to=TensorProto.FLOAT),
        ]
    return graphs.write(nodes, {"x": (io, ["n", 32])}, {"y": (io, ["n", 8])}, weights)


@pytest.mark.parametrize("kind", ["half", "mixed"])
@pytest.mark.parametrize("rows", [1, 4])
def test_answers_are_those_of_float64_within_float16(graphs: Any, kind: str, rows: int) -> None:
    dtype = np.float16 if kind == "half" else np.float32
    x = RNG.normal(size=(rows, 32)).astype(dtype)
    y = graphs.serve(write(graphs, kind)).execute({"x": x})["y"]
    assert y.dtype == dtype
    np.testing.assert_allclose(y, exact(x), atol=TOLERANCE)
    assert np.abs(y - exact(x)).max() > 1e-6  # or it was not float16 that computed


def test_overflow_of_float16_is_infinite(graphs: Any) -> None:
    io = (TensorProto.FLOAT16, ["n", 2])
    path = graphs.write([helper.make_node("Add", ["x", "x"], ["y"])], {"x": io}, {"y": io})
    y = graphs.serve(path).execute({"x": np.array([[60000, 1]], np.float16)})["y"]
    np.testing.assert_array_equal(y, np.array([[np.inf, 2]], np.float16))
