"""SavedModels and frozen graphs made on the spot by TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf


class SavedModels:
    """Writes ``<root>/<name>/1/model.savedmodel`` or ``model.graphdef``; gives the version's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, function: Callable[..., Any], *inputs: Any, name: str = "m", module: Any = None) -> Path:
        """``inputs`` are ``tf.TensorSpec`` with names, ``function`` gives a dictionary of outputs."""
        version = self.root / name / "1"
        module = module or tf.Module()
        module.function = tf.function(function, input_signature=inputs)
        tf.saved_model.save(module, str(version / "model.savedmodel"), signatures=module.function)
        return version

    def add(self, name: str = "m") -> Path:
        """``S = A + B`` and ``D = A - B`` for f32[rows, 16]."""
        spec = [tf.TensorSpec([None, 16], tf.float32, name=each) for each in "AB"]
        return self.save(lambda A, B: {"S": A + B, "D": A - B}, *spec, name=name)  # noqa: N803

    def frozen(self, build: Callable[[], Any], name: str = "m") -> Path:
        """What ``build`` adds to a graph of TensorFlow 1."""
        version = self.root / name / "1"
        version.mkdir(parents=True)
        with tf.Graph().as_default() as graph:
            build()
        (version / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
        return version

    def config(self, text: str, name: str = "m") -> None:
        (self.root / name / "config.pbtxt").write_text(text)

    @staticmethod
    def trust() -> str:
        return f"parameters {{ key: {json.dumps('trust')} value {{ string_value: {json.dumps('true')} }} }}"


@pytest.fixture
def models(tmp_path: Path) -> SavedModels:
    return SavedModels(tmp_path / "repository")
