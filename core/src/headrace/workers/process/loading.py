"""The usual entry of a child: makes the backend anew and lets it load."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from headrace.backends.base import AnyInstance, Backend, Device, Model
from headrace.workers.loading import failures_worded, load_instance, share
from headrace.workers.process.order import Order


def load(order: Order) -> AnyInstance:
    """The instance that ``order`` describes. Raises what the backend raises."""
    from google.protobuf.json_format import Parse

    from headrace.config.model_config_pb2 import ModelConfig
    from headrace.config.parameters import parse_parameters

    module, _, name = order.backend.partition(":")
    backend: Backend = getattr(import_module(module), name)(order.options)
    config = Parse(order.config, ModelConfig())
    model = Model(
        order.name,
        order.version,
        Path(order.path),
        config,
        parse_parameters(backend.Parameters, config.parameters),
        None,
        order.instance_name,
        Device(order.device_kind, order.device_id),
        order.services,
    )
    shared = share(backend, model, order.cleanup)
    with failures_worded(backend, model.name):
        return load_instance(backend, replace(model, shared=shared))
