"""The operations of all protocols, each of which is admitted."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias


class Operation(str, Enum):
    """The operations of the server itself. Extensions add theirs as `ExtensionOperation`.

    An operation of every protocol is the same member: ``POST /v2/models/m/infer``, the RPC ``ModelInfer`` and
    `headrace.Server.infer` are all ``INFER``.
    """

    INFER = "infer"
    #: A stream of inferences is opened. Each request on it is an ``INFER`` of its own.
    OPEN_STREAM = "open_stream"
    GENERATE = "generate"
    LIVE = "live"
    READY = "ready"
    MODEL_READY = "model_ready"
    SERVER_METADATA = "server_metadata"
    MODEL_METADATA = "model_metadata"
    MODEL_CONFIG = "model_config"
    STATISTICS = "statistics"
    EXPLAIN = "explain"
    INDEX = "index"
    LOAD = "load"
    UNLOAD = "unload"
    TRACE_SETTINGS = "trace_settings"
    LOG_SETTINGS = "log_settings"
    SHARED_MEMORY_STATUS = "shared_memory_status"
    SHARED_MEMORY_REGISTER = "shared_memory_register"
    SHARED_MEMORY_UNREGISTER = "shared_memory_unregister"
    METRICS = "metrics"
    #: A tool requests the descriptions of the gRPC services.
    REFLECTION = "reflection"

    def __str__(self) -> str:
        return self.value

    @property
    def category(self) -> str:
        """Return the category of ``--http-restricted-api`` and ``--grpc-restricted-protocol``; empty for none."""
        return _CATEGORIES[self]


class ExtensionOperation(str):
    """An operation that an extension adds, by its name: ``ExtensionOperation("chat")``.

    ``category`` is that of ``--http-restricted-api`` and ``--grpc-restricted-protocol`` which holds for it. If it
    ``has_parts``, the models are in its body, and each is admitted by an operation of its own.
    """

    category: str
    has_parts: bool

    def __new__(cls, name: str, category: str = "inference", has_parts: bool = False) -> ExtensionOperation:
        operation = super().__new__(cls, name)
        operation.category, operation.has_parts = category, has_parts
        return operation


#: Compare it with a member of `Operation`, or with a string.
AnyOperation: TypeAlias = "Operation | ExtensionOperation"

#: docs/spec/behaviours.md sections 1.2 and 2.1. Triton restricts neither metrics nor reflection, which it lacks.
_CATEGORIES = {
    Operation.INFER: "inference",
    Operation.OPEN_STREAM: "inference",
    Operation.GENERATE: "inference",
    Operation.LIVE: "health",
    Operation.READY: "health",
    Operation.MODEL_READY: "health",
    Operation.SERVER_METADATA: "metadata",
    Operation.MODEL_METADATA: "metadata",
    Operation.MODEL_CONFIG: "model-config",
    Operation.STATISTICS: "statistics",
    Operation.EXPLAIN: "statistics",
    Operation.INDEX: "model-repository",
    Operation.LOAD: "model-repository",
    Operation.UNLOAD: "model-repository",
    Operation.TRACE_SETTINGS: "trace",
    Operation.LOG_SETTINGS: "logging",
    Operation.SHARED_MEMORY_STATUS: "shared-memory",
    Operation.SHARED_MEMORY_REGISTER: "shared-memory",
    Operation.SHARED_MEMORY_UNREGISTER: "shared-memory",
    Operation.METRICS: "",
    Operation.REFLECTION: "",
}
