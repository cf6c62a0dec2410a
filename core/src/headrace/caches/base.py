"""What a response cache implements: it keeps answers by a key, and core does the rest."""

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
    """What is kept of a response: its outputs, and the parameters that its model gave it. Who asked is no part of it.

    ``size_bytes`` is the memory that it takes; 0 where nobody has counted. Nobody may write into its tensors.
    """

    outputs: Mapping[str, Tensor]
    parameters: Mapping[str, Parameter]
    size_bytes: int = 0


class ResponseCache(ABC):
    """Keeps the answers of models. One object per server, of the class whose ``name`` ``--cache-config`` gives.

    A key is 32 bytes: a digest of the model, its version, its config, and what it was asked. `get` and `put` are called
    on the event loop and must not block, unless the cache ``is_remote``: then several threads of core call them, for
    one request each, and they may block. What they raise is counted and logged, and the model answers.
    `InvalidArgument` of `get` says that the entry is wrong, and not the cache. A cache may forget whatever it likes.
    """

    name: ClassVar[str]
    #: A dataclass: what ``--cache-config=NAME,FIELD=VALUE`` may say.
    Parameters: ClassVar[type] = NoParameters
    #: Whether `get` and `put` may block. What such a cache returns is not believed: it is held against what the model
    #: promises. Its keys tell models apart by the contents of their files, because other servers may share it.
    is_remote: ClassVar[bool] = False
    #: What it has on the metrics page, beside what every model that takes part has there: `measure`.
    metrics: ClassVar[Sequence[PublishedMetric]] = ()
    #: Of a remote cache: how many threads ask it.
    threads: int = 1
    #: A response whose tensors take more is not offered.
    largest_bytes: int = 1 << 63

    def __init__(self, parameters: Any) -> None:
        """``parameters`` are this class's ``Parameters``. May block. Raise `ConfigError` if they cannot be."""
        self.parameters = parameters

    @abstractmethod
    def get(self, key: bytes) -> CachedResponse | None:
        """What was put under ``key``; None if there is nothing."""

    @abstractmethod
    def put(self, key: bytes, response: CachedResponse) -> None:
        """Keep ``response``, which is the cache's own and never changes."""

    def measure(self) -> Mapping[str, float]:
        """What each of ``metrics`` is now, by its name. Asked on the event loop when somebody reads the metrics page,
        also of a remote cache: must not block. If it raises, the page does without what this cache has there."""
        return {}

    def close(self) -> None:
        """The server has stopped; nothing is asked any more. May block."""
