"""A program of PaddlePaddle, written by hand in the format of its ``framework.proto``: its package is not needed."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_testing.serving import serve

WEIGHTS = np.array([10, 20, 30], np.float32)
CONFIG = 'backend: "openvino" default_model_filename: "model.pdmodel"'
#: Of ``VarType.Type``.
FP32, LOD_TENSOR, FEED_MINIBATCH, FETCH_LIST = 5, 7, 9, 10


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    low = bytearray()
    while number > 127:
        low.append(number & 127 | 128)
        number >>= 7
    return bytes([*low, number])


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Fields by number, integers as varints and the rest with its length."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [varint(number << 3), varint(value)]
        else:
            raw = value.encode() if isinstance(value, str) else value
            parts += [varint(number << 3 | 2), varint(len(raw)), raw]
    return b"".join(parts)


def tensor_desc(*dims: int) -> bytes:
    return message((1, FP32), *((2, dim) for dim in dims))


def variable(name: str, kind: int, *dims: int, persistable: bool = False) -> bytes:
    described = [(3, message((1, tensor_desc(*dims))))] if kind == LOD_TENSOR else []
    return message((1, name), (2, message((1, kind), *described)), (3, int(persistable)))


def operator(kind: str, inputs: dict[str, str], outputs: dict[str, str], **numbers: int) -> bytes:
    return message(
        *((1, message((1, parameter), (2, name))) for parameter, name in inputs.items()),
        *((2, message((1, parameter), (2, name))) for parameter, name in outputs.items()),
        (3, kind),
        *((4, message((1, name), (2, 0), (3, number))) for name, number in numbers.items()),
    )


def program(weights: str = "w") -> bytes:
    """``y = x + w`` for f32[rows, 3]."""
    variables = [
        variable("feed", FEED_MINIBATCH, persistable=True),
        variable("fetch", FETCH_LIST, persistable=True),
        variable("x", LOD_TENSOR, -1, 3),
        variable(weights, LOD_TENSOR, 3, persistable=True),
        variable("y", LOD_TENSOR, -1, 3),
    ]
    operators = [
        operator("feed", {"X": "feed"}, {"Out": "x"}, col=0),
        operator("elementwise_add", {"X": "x", "Y": weights}, {"Out": "y"}, axis=-1),
        operator("fetch", {"X": "y"}, {"Out": "fetch"}, col=0),
    ]
    block = message((1, 0), (2, -1), *((3, each) for each in variables), *((4, each) for each in operators))
    return message((1, block), (4, message((1, 2006000))))


def parameters() -> bytes:
    """The one persistable tensor, as ``model.pdiparams`` has it."""
    described = tensor_desc(3)
    return struct.pack("<IQIi", 0, 0, 0, len(described)) + described + WEIGHTS.tobytes()


def write(models: Any) -> Path:
    version: Path = models.root / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.pdmodel").write_bytes(program())
    (version / "model.pdiparams").write_bytes(parameters())
    models.config(CONFIG)
    return version


def reason(models: Any) -> str:
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    return entry.reason


def test_a_program_is_served(models: Any) -> None:
    write(models)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with serve(models.root) as server:
        config = server.resolve("m").config
        y = server.infer("m", {"x": x}).outputs["y"]
    np.testing.assert_array_equal(y, x + WEIGHTS)
    assert (config.max_batch_size, list(config.input[0].dims)) == (4, [3])


@pytest.mark.parametrize("damage", ["no parameters", "short parameters", "no program", "short program"])
def test_a_damaged_program_is_refused_by_name(models: Any, damage: str) -> None:
    version = write(models)
    program_file, parameters_file = version / "model.pdmodel", version / "model.pdiparams"
    if damage == "no parameters":
        parameters_file.unlink()
    elif damage == "short parameters":
        parameters_file.write_bytes(parameters()[:-4])
    elif damage == "no program":
        program_file.write_bytes(b"no program")
    else:
        program_file.write_bytes(program()[:-20])
    assert "m/1/model.pdmodel" in reason(models)


@pytest.mark.parametrize("disguised", [False, True])
def test_a_folder_with_other_files_of_variables_is_refused(models: Any, tmp_path: Path, disguised: bool) -> None:
    """Without ``.pdmodel`` PaddlePaddle keeps each variable in a file of its name."""
    folder = models.root / "m" / "1" / "model.pdfolder"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(parameters())
    (folder / "__model__").write_bytes(program("../../../../secret"))
    if disguised:
        (folder / "saved_model.pb").touch()
    models.config(CONFIG.replace("model.pdmodel", "model.pdfolder"))
    assert "is a folder, but not a SavedModel" in reason(models)
