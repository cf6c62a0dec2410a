"""One model with its inputs and expected answers, and the comparison of answers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import text_format

from headrace import BytesTensor, ModelConfig, ModelInput, ModelOutput, Tensor, as_tensor, data_type, dtypes

#: The name of the model in the kit.
NAME = "conformance"
_FLOATS = (dtypes.FP16, dtypes.BF16, dtypes.FP32, dtypes.FP64)


@dataclass(frozen=True)
class Example:
    """A model's files, and one batch of rows with the right answers.

    - ``path``: the files of a version's directory.
    - ``inputs`` and ``outputs``: rows on the first axis, unless ``batched`` is false. An array of rank 1 is one value
      per row, which clients send and get as ``[rows, 1]``.
    - ``parameters``: for the config. ``config``: more config text; fields that it sets are not derived from the arrays.
    - ``damage``: a file in ``path`` without which the model cannot load.
    - ``tolerance``: relative, and absolute near zero, for floating-point outputs.
    """

    path: Path
    inputs: Mapping[str, npt.ArrayLike | BytesTensor]
    outputs: Mapping[str, npt.ArrayLike | BytesTensor]
    parameters: Mapping[str, str] = field(default_factory=dict)
    damage: str = ""
    config: str = ""
    tolerance: float = 1e-5
    batched: bool = True

    @property
    def given(self) -> dict[str, Tensor]:
        """The inputs as a client sends them."""
        return {name: self._for_client(value) for name, value in self.inputs.items()}

    @property
    def expected(self) -> dict[str, Tensor]:
        """The outputs as a client gets them."""
        return {name: self._for_client(value) for name, value in self.outputs.items()}

    @property
    def rows(self) -> int:
        return int(next(iter(self.given.values())).shape[0])

    def describe(self, backend: str, max_batch: int, extra: str = "") -> ModelConfig:
        """Return the config: ``config`` and ``extra``, completed from the arrays."""
        config = text_format.Parse(f"{self.config}\n{extra}", ModelConfig())
        config.name, config.backend = NAME, backend
        if self.batched:
            config.max_batch_size = config.max_batch_size or max_batch
        if not config.input:
            for name, value in self.inputs.items():
                self._declare(config.input.add(), name, value)
        if not config.output:
            for name, value in self.outputs.items():
                self._declare(config.output.add(), name, value)
        for key, parameter in self.parameters.items():
            config.parameters[key].string_value = parameter
        return config

    def _for_client(self, value: npt.ArrayLike | BytesTensor) -> Tensor:
        tensor = as_tensor(value)
        return tensor.reshape((*tensor.shape, 1)) if self.batched and tensor.ndim == 1 else tensor

    def _declare(self, io: ModelInput | ModelOutput, name: str, value: npt.ArrayLike | BytesTensor) -> None:
        tensor = self._for_client(value)
        io.name = name
        io.data_type = data_type(tensor).config_value  # type: ignore[assignment]
        io.dims.extend(tensor.shape[1 if self.batched else 0 :])
        if self.batched and as_tensor(value).ndim == 1:
            io.reshape.SetInParent()  # the backend has no axis except that of the rows


def extreme_values(kind: str) -> npt.NDArray[Any]:
    """Return three rows of two values of one data type: its minimum, its maximum, and values that a conversion would
    lose.

    For ``SCALAR``, three single values, as FP32.
    """
    if kind == "SCALAR":
        return np.array([1.5, -2.5, 0], np.float32)
    if kind == "BYTES":
        return np.array([["", "naïve"], ["a\0b", "🚰"], ["x" * 300, "y"]], dtype=object)
    dtype = dtypes.BY_NAME[kind]
    if dtype in _FLOATS:
        return np.array([[1.5, -2.5], [0, 6e4], [-6e-5, 1]]).astype(dtype.numpy)
    if dtype is dtypes.BOOL:
        return np.array([[True, False], [False, True], [True, True]])
    limits = np.iinfo(dtype.name.lower())
    return np.array([[limits.min, limits.max], [0, 1], [2, 3]], dtype.numpy)


def write_model(
    repository: Path, config: ModelConfig | str, files: Path | None = None, name: str = "", version: int = 1
) -> Path:
    """Write a model to ``repository``. Return its directory. ``files`` is copied as the version."""
    text = config if isinstance(config, str) else text_format.MessageToString(config)
    directory = repository / (name or text_format.Parse(text, ModelConfig()).name)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(text)
    if files is None:
        (directory / str(version)).mkdir(exist_ok=True)
    else:
        shutil.copytree(files, directory / str(version), dirs_exist_ok=True)
    return directory


def take_rows(tensors: Mapping[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """Return rows ``begin:end`` of every tensor, as copies."""
    return {name: copy_of(_slice(tensor, begin, end)) for name, tensor in tensors.items()}


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor."""
    if isinstance(tensor, BytesTensor):
        return BytesTensor(bytes(tensor.buffer), tensor.shape)
    copied: Tensor = np.array(tensor)
    return copied


def bytes_of(tensor: Tensor) -> bytes:
    """Return a copy of the elements as bytes in row-major order."""
    return bytes(tensor.buffer) if isinstance(tensor, BytesTensor) else tensor.tobytes()


def _slice(tensor: Tensor, begin: int, end: int) -> Tensor:
    return tensor.rows(begin, end) if isinstance(tensor, BytesTensor) else tensor[begin:end]


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str) -> None:
    """Fail unless ``found`` has exactly the outputs ``expected``, with their data types, shapes and values.

    ``what`` begins the message.
    """
    assert sorted(found) == sorted(expected), f"{what}: outputs {sorted(found)} instead of {sorted(expected)}"
    for name, tensor in expected.items():
        _assert_same(found[name], tensor, tolerance, f"{what}: output '{name}'")


def _assert_same(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    types = data_type(found), data_type(expected)
    assert types[0] is types[1], f"{what} is {types[0]} instead of {types[1]}"
    shapes = list(found.shape), list(expected.shape)
    assert shapes[0] == shapes[1], f"{what} has shape {shapes[0]} instead of {shapes[1]}"
    if isinstance(found, BytesTensor) or isinstance(expected, BytesTensor):
        assert _items(found) == _items(expected), f"{what} has other strings than expected"
    elif types[0] in _FLOATS:
        wide = np.asarray(found).astype(np.float64), np.asarray(expected).astype(np.float64)
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance, err_msg=what)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=what)


def _items(tensor: Tensor) -> list[bytes]:
    assert isinstance(tensor, BytesTensor)
    return tensor.items()
