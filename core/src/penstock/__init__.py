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

from typing import TYPE_CHECKING, Any

from penstock.backends.base import (
    Backend,
    Device,
    Instance,
    Model,
    RequestInstance,
    StreamInstance,
    Tensors,
)
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
from penstock.hookspecs import hookimpl
from penstock.messages import dtypes
from penstock.messages.request import InferRequest
from penstock.messages.response import InferResponse
from penstock.messages.tensor import BytesTensor, Tensor

if TYPE_CHECKING:
    from penstock.server import Server

__all__ = [
    "AlreadyExists",
    "Backend",
    "BackendError",
    "BytesTensor",
    "Cancelled",
    "Code",
    "ConfigError",
    "Device",
    "InferRequest",
    "InferResponse",
    "Instance",
    "InternalError",
    "InvalidArgument",
    "LoadError",
    "Model",
    "NotFound",
    "PenstockError",
    "RequestInstance",
    "Server",
    "ServerOptions",
    "StreamInstance",
    "Tensor",
    "Tensors",
    "Unavailable",
    "Unsupported",
    "dtypes",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    """`Server`, on first use: who only writes a backend need not import a server."""
    if name == "Server":
        from penstock.server import Server

        return Server
    raise AttributeError(f"module 'penstock' has no attribute '{name}'")
