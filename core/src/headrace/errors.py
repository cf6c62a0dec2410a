"""Every error Headrace raises, arranged by who must act.

::

    HeadraceError
    ├── CallerError               whoever sent the request
    │   ├── InvalidArgument
    │   ├── NotFound
    │   ├── AlreadyExists
    │   ├── Unsupported
    │   └── Cancelled
    ├── OperatorError             whoever runs the server or wrote a config
    │   ├── ConfigError
    │   ├── LoadError
    │   └── Unavailable
    ├── PluginError               whoever wrote a plugin
    │   └── BackendError
    │       └── Rescheduled       in the place of an answer: it is no failure where the scheduler takes it
    └── InternalError             us

An error carries a `Code` and no transport number: each frontend has one table from code to
status. The codes are Triton's eight (docs/spec/behaviours.md section 0).
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """What went wrong, independent of any transport. The values are Triton's printed names."""

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARGUMENT = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"


class HeadraceError(Exception):
    """Base of all errors; ``code`` defaults to the class's and may be narrowed per instance."""

    code: Code = Code.UNKNOWN

    def __init__(self, message: str = "", code: Code | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        return str(self.args[0])


def summary(error: BaseException) -> str:
    """What ``error`` says: the message of one of ours, the type and the text of any other."""
    return error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"


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
    """The request is well formed but asks for something this server does not do."""

    code = Code.UNSUPPORTED


class Cancelled(CallerError):
    """The caller went away before the answer was ready."""

    code = Code.CANCELLED


class OperatorError(HeadraceError):
    """The server's configuration, its repository or its load stands in the way."""

    code = Code.INVALID_ARGUMENT


class ConfigError(OperatorError):
    """A model configuration or an option breaks a rule that the message states.

    ``field`` is the path in a model's config, such as ``input[0].dims``, of what is at fault, and
    ``line`` and ``column`` count from 1 in its text; empty and 0 where they are not known.
    ``place`` is where a log shows the field: ``FILE:LINE:COLUMN: FIELD: ``, empty where the message says it, or nobody.
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
    """The server or the model cannot answer now; the same request may succeed later."""

    code = Code.UNAVAILABLE


class PluginError(HeadraceError):
    """A plugin broke its contract."""

    code = Code.INTERNAL


class BackendError(PluginError):
    """A backend failed to execute, or answered with something it did not declare."""


class Rescheduled(BackendError):
    """In the place of a last answer: the model wants the request to be run once more.

    A scheduler that `reschedules` has it wait again, and its caller hears nothing of it. Any other leaves the caller
    with this error, which has Triton's text.
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
