"""Headrace: an inference server that pip installs and that takes over where Triton stands.

Serve a repository from Python, without a port::

    import headrace

    with headrace.Server("models") as server:
        answer = server.infer("digits", {"image": pixels})
        answer.outputs["scores"]

Write a backend: subclass `Backend` and `Instance`, return the backend from a function marked
`hookimpl`, and name the module in an entry point of the group ``headrace``. What is exported here
is the whole vocabulary; everything else may change between minor versions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.backends.base import (
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
    from headrace.backends.services import Services
    from headrace.config.model_config_pb2 import ModelConfig
    from headrace.config.options import ServerOptions
    from headrace.engine import Caller, Engine, Entrance, Interceptor, ModelView
    from headrace.errors import (
        AlreadyExists,
        BackendError,
        Cancelled,
        Code,
        ConfigError,
        HeadraceError,
        InternalError,
        InvalidArgument,
        LoadError,
        NotFound,
        Unavailable,
        Unsupported,
    )
    from headrace.frontends.base import Frontend
    from headrace.hookspecs import hookimpl
    from headrace.messages import dtypes
    from headrace.messages.request import Batch, InferRequest, Padding
    from headrace.messages.response import Answer, InferResponse
    from headrace.messages.spec import Spec
    from headrace.messages.tensor import BytesTensor, Tensor
    from headrace.models.served import ServedModel
    from headrace.schedulers.base import Clock, InstanceInfo, Scheduler, SchedulerContext, Timer, Wait, Waiting
    from headrace.server import Server
    from headrace.telemetry.observer import Observer
    from headrace.telemetry.statistics import BatchTimes

#: Where each name lives. Imported on first use: who writes a backend need not import a server, and
#: a process host has no more than NumPy.
_HOMES = {
    "headrace.backends.base": (
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
    "headrace.backends.services": ("Services",),
    "headrace.config.model_config_pb2": ("ModelConfig",),
    "headrace.config.options": ("ServerOptions",),
    "headrace.engine": ("Caller", "Engine", "Entrance", "Interceptor", "ModelView"),
    "headrace.errors": (
        "AlreadyExists",
        "BackendError",
        "Cancelled",
        "Code",
        "ConfigError",
        "InternalError",
        "InvalidArgument",
        "LoadError",
        "NotFound",
        "HeadraceError",
        "Unavailable",
        "Unsupported",
    ),
    "headrace.frontends.base": ("Frontend",),
    "headrace.hookspecs": ("hookimpl",),
    "headrace.messages.request": ("Batch", "InferRequest", "Padding"),
    "headrace.messages.response": ("Answer", "InferResponse"),
    "headrace.messages.spec": ("Spec",),
    "headrace.messages.tensor": ("BytesTensor", "Tensor"),
    "headrace.models.served": ("ServedModel",),
    "headrace.schedulers.base": ("Clock", "InstanceInfo", "Scheduler", "SchedulerContext", "Timer", "Wait", "Waiting"),
    "headrace.server": ("Server",),
    "headrace.telemetry.observer": ("Observer",),
    "headrace.telemetry.statistics": ("BatchTimes",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AlreadyExists",
    "Answer",
    "Backend",
    "BackendError",
    "Batch",
    "BatchTimes",
    "BytesTensor",
    "Call",
    "Caller",
    "Cancelled",
    "Clock",
    "Code",
    "ConfigError",
    "DeferredInstance",
    "Device",
    "Engine",
    "Entrance",
    "Frontend",
    "HeadraceError",
    "InferRequest",
    "InferResponse",
    "Instance",
    "InstanceInfo",
    "Interceptor",
    "InternalError",
    "InvalidArgument",
    "Isolation",
    "LoadError",
    "Model",
    "ModelConfig",
    "ModelView",
    "NotFound",
    "Observer",
    "Padding",
    "RequestInstance",
    "Scheduler",
    "SchedulerContext",
    "ServedModel",
    "Server",
    "ServerOptions",
    "Services",
    "Spec",
    "StreamInstance",
    "Tensor",
    "Tensors",
    "Timer",
    "Unavailable",
    "Unsupported",
    "Wait",
    "Waiting",
    "dtypes",
    "hookimpl",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    if name == "dtypes":
        return import_module("headrace.messages.dtypes")
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute '{name}'")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
