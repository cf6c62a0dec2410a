"""The interceptor ``access``: names the principal of a caller, and allows what the principal may do.

A caller shows a key, a token or a certificate. A refusal depends on names only: a caller who may not use a model gets
the same error whether the model exists or not.
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
from headrace_access.access_rules import Principal
from headrace_access.key_file_watcher import KeyFileWatcher
from headrace_access.key_options import AccessOptions
from headrace_access.tokens import MOST_CHARACTERS, Verified

_CHALLENGE = 'Bearer realm="headrace"'


class AccessControl(Interceptor):
    """Refuses operations of callers without a key, a token or a certificate, and those that they are not allowed."""

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
        found = self._principal(caller)
        if isinstance(found, Principal):
            _decide(found, caller, operation, model)
            return None
        return self._wait(found, caller, operation, model)

    async def _wait(
        self, found: Awaitable[Principal], caller: Caller, operation: AnyOperation, model: str
    ) -> Watch | None:
        _decide(await found, caller, operation, model)
        return None

    def who_may(self, operation: AnyOperation, transport: str) -> str:
        if self._watcher is None or self._access.is_open(str(operation), operation.category):
            return ""
        return self._watcher.file.who_may(str(operation), operation.category)

    def _principal(self, caller: Caller) -> Principal | Awaitable[Principal]:
        """Return the principal of the caller. Raises `Unauthenticated`."""
        assert self._watcher is not None
        self._watcher.check()
        file = self._watcher.file
        given = credential_of(caller)
        if not given:
            if file.takes_certificates and caller.certificate is not None and caller.principal:
                return file.holder(caller.principal, caller.certificate)
            what = "a key or a token" if file.issuers else "a key"
            raise Unauthenticated(
                f"this server needs {what}, in the header 'Authorization: Bearer <key>'", challenge=_CHALLENGE
            )
        if len(given) > MOST_CHARACTERS:
            raise _refused("key", "it is too long")
        if not file.issuers or given.startswith("hr_"):
            principal = file.find(given)
            if isinstance(principal, str):
                raise _refused("key", principal)
            return principal
        token = self._watcher.tokens.find(given)
        return self._await(token) if isinstance(token, Awaitable) else _principal_of(token)

    @staticmethod
    async def _await(token: Awaitable[Verified | str]) -> Principal:
        return _principal_of(await token)


def credential_of(caller: Caller) -> str:
    """Return what the caller sent in ``Authorization: Bearer`` or in ``X-Api-Key``; empty without one.

    Raises `Unauthenticated` for several headers ``Authorization``: a proxy may have checked another one.
    """
    given = caller.header("authorization")
    if given is None:
        return (caller.header("x-api-key") or "").strip()
    if caller.transport == "grpc" and [name for name, _ in caller.headers()].count("authorization") > 1:
        raise _refused("key", "there are several headers 'authorization'")  # over HTTP, commas join them to no key
    scheme, _, key = given.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _decide(principal: Principal, caller: Caller, operation: AnyOperation, model: str) -> None:
    """Name the principal of the caller. Raises `PermissionDenied` if no rule allows the operation."""
    caller.principal = principal.name
    if not principal.may(str(operation), operation.category, model):
        on = f" on model '{one_line(model)}'" if model else ""
        raise PermissionDenied(f"'{principal.name}' may not do '{operation}'{on}")


def _principal_of(token: Verified | str) -> Principal:
    if isinstance(token, str):
        raise _refused("token", token)
    return token.principal


def _refused(what: str, reason: str) -> Unauthenticated:
    return Unauthenticated(f"the {what} is refused: {reason}", challenge=f'{_CHALLENGE}, error="invalid_token"')
