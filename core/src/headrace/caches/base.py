"""The interface of a response cache: it stores responses by key. Core makes the keys and answers requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.backends.base import NoParameters
from headrace.messages.request import Parameter
from headrace.messages.tensor import Tensor
from headrace.telemetry.published import PublishedMetric


@dataclass(frozen=True, slots=True, eq=False)
class CachedResponse:
    """The part of a response that is stored: its outputs and parameters. The id of the request is not.

    ``size_bytes`` is the memory that it takes, 0 if unknown. Its tensors must not be written to.
    """

    outputs: Mapping[str, Tensor]
    parameters: Mapping[str, Parameter]
    size_bytes: int = 0


class ResponseCache(ABC):
    """Stores the responses of models. There is one per server, of the class whose ``name`` is in ``--cache-config``.

    A key is 32 bytes: a digest of the model, its version, its config and the content of the request. `get` and `put`
    are called on the event loop and must not block. If the cache ``is_remote``, core calls them on several threads
    instead, and they may block. An error that they raise is counted and logged, and the model answers the request.
    `InvalidArgument` from `get` means that the entry is wrong, not the cache. A cache may drop any entry at any time.
    """

    name: ClassVar[str]
    #: A dataclass: the fields that ``--cache-config=NAME,FIELD=VALUE`` may set.
    Parameters: ClassVar[type] = NoParameters
    #: True if `get` and `put` may block. Responses from such a cache are checked against the model's outputs. Its keys
    #: depend on the contents of the model's files, because other servers may share the cache.
    is_remote: ClassVar[bool] = False
    #: The metrics of the cache itself, beside those of each model; `measure` gives their values.
    metrics: ClassVar[Sequence[PublishedMetric]] = ()
    #: The number of threads that call a remote cache.
    threads: int = 1
    #: A response whose tensors take more bytes is not stored.
    largest_bytes: int = 1 << 63

    def __init__(self, parameters: Any) -> None:
        """``parameters`` is an object of this class's ``Parameters``. May block. Raise `ConfigError` if it is wrong."""
        self.parameters = parameters

    @abstractmethod
    def get(self, key: bytes) -> CachedResponse | None:
        """Return the response stored under ``key``, or None."""

    @abstractmethod
    def put(self, key: bytes, response: CachedResponse) -> None:
        """Store ``response`` under ``key``. The cache owns it; it never changes."""

    def measure(self) -> Mapping[str, float]:
        """Return the current value of each of ``metrics``, by name. Called on the event loop for each read of the
        metrics page, also for a remote cache: must not block. If it raises, the page lacks the cache's metrics."""
        return {}

    def close(self) -> None:
        """Close the cache: the server has stopped and makes no further call. May block."""
