"""Penstock: an inference server that pip installs and that takes over where Triton stands.

Serve a repository from Python, without a port::

    import penstock

    with penstock.Server("models") as server:
        answer = server.infer("digits", {"image": pixels})
        answer.outputs["scores"]

Write a backend: subclass `Backend` and `Instance`, return the backend from a function marked
`hookimpl`, and name the module in an entry point of the group ``penstock``. What is exported here
is the whole vocabulary; everything else may change between minor versions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.backends.base import (
        Backend,
        Call,
        DeferredInstance,
        Device,
        Instance,
        Isolation,
        Model,
        RequestInstance,
        StreamInstance,
        Tensors,
    )
    from penstock.backends.services import Services
    from penstock.config.model_config_pb2 import ModelConfig
    from penstock.config.options import ServerOptions
    from penstock.errors import (
        AlreadyExists,
        BackendError,
        Cancelled,
        Code,
        ConfigError,
        InternalError,
        InvalidArgument,
        LoadError,
        NotFound,
        PenstockError,
        Unavailable,
        Unsupported,
    )
    from penstock.frontends.base import Frontend
    from penstock.hookspecs import hookimpl
    from penstock.messages import dtypes
    from penstock.messages.request import InferRequest
    from penstock.messages.response import InferResponse
    from penstock.messages.tensor import BytesTensor, Tensor
    from penstock.models.served import ServedModel
    from penstock.schedulers.base import Scheduler, SchedulerContext
    from penstock.server import Server
    from penstock.telemetry.observer import Observer
    from penstock.telemetry.statistics import BatchTimes
    from penstock.workers.bell import Bell, LoopBell

#: Where each name lives. Imported on first use: who writes a backend need not import a server, and
#: a process host has no more than NumPy.
_HOMES = {
    "penstock.backends.base": (
        "Backend",
        "Call",
        "DeferredInstance",
        "Device",
        "Instance",
        "Isolation",
        "Model",
        "RequestInstance",
        "StreamInstance",
        "Tensors",
    ),
    "penstock.backends.services": ("Services",),
    "penstock.config.model_config_pb2": ("ModelConfig",),
    "penstock.config.options": ("ServerOptions",),
    "penstock.errors": (
        "AlreadyExists",
        "BackendError",
        "Cancelled",
        "Code",
        "ConfigError",
        "InternalError",
        "InvalidArgument",
        "LoadError",
        "NotFound",
        "PenstockError",
        "Unavailable",
        "Unsupported",
    ),
    "penstock.frontends.base": ("Frontend",),
    "penstock.hookspecs": ("hookimpl",),
    "penstock.messages.request": ("InferRequest",),
    "penstock.messages.response": ("InferResponse",),
    "penstock.messages.tensor": ("BytesTensor", "Tensor"),
    "penstock.models.served": ("ServedModel",),
    "penstock.schedulers.base": ("Scheduler", "SchedulerContext"),
    "penstock.server": ("Server",),
    "penstock.telemetry.observer": ("Observer",),
    "penstock.telemetry.statistics": ("BatchTimes",),
    "penstock.workers.bell": ("Bell", "LoopBell"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AlreadyExists",
    "Backend",
    "BackendError",
    "BatchTimes",
    "Bell",
    "BytesTensor",
    "Call",
    "Cancelled",
    "Code",
    "ConfigError",
    "DeferredInstance",
    "Device",
    "Frontend",
    "InferRequest",
    "InferResponse",
    "Instance",
    "InternalError",
    "InvalidArgument",
    "Isolation",
    "LoadError",
    "LoopBell",
    "Model",
    "ModelConfig",
    "NotFound",
    "Observer",
    "PenstockError",
    "RequestInstance",
    "Scheduler",
    "SchedulerContext",
    "ServedModel",
    "Server",
    "ServerOptions",
    "Services",
    "StreamInstance",
    "Tensor",
    "Tensors",
    "Unavailable",
    "Unsupported",
    "dtypes",
    "hookimpl",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    if name == "dtypes":
        return import_module("penstock.messages.dtypes")
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
