"""From ``config.pbtxt`` to a complete and valid config."""

from __future__ import annotations

from google.protobuf import text_format

from penstock.backends.base import Backend, Model
from penstock.config.model_config_pb2 import ModelConfig
from penstock.config.options import ServerOptions
from penstock.models.repository import Entry


def read(entry: Entry, options: ServerOptions) -> ModelConfig:
    path = entry.path / "config.pbtxt"
    config = ModelConfig()
    if path.exists():
        text_format.Parse(path.read_text(), config)
    config.name = config.name or entry.name
    if not config.backend:
        config.backend = "onnxruntime"
    return config


def complete(model: Model, backend: Backend, options: ServerOptions) -> None:
    backend.complete_config(model)
