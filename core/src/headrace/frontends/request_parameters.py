"""The parameters of infer requests: those with a meaning, and those that are refused, in every protocol.

Source: docs/spec/behaviours.md sections 1.3 and 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.errors import InvalidArgument
from headrace.messages.request import InferRequest, Parameter, Undecoded
from headrace.messages.tensor import Tensor

#: The parameter that only HTTP has.
BINARY_OUTPUTS = "binary_data_output"
#: Parameters with a meaning.
MEANT = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", BINARY_OUTPUTS, "headers")
#: The reserved prefix of names, and the one such name that gRPC has.
RESERVED = "triton_"
EMPTY_FINAL = "triton_enable_empty_final_response"
#: Sequence ids are 64-bit numbers, or strings; over HTTP, of at most 128 bytes.
UINT64_MAX = 2**64 - 1
MAX_SEQUENCE_ID_BYTES = 128
#: The protocol's type of a value.
V = TypeVar("V")


@dataclass(slots=True)
class RequestParameters:
    """The parameters of one request. Those without a meaning are ``custom``.

    ``protocol_flag`` is the parameter that only this protocol has.
    """

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    protocol_flag: bool = False
    custom: dict[str, Parameter] = field(default_factory=dict)

    @property
    def is_in_sequence(self) -> bool:
        """True if the request belongs to a sequence."""
        return self.sequence_id != 0 or self.sequence_start or self.sequence_end

    def request(
        self,
        model: str,
        inputs: Mapping[str, Tensor | Undecoded],
        outputs: Sequence[str],
        request_id: str,
        version: str,
    ) -> InferRequest:
        """Return the request to ``model`` with these parameters."""
        return InferRequest(
            model,
            inputs,
            outputs,
            request_id,
            version,
            self.custom,
            self.priority,
            self.timeout_us,
            self.sequence_id,
            self.sequence_start,
            self.sequence_end,
        )


class ParameterReader(Generic[V]):
    """Reads the parameters of requests of one protocol.

    ``protocol_flag`` is the name of its own parameter: `BINARY_OUTPUTS` or `EMPTY_FINAL`. The other arguments convert a
    value with its name, and raise `InvalidArgument` for a wrong type or range.
    """

    __slots__ = ("_boolean", "_custom", "_priority", "_protocol_flag", "_sequence_id", "_timeout")

    def __init__(
        self,
        protocol_flag: str,
        boolean: Callable[[V, str], bool],
        sequence_id: Callable[[V, str], int | str],
        priority: Callable[[V, str], int],
        timeout: Callable[[V, str], int],
        custom: Callable[[V, str], Parameter],
    ) -> None:
        self._protocol_flag, self._boolean, self._sequence_id = protocol_flag, boolean, sequence_id
        self._priority, self._timeout, self._custom = priority, timeout, custom

    def read(self, parameters: Mapping[str, V]) -> RequestParameters:
        """Return ``parameters``, read. Raises `InvalidArgument`."""
        result = RequestParameters()
        if not parameters:  # cheaper than iterating over nothing, in protobuf
            return result
        for name, value in parameters.items():
            if name == "sequence_id":
                result.sequence_id = self._sequence_id(value, name)
            elif name == "sequence_start":
                result.sequence_start = self._boolean(value, name)
            elif name == "sequence_end":
                result.sequence_end = self._boolean(value, name)
            elif name == "priority":
                result.priority = self._priority(value, name)
            elif name == "timeout":
                result.timeout_us = self._timeout(value, name)
            elif name == self._protocol_flag:
                result.protocol_flag = self._boolean(value, name)
            else:
                result.custom[name] = self.read_custom(value, name)
        return result

    def read_custom(self, value: V, name: str) -> Parameter:
        """Return the parameter ``name``, which has no meaning. Raises `InvalidArgument`."""
        if name.startswith(RESERVED):
            raise self._reserved()
        return self._custom(value, name)

    def _reserved(self) -> InvalidArgument:
        text = f"parameter keys starting with '{RESERVED}' are reserved for Triton usage"
        if self._protocol_flag.startswith(RESERVED):
            allowed = f"Only the following keys starting with '{RESERVED}' are allowed: {self._protocol_flag}"
            return InvalidArgument(f"{text}. {allowed}")
        return InvalidArgument(f"{text} and should not be specified.")
