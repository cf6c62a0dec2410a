"""Networks, each defined once, for the operators of every engine. frameworks.py writes their files.

- ``digits``: FP32 [64] through 64 to 10
- ``mlp``: FP32 [256] through 1024 and 1024 to 10
- ``convnet``: FP32 [3, 32, 32], five convolutions to 10: about 0.06 GFLOP
- ``transformer``: FP32 [32, 128], four layers with four heads and 512 in between, to 10: about 0.06 GFLOP
- ``large_convnet``: FP32 [3, 224, 224], nine convolutions to 10: about 7 GFLOP, for a GPU
- ``large_transformer``: FP32 [128, 8] through 768 and six layers of BERT base to 10: about 11 GFLOP, for a GPU

``INPUT0`` to ``OUTPUT0``. Weights are random, and the same every time and for every engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.float32]"
#: A tensor of an engine, within a network that is being built.
T = TypeVar("T")

SHAPES = {
    "digits": (64,),
    "mlp": (256,),
    "convnet": (3, 32, 32),
    "transformer": (32, 128),
    "large_convnet": (3, 224, 224),
    "large_transformer": (128, 8),
}
#: The networks that a core computes in milliseconds.
SMALL = ("digits", "mlp", "convnet", "transformer")
OPSET = 17
EPSILON = 1e-5


class Operators(ABC, Generic[T]):
    """The operators of an engine. Images are [rows, channels, height, width]."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def draw(self, *shape: int, fan_in: int) -> Array:
        """Return random weights that keep the scale of values."""
        weights: Array = (self._rng.standard_normal(shape) / np.sqrt(fan_in)).astype(np.float32)
        return weights

    def linear(self, x: T, inputs: int, outputs: int) -> T:
        return self.add(self.matmul(x, self.constant(self.draw(inputs, outputs, fan_in=inputs))), self._bias(outputs))

    def _bias(self, outputs: int) -> T:
        return self.constant(self.draw(outputs, fan_in=100))

    @abstractmethod
    def constant(self, array: Array) -> T: ...
    @abstractmethod
    def add(self, a: T, b: T) -> T: ...
    @abstractmethod
    def matmul(self, a: T, b: T) -> T: ...
    @abstractmethod
    def relu(self, x: T) -> T: ...
    @abstractmethod
    def softmax(self, x: T) -> T:
        """Along the last axis."""

    @abstractmethod
    def normalize(self, x: T, width: int) -> T:
        """Along the last axis: mean 0, variance 1."""

    @abstractmethod
    def reshape(self, x: T, *dims: int) -> T:
        """``dims`` of a row; rows stay."""

    @abstractmethod
    def transpose(self, x: T, *axes: int) -> T: ...
    @abstractmethod
    def mean(self, x: T, *axes: int) -> T: ...
    @abstractmethod
    def convolve(self, x: T, channels: int, filters: int, stride: int) -> T:
        """With a kernel of 3 by 3 and as many zeros around that stride 1 changes no size."""


def digits(ops: Operators[T], x: T) -> T:
    return ops.softmax(ops.linear(ops.relu(ops.linear(x, 64, 64)), 64, 10))


def mlp(ops: Operators[T], x: T) -> T:
    return ops.linear(ops.relu(ops.linear(ops.relu(ops.linear(x, 256, 1024)), 1024, 1024)), 1024, 10)


def convnet(ops: Operators[T], x: T) -> T:
    return _convolutions(ops, x, ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1)))


def large_convnet(ops: Operators[T], x: T) -> T:
    return _convolutions(ops, x, ((64, 2), (128, 2), *[(128, 1)] * 3, (256, 2), *[(256, 1)] * 3))


def _convolutions(ops: Operators[T], x: T, layers: Sequence[tuple[int, int]]) -> T:
    """``layers`` are filters and strides."""
    channels = 3
    for filters, stride in layers:
        x = ops.relu(ops.convolve(x, channels, filters, stride))
        channels = filters
    return ops.linear(ops.mean(x, 2, 3), channels, 10)


def transformer(ops: Operators[T], x: T) -> T:
    tokens, width = SHAPES["transformer"]
    return _layers(ops, x, tokens, width, layers=4, heads=4)


def large_transformer(ops: Operators[T], x: T) -> T:
    tokens, features = SHAPES["large_transformer"]
    return _layers(ops, ops.linear(x, features, 768), tokens, 768, layers=6, heads=12)


def _layers(ops: Operators[T], x: T, tokens: int, width: int, layers: int, heads: int) -> T:
    for _ in range(layers):
        normal = ops.normalize(x, width)
        query, key, value = (
            ops.transpose(ops.reshape(ops.linear(normal, width, width), tokens, heads, width // heads), *axes)
            for axes in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
        )
        attended = ops.matmul(ops.softmax(ops.matmul(query, key)), value)
        joined = ops.reshape(ops.transpose(attended, 0, 2, 1, 3), tokens, width)
        x = ops.add(x, ops.linear(joined, width, width))
        x = ops.add(x, ops.linear(ops.relu(ops.linear(ops.normalize(x, width), width, 4 * width)), 4 * width, width))
    return ops.linear(ops.mean(x, 1), width, 10)


NETWORKS: dict[str, Callable[[Operators[Any], Any], Any]] = {
    "digits": digits,
    "mlp": mlp,
    "convnet": convnet,
    "transformer": transformer,
    "large_convnet": large_convnet,
    "large_transformer": large_transformer,
}


class OnnxOperators(Operators[str]):
    """Tensors are their names in a graph that is being put together."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def _node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, [f"t{len(self.nodes)}"], **attributes))
        return f"t{len(self.nodes) - 1}"

    def constant(self, array: npt.NDArray[Any]) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return f"c{len(self.constants) - 1}"

    def add(self, a: str, b: str) -> str:
        return self._node("Add", a, b)

    def matmul(self, a: str, b: str) -> str:
        return self._node("MatMul", a, b)

    def relu(self, x: str) -> str:
        return self._node("Relu", x)

    def softmax(self, x: str) -> str:
        return self._node("Softmax", x, axis=-1)

    def normalize(self, x: str, width: int) -> str:
        ones, zeros = (self.constant(array) for array in (np.ones(width, np.float32), np.zeros(width, np.float32)))
        return self._node("LayerNormalization", x, ones, zeros, epsilon=EPSILON)

    def reshape(self, x: str, *dims: int) -> str:
        return self._node("Reshape", x, self.constant(np.array((-1, *dims), np.int64)))

    def transpose(self, x: str, *axes: int) -> str:
        return self._node("Transpose", x, perm=axes)

    def mean(self, x: str, *axes: int) -> str:
        return self._node("ReduceMean", x, axes=axes, keepdims=0)

    def convolve(self, x: str, channels: int, filters: int, stride: int) -> str:
        weight = self.constant(self.draw(filters, channels, 3, 3, fan_in=9 * channels))
        sizes = {"kernel_shape": [3, 3], "strides": [stride, stride], "pads": [1, 1, 1, 1]}
        return self._node("Conv", x, weight, self._bias(filters), **sizes)


class TorchOperators(Operators[Any]):
    def __init__(self, torch: Any) -> None:
        super().__init__()
        self._torch = torch

    def constant(self, array: Array) -> Any:
        return self._torch.from_numpy(array)

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def matmul(self, a: Any, b: Any) -> Any:
        return a @ b

    def relu(self, x: Any) -> Any:
        return x.relu()

    def softmax(self, x: Any) -> Any:
        return x.softmax(-1)

    def normalize(self, x: Any, width: int) -> Any:
        return self._torch.nn.functional.layer_norm(x, (width,), eps=EPSILON)

    def reshape(self, x: Any, *dims: int) -> Any:
        return x.reshape(-1, *dims)

    def transpose(self, x: Any, *axes: int) -> Any:
        return x.permute(*axes)

    def mean(self, x: Any, *axes: int) -> Any:
        return x.mean(axes)

    def convolve(self, x: Any, channels: int, filters: int, stride: int) -> Any:
        weight = self.constant(self.draw(filters, channels, 3, 3, fan_in=9 * channels))
        return self._torch.nn.functional.conv2d(x, weight, self._bias(filters), stride, 1)


class KeptTorchOperators(TorchOperators):
    """Draws weights when a network is computed for the first time, and registers them as buffers of ``module``."""

    def __init__(self, torch: Any, module: Any) -> None:
        super().__init__(torch)
        self._module, self._count, self._place = module, 0, 0

    def rewind(self) -> KeptTorchOperators:
        """Return the function that computes the network."""
        self._place = 0
        return self

    def draw(self, *shape: int, fan_in: int) -> Any:
        return super().draw(*shape, fan_in=fan_in) if self._place == self._count else None

    def constant(self, array: Any) -> Any:
        name = f"weight_{self._place}"
        self._place += 1
        if array is not None:
            self._count += 1
            self._module.register_buffer(name, super().constant(array))
        return getattr(self._module, name)


class TensorFlowOperators(Operators[Any]):
    """Images are [rows, height, width, channels] inside, the only layout for which its CPU has all convolutions."""

    def __init__(self, tensorflow: Any) -> None:
        super().__init__()
        self._tf = tensorflow

    def constant(self, array: Array) -> Any:
        return self._tf.constant(array)

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def matmul(self, a: Any, b: Any) -> Any:
        return self._tf.linalg.matmul(a, b)

    def relu(self, x: Any) -> Any:
        return self._tf.nn.relu(x)

    def softmax(self, x: Any) -> Any:
        return self._tf.nn.softmax(x)

    def normalize(self, x: Any, width: int) -> Any:
        mean, variance = self._tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * self._tf.math.rsqrt(variance + EPSILON)

    def reshape(self, x: Any, *dims: int) -> Any:
        return self._tf.reshape(x, (-1, *dims))

    def transpose(self, x: Any, *axes: int) -> Any:
        return self._tf.transpose(x, axes)

    def mean(self, x: Any, *axes: int) -> Any:
        return self._tf.reduce_mean(x, [1, 2] if axes == (2, 3) else axes)

    def convolve(self, x: Any, channels: int, filters: int, stride: int) -> Any:
        image = self._tf.transpose(x, (0, 2, 3, 1)) if channels == 3 else x
        weight = self.draw(filters, channels, 3, 3, fan_in=9 * channels).transpose(2, 3, 1, 0)
        padded = self._tf.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)))  # on all sides, like the other engines
        return self._tf.nn.conv2d(padded, weight, stride, "VALID") + self._bias(filters)


def onnx_bytes(name: str) -> bytes:
    from onnx import TensorProto, helper

    ops = OnnxOperators()
    ops.nodes.append(helper.make_node("Identity", [NETWORKS[name](ops, "INPUT0")], ["OUTPUT0"]))
    argument, result = (
        helper.make_tensor_value_info(tensor, TensorProto.FLOAT, ["rows", *shape])
        for tensor, shape in (("INPUT0", SHAPES[name]), ("OUTPUT0", (10,)))
    )
    graph = helper.make_graph(ops.nodes, name, [argument], [result], ops.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 8
    content: bytes = model.SerializeToString()
    return content
