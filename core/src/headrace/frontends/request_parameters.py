"""Parameters of infer requests: which have a meaning, and what is refused, however a protocol spells their values.

Source: docs/spec/behaviours.md sections 1.3 and 2.3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from headrace.config.options import header_pattern
from headrace.errors import InvalidArgument, OperatorError
from headrace.messages.request import Parameter

#: Those that have a meaning over every protocol, and the one that HTTP has besides.
_MEANT = frozenset(("sequence_id", "sequence_start", "sequence_end", "priority", "timeout"))
BINARY_OUTPUTS = "binary_data_output"
#: What names begin with that nobody may choose, and the one of them that gRPC has.
_RESERVED = "triton_"
EMPTY_FINAL = "triton_enable_empty_final_response"
#: Sequence ids are numbers of 64 bits, or strings; over HTTP of so many bytes.
UINT64_MAX = 2**64 - 1
MAX_SEQUENCE_ID_BYTES = 128
#: How a protocol writes a value.
V = TypeVar("V")


@dataclass(slots=True)
class RequestParameters:
    """The parameters of one request. Those without a meaning of their own are ``custom``.

    ``switch`` is the one that only its protocol has.
    """

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    switch: bool = False
    custom: dict[str, Parameter] = field(default_factory=dict)


class ParameterReader(ABC, Generic[V]):
    """Reads the parameters of requests of one protocol, which knows how values are spelled on its wire.

    Its methods give a value or raise `InvalidArgument` for one of a wrong type or out of its range.
    """

    #: What the switch of the protocol is called: `BINARY_OUTPUTS` or `EMPTY_FINAL`.
    switch: ClassVar[str]

    def __init__(self) -> None:
        self._meant = _MEANT | {self.switch}

    @abstractmethod
    def boolean(self, name: str, value: V) -> bool: ...

    @abstractmethod
    def sequence_id(self, value: V) -> int | str: ...

    @abstractmethod
    def priority(self, value: V) -> int: ...

    @abstractmethod
    def timeout_us(self, value: V) -> int: ...

    @abstractmethod
    def custom(self, name: str, value: V) -> Parameter: ...

    def read(self, parameters: Mapping[str, V]) -> RequestParameters:
        """What ``parameters`` say. Raises `InvalidArgument`."""
        result = RequestParameters()
        if not parameters:  # asking costs less than iterating over nothing, in protobuf
            return result
        meant, custom = self._meant, result.custom
        for name, value in parameters.items():
            if name not in meant:
                if name.startswith(_RESERVED):
                    raise self._reserved()
                custom[name] = self.custom(name, value)
            elif name == "sequence_id":
                result.sequence_id = self.sequence_id(value)
            elif name == "sequence_start":
                result.sequence_start = self.boolean(name, value)
            elif name == "sequence_end":
                result.sequence_end = self.boolean(name, value)
            elif name == "priority":
                result.priority = self.priority(value)
            elif name == "timeout":
                result.timeout_us = self.timeout_us(value)
            else:
                result.switch = self.boolean(name, value)
        return result

    def _reserved(self) -> InvalidArgument:
        text = f"parameter keys starting with '{_RESERVED}' are reserved for Triton usage"
        if self.switch.startswith(_RESERVED):
            allowed = f"Only the following keys starting with '{_RESERVED}' are allowed: {self.switch}"
            return InvalidArgument(f"{text}. {allowed}")
        return InvalidArgument(f"{text} and should not be specified.")


class HeaderForwarding:
    """Which headers, or entries of metadata, become parameters: those whose name the operator's pattern finds.

    An empty pattern forwards nothing. Raises `OperatorError` if the pattern is malformed.
    """

    _reserved = _MEANT | {BINARY_OUTPUTS, "headers"}

    def __init__(self, pattern: str) -> None:
        try:
            self._finds = header_pattern(pattern) if pattern else None
        except ValueError as error:
            raise OperatorError(f"headers cannot be forwarded: {error}") from None

    def __bool__(self) -> bool:
        return self._finds is not None

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """The parameters that ``headers`` give; raises `InvalidArgument` for a reserved name."""
        if self._finds is None:
            return {}
        chosen = {name: value for name, value in headers if self._finds(name)}
        for name in chosen:
            if name.lower() in self._reserved or name.lower().startswith(_RESERVED):
                raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        return chosen
