"""The interceptor ``closed-operations``: refuses operations to every caller, for ``--security-closed``."""

from __future__ import annotations

from typing import ClassVar

from headrace.config.options import ServerOptions
from headrace.errors import PermissionDenied
from headrace.messages.caller import Caller
from headrace.messages.operation import AnyOperation
from headrace.models.interceptors import Interceptor
from headrace_cli.security.security_options import SecurityOptions

#: The result of `headrace.Interceptor.allowed_callers` for an operation that no caller may do.
NOBODY = "nobody"


class ClosedOperations(Interceptor):
    """Refuses closed operations for every caller. The program that runs the server, and its models, may do them."""

    name: ClassVar[str] = "closed-operations"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._closed = options.group(SecurityOptions).closed_names

    @property
    def enabled(self) -> bool:
        return bool(self._closed)

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        if self._is_closed(operation) and caller.transport not in ("program", "model"):
            raise PermissionDenied(f"the operation '{operation}' is closed on this server")

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str:
        return NOBODY if self._is_closed(operation) else ""

    def _is_closed(self, operation: AnyOperation) -> bool:
        return operation in self._closed or operation.category in self._closed
