"""SavedModels and frozen graphs made on the spot by TensorFlow, and the backend driven as core drives it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from headrace import Device, Model, ModelConfig
from headrace_testing.serving import serve
from headrace_tf import Parameters, TensorFlow

tf = pytest.importorskip("tensorflow")


class SavedModels:
    """Writes ``<root>/<name>/1/model.savedmodel`` or ``model.graphdef``; gives the version's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(
        self, function: Callable[..., Any], *inputs: Any, name: str = "m", module: Any = None, **signatures: Any
    ) -> Path:
        """``inputs`` are ``tf.TensorSpec`` with names, ``function`` gives a dictionary of outputs. Further
        ``signatures`` take the same inputs."""
        version = self.root / name / "1"
        module = module or tf.Module()
        module.function = tf.function(function, input_signature=inputs)
        found: Any = module.function
        if signatures:
            others = {key: tf.function(each, input_signature=inputs) for key, each in signatures.items()}
            module.others = list(others.values())
            found = {"serving_default": module.function, **others}
        tf.saved_model.save(module, str(version / "model.savedmodel"), signatures=found)
        return version

    def add(self, name: str = "m") -> Path:
        """``S = A + B`` and ``D = A - B`` for f32[rows, 16]."""
        spec = [tf.TensorSpec([None, 16], tf.float32, name=each) for each in "AB"]
        return self.save(lambda A, B: {"S": A + B, "D": A - B}, *spec, name=name)  # noqa: N803

    def frozen(self, build: Callable[[], Any], name: str = "m") -> Path:
        """Return the graph of TensorFlow 1 that ``build`` makes."""
        version = self.root / name / "1"
        version.mkdir(parents=True)
        with tf.Graph().as_default() as graph:
            build()
        (version / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
        return version

    def config(self, text: str, name: str = "m") -> None:
        (self.root / name / "config.pbtxt").write_text(text)

    def edit(self, change: Callable[[Any], Any], name: str = "m") -> None:
        """``change`` the graph of a SavedModel, a ``MetaGraphDef``."""
        from tensorflow.core.protobuf import saved_model_pb2

        file = self.root / name / "1/model.savedmodel/saved_model.pb"
        saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
        change(saved.meta_graphs[0])
        file.write_bytes(saved.SerializeToString())

    @staticmethod
    def parameters(**values: str) -> str:
        return "".join(
            f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }} "
            for key, value in values.items()
        )

    def reason(self, name: str = "m", **options: Any) -> str:
        """Why a server does not load ``name``; empty if it does."""
        with serve(self.root, exit_on_error=False, **options) as server:
            return next(entry.reason for entry in server.index() if entry.name == name)

    def model(self, path: Path, config: str = "", parameters: Parameters | None = None, **fields: Any) -> Model:
        """Return the `Model` that core would create for the version at ``path``, with a complete config."""
        parsed = text_format.Parse(config, ModelConfig(name=path.parent.name))
        model = Model(path.parent.name, 1, path, parsed, parameters or Parameters(), **fields)
        TensorFlow({}).complete_config(model)
        return model

    @contextmanager
    def loaded(self, model: Model, count: int = 1, **options: str) -> Iterator[list[Any]]:
        """``count`` instances of ``model`` on the CPU; ``options`` are the backend's, with _ for -."""
        backend = TensorFlow({key.replace("_", "-"): value for key, value in options.items()})
        shared = backend.share(model)
        named = [
            replace(model, shared=shared, device=Device("cpu"), instance_name=f"m_0_{number}")
            for number in range(count)
        ]
        instances = []
        try:
            instances += [backend.load(each) for each in named]
            yield instances
        finally:
            for instance in instances:
                instance.close()


@pytest.fixture
def models(tmp_path: Path) -> SavedModels:
    return SavedModels(tmp_path / "repository")
