"""OpenVINO models made on the spot by OpenVINO."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import openvino
import pytest
from openvino import opset13


class OpenVinoModels:
    """Writes ``<root>/<name>/1/model.xml`` and ``model.bin``; gives the version's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(
        self, function: Callable[..., dict[str, Any]], inputs: Mapping[str, tuple[Any, Sequence[int]]], name: str = "m"
    ) -> Path:
        """``inputs`` maps names to element types and shapes, ``function`` gives a dictionary of outputs."""
        version = self.root / name / "1"
        version.mkdir(parents=True)
        parameters = []
        for each, (element, shape) in inputs.items():
            parameters.append(opset13.parameter(list(shape), element))
            parameters[-1].output(0).set_names({each})
        outputs = function(*parameters)
        for each, node in outputs.items():
            node.output(0).set_names({each})
        network = openvino.Model(list(outputs.values()), parameters, "network")
        openvino.save_model(network, str(version / "model.xml"), compress_to_fp16=False)
        return version

    def add(self, name: str = "m", rows: int = -1) -> Path:
        """``S = A + B`` and ``D = A - B`` for f32[rows, 16]."""
        io = (openvino.Type.f32, [rows, 16])
        return self.save(lambda a, b: {"S": opset13.add(a, b), "D": opset13.subtract(a, b)}, {"A": io, "B": io}, name)

    def config(self, text: str, name: str = "m") -> None:
        (self.root / name / "config.pbtxt").write_text(text)

    def parameter(self, key: str, value: str, config: str = "", name: str = "m") -> None:
        """Write a config with one parameter and the fields in ``config``."""
        text = f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}"
        self.config(f"{config}\n{text}", name)


@pytest.fixture
def models(tmp_path: Path) -> OpenVinoModels:
    return OpenVinoModels(tmp_path / "repository")
