"""The answer of a server to an inference request, whatever its protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace_compare.named_tensors import NamedTensor
from headrace_compare.request_sources import ComparedRequest

#: The status of a request that got no answer.
NO_ANSWER = "no answer"


class Unreachable(Exception):
    """A server does not answer, or not in its protocol."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """An answer. ``status`` is the code of the protocol, ``fields`` everything except outputs."""

    status: str
    error: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[NamedTensor, ...] = ()


class ComparedServer(Protocol):
    """A server. Methods block, and raise `Unreachable`."""

    url: str
    protocol: str

    def document(self, kind: str, model: str = "", version: str = "") -> tuple[str, Any]:
        """Return the status, and the JSON of "server", "index", "metadata", "config" or "statistics"."""
        ...

    def infer(self, request: ComparedRequest, *, is_stream: bool) -> list[ServerAnswer]:
        """Return the answers: one, or all of a stream."""
        ...

    def close(self) -> None: ...
