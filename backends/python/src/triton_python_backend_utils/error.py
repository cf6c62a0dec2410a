"""Errors in the responses of a model, and the exception that functions of this package raise."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from headrace import BackendError, Code, HeadraceError
from triton_python_backend_utils.arguments import Text, choice, lines


class TritonModelException(Exception):
    """An error from the server for a model, or from a model itself."""


class ErrorCode(IntEnum):
    """The codes of `TritonError`. Source: TRITONSERVER_Error_Code."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


_CODES = {
    ErrorCode.UNKNOWN: Code.UNKNOWN,
    ErrorCode.INTERNAL: Code.INTERNAL,
    ErrorCode.NOT_FOUND: Code.NOT_FOUND,
    ErrorCode.INVALID_ARG: Code.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: Code.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: Code.UNSUPPORTED,
    ErrorCode.ALREADY_EXISTS: Code.ALREADY_EXISTS,
    ErrorCode.CANCELLED: Code.CANCELLED,
}
#: Triton has no codes for the refusals of interceptors.
_NUMBERS = {code: number for number, code in _CODES.items()} | {
    Code.UNAUTHENTICATED: ErrorCode.INVALID_ARG,
    Code.PERMISSION_DENIED: ErrorCode.INVALID_ARG,
    Code.RESOURCE_EXHAUSTED: ErrorCode.UNAVAILABLE,
}


class TritonError:
    """The error of an `InferenceResponse`: ``message`` for the caller, and one of the eight codes."""

    __slots__ = ("_code", "_message")

    UNKNOWN: ClassVar[ErrorCode] = ErrorCode.UNKNOWN
    INTERNAL: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    NOT_FOUND: ClassVar[ErrorCode] = ErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[ErrorCode] = ErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[ErrorCode] = ErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[ErrorCode] = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[ErrorCode] = ErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[ErrorCode] = ErrorCode.CANCELLED

    def __init__(self, message: Text, code: int = ErrorCode.INTERNAL) -> None:
        """Raises TypeError for a message that is no text, and for a code that is none of the eight."""
        self._message = lines(message, "the message of a TritonError")
        self._code = choice(code, ErrorCode, "the code of a TritonError")

    def code(self) -> ErrorCode:
        return self._code

    def message(self) -> str:
        return self._message

    def __str__(self) -> str:
        return self._message

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, TritonError.{self._code.name})"

    def _as_headrace(self) -> HeadraceError:
        return BackendError(self._message, _CODES[self._code])

    @classmethod
    def _from_headrace(cls, error: HeadraceError) -> TritonError:
        return cls(error.message, _NUMBERS[error.code])
