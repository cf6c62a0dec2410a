"""The interceptor ``access``: names the principal of a caller by its key, and allows what the principal may do.

A refusal depends on names only. A caller who may not use a model gets the same error whether the model exists or not.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import ClassVar

from headrace import (
    AnyOperation,
    Caller,
    Interceptor,
    PermissionDenied,
    ServerOptions,
    Unauthenticated,
    Watch,
    one_line,
)
from headrace_access.key_file_watcher import KeyFileWatcher
from headrace_access.key_options import AccessOptions

#: A longer value is no key: the error comes before anything is computed from it.
_MOST_CHARACTERS = 4096
_CHALLENGE = 'Bearer realm="headrace"'


class AccessControl(Interceptor):
    """Refuses operations of callers without a key, and those that their principal is not allowed."""

    name: ClassVar[str] = "access"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._access = options.group(AccessOptions)
        #: By operation, True if it needs no key.
        self._is_open: dict[str, bool] = {}
        self._watcher = KeyFileWatcher(Path(self._access.keys)) if self._access.keys else None

    @property
    def enabled(self) -> bool:
        return self._watcher is not None

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | Awaitable[Watch | None] | None:
        if caller.transport in ("program", "model"):
            return None
        is_open = self._is_open.get(operation)
        if is_open is None:
            is_open = self._is_open[operation] = self._access.is_open(str(operation), operation.category)
        if is_open:
            return None
        assert self._watcher is not None
        given = key_of(caller)
        if not given:
            raise Unauthenticated(
                "this server needs a key, in the header 'Authorization: Bearer <key>'", challenge=_CHALLENGE
            )
        principal = "it is too long" if len(given) > _MOST_CHARACTERS else self._watcher.current().find(given)
        if isinstance(principal, str):
            raise Unauthenticated(f"the key is refused: {principal}", challenge=_CHALLENGE)
        caller.principal = principal.name
        if not principal.may(str(operation), operation.category, model):
            on = f" on model '{one_line(model)}'" if model else ""
            raise PermissionDenied(f"'{principal.name}' may not do '{operation}'{on}")
        return None


def key_of(caller: Caller) -> str:
    """Return the key that the caller sent, in ``Authorization: Bearer`` or in ``X-Api-Key``; empty without one."""
    given = caller.header("authorization")
    if given is None:
        return (caller.header("x-api-key") or "").strip()
    scheme, _, key = given.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
