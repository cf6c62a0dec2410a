"""The usual entry of a child: makes the backend anew and lets it load."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from penstock.backends.base import AnyInstance, Backend, Device, Model
from penstock.errors import LoadError, PenstockError
from penstock.workers.process.order import Order


def load(order: Order) -> AnyInstance:
    """The instance that ``order`` describes. Raises what the backend raises."""
    from google.protobuf.json_format import Parse

    from penstock.config.model_config_pb2 import ModelConfig
    from penstock.config.parameters import parse_parameters

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
    try:
        instance = backend.load(replace(model, shared=backend.share(model)))
        instance.warm_up()
    except PenstockError:
        raise
    except Exception as error:  # in the words of a thread of the server
        reason = f"{type(error).__name__}: {error}"
        raise LoadError(f"backend '{backend.name}' failed to load '{model.name}': {reason}") from error
    return instance
