"""All errors of Headrace, by the person who must act.

::

    HeadraceError
    ├── CallerError               the sender of the request
    │   ├── InvalidArgument
    │   ├── NotFound
    │   ├── AlreadyExists
    │   ├── Unsupported
    │   ├── Cancelled
    │   ├── Unauthenticated       the next three are refusals of interceptors
    │   ├── PermissionDenied
    │   └── ResourceExhausted
    ├── OperatorError             the person who runs the server or wrote a config
    │   ├── ConfigError
    │   ├── LoadError
    │   └── Unavailable
    │       └── OutOfMemory
    ├── PluginError               the author of a plugin
    │   └── BackendError
    │       └── Rescheduled       instead of an answer: no failure if the scheduler accepts it
    └── InternalError             the authors of Headrace

An error has a `Code` and no status of a transport: each frontend has one table from code to status. The first eight
codes are Triton's (docs/spec/behaviours.md section 0). Triton has no code for a refused caller; the last three codes
are those of HTTP and gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class Code(Enum):
    """The kind of an error, independent of any transport. The values of the first eight are Triton's printed names."""

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARGUMENT = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"
    UNAUTHENTICATED = "Unauthenticated"
    PERMISSION_DENIED = "Permission denied"
    RESOURCE_EXHAUSTED = "Resource exhausted"


class HeadraceError(Exception):
    """The base of all errors. ``code`` defaults to the class's, and may be set per instance."""

    code: Code = Code.UNKNOWN

    def __init__(self, message: str = "", code: Code | None = None) -> None:
        super().__init__(message)
        if code is not None:
            if not isinstance(code, Code):
                raise TypeError(f"the code of an error is {code!r}, which is no Code")
            self.code = code

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else ""


def summary(error: BaseException) -> str:
    """Return the message of a `HeadraceError`, or the type and the text of another error."""
    return error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"


def plugin_failure(error: BaseException, has_left: bool = False) -> Exception:
    """Return ``error``, which code of a plugin raised on the event loop, as an `Exception`.

    A `SystemExit` would end the loop. A `CancelledError` would count as the caller's, although it is still connected.
    Raises ``error`` if it is not the plugin's: a `KeyboardInterrupt`, or a `CancelledError` because the caller
    ``has_left``.
    """
    if isinstance(error, Exception):
        return error
    import asyncio  # here, because the process of a model need not have it

    is_cancelled = has_left and isinstance(error, asyncio.CancelledError)
    if is_cancelled or isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error
    failure = RuntimeError(f"code of a plugin raised {summary(error)}")
    failure.__cause__ = error
    return failure


@contextmanager
def plugin_errors(failure: str) -> Iterator[None]:
    """Turn what code of a plugin raises into a `PluginError` that begins with ``failure``, even a `SystemExit`.

    A `HeadraceError`, a `KeyboardInterrupt` and the cancellation of a task are not changed.
    """
    try:
        yield
    except HeadraceError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | GeneratorExit) or type(error).__name__ == "CancelledError":
            raise
        raise PluginError(f"{failure}: {summary(error)}") from error


class CallerError(HeadraceError):
    """The request cannot be served as sent; sending it again unchanged will not help."""

    code = Code.INVALID_ARGUMENT


class InvalidArgument(CallerError):
    """A field of the request breaks a rule that the message states."""


class NotFound(CallerError):
    """The request names something the server does not have."""

    code = Code.NOT_FOUND


class AlreadyExists(CallerError):
    """The request would create something that is already there."""

    code = Code.ALREADY_EXISTS


class Unsupported(CallerError):
    """The request is valid, but this server does not support it."""

    code = Code.UNSUPPORTED


class Cancelled(CallerError):
    """The caller disconnected or cancelled before the answer was ready."""

    code = Code.CANCELLED


class Unauthenticated(CallerError):
    """The caller is unknown. ``challenge`` is the value of the HTTP header ``WWW-Authenticate``.

    If it is empty, the header is not sent.
    """

    code = Code.UNAUTHENTICATED

    def __init__(self, message: str = "", code: Code | None = None, *, challenge: str = "") -> None:
        super().__init__(message, code)
        self.challenge = str(challenge)


class PermissionDenied(CallerError):
    """The caller is known, and the operation is not allowed for it."""

    code = Code.PERMISSION_DENIED


class ResourceExhausted(CallerError):
    """The caller has used up its quota. The same request may succeed in ``retry_after_s`` seconds; None if unknown.

    It is the header ``Retry-After`` or the trailer ``grpc-retry-pushback-ms``. Infinity and NaN are unknown.
    """

    code = Code.RESOURCE_EXHAUSTED

    def __init__(self, message: str = "", code: Code | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, code)
        self.retry_after_s = retry_after_s if retry_after_s is not None and math.isfinite(retry_after_s) else None


class OperatorError(HeadraceError):
    """The server's configuration, its repository or its load prevents this."""

    code = Code.INVALID_ARGUMENT


class ConfigError(OperatorError):
    """A model configuration or an option breaks a rule that the message states.

    ``field`` is the path in a model's config, such as ``input[0].dims``; empty if unknown. ``line`` and ``column``
    count from 1 in its text; 0 if unknown. ``place`` is the prefix ``FILE:LINE:COLUMN: FIELD: `` for the log; empty if
    the message has it, or if it is unknown.
    """

    place: str = ""

    def __init__(
        self, message: str = "", code: Code | None = None, *, field: str = "", line: int = 0, column: int = 0
    ) -> None:
        super().__init__(message, code)
        self.field = field
        self.line = line
        self.column = column


class LoadError(OperatorError):
    """A model could not be loaded; the message names the file or the setting at fault."""

    code = Code.INTERNAL


class Unavailable(OperatorError):
    """The server or the model cannot answer now; the same request may succeed later.

    ``retry_after_s`` is as in `ResourceExhausted`.
    """

    code = Code.UNAVAILABLE

    def __init__(self, message: str = "", code: Code | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, code)
        self.retry_after_s = retry_after_s if retry_after_s is not None and math.isfinite(retry_after_s) else None


class OutOfMemory(Unavailable):
    """The server has no memory for the request now. Over HTTP 503, over gRPC RESOURCE_EXHAUSTED."""


class PluginError(HeadraceError):
    """A plugin broke its contract."""

    code = Code.INTERNAL


class BackendError(PluginError):
    """A backend failed to execute, or answered with something it did not declare."""


class Rescheduled(BackendError):
    """Returned instead of a last answer: the model wants to run the request once more.

    A scheduler that `reschedules` queues it again, and its caller gets no error. With another scheduler, the
    caller gets this error, which has Triton's text.
    """

    def __init__(
        self,
        message: str = "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
        "configured to handle such a flag.",
        code: Code | None = None,
    ) -> None:
        super().__init__(message, code)


class InternalError(HeadraceError):
    """Headrace itself is at fault; please report it with the traceback."""

    code = Code.INTERNAL
