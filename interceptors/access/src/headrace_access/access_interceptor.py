"""The interceptor ``access``: names the principal of a caller, and allows what the principal may do.

A caller shows a key, a token or a certificate. A refusal depends on names only: a caller who may not use a model gets
the same error whether the model exists or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headrace import (
    AnyOperation,
    Caller,
    Interceptor,
    Operation,
    PermissionDenied,
    ServerOptions,
    Unauthenticated,
    Watch,
    one_line,
)
from headrace_access.access_rules import MOST_CHARACTERS, Verified
from headrace_access.kept_permits import Credential, KeptPermits
from headrace_access.key_options import AccessOptions

if TYPE_CHECKING:
    from headrace_access.key_file_watcher import KeyFileWatcher

_CHALLENGE = 'Bearer realm="headrace"'
_INSIDE = ("program", "model")
_NOTHING: Mapping[str, str] = {}


class AccessControl(Interceptor):
    """Refuses operations of callers without a key, a token or a certificate, and those that they are not allowed."""

    name: ClassVar[str] = "access"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._access = options.group(AccessOptions)
        #: By operation, True if it needs no key.
        self._is_open: dict[str, bool] = {}
        self._watcher: KeyFileWatcher | None = None
        if self._access.keys:
            from headrace_access.key_file_watcher import KeyFileWatcher

            self._watcher = KeyFileWatcher(Path(self._access.keys))
            self.permits = self._permits = KeptPermits(self._watcher.check)
            self._watcher.on_change = self._permits.clear

    @property
    def enabled(self) -> bool:
        return self._watcher is not None

    def who_may(self, operation: AnyOperation, transport: str) -> str | None:
        if self._watcher is None or transport in _INSIDE:
            return None
        return "" if self._needs_nothing(operation) else self._watcher.file.who_may(str(operation), operation.category)

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | Awaitable[Watch | None] | None:
        if caller.transport in _INSIDE or self._needs_nothing(operation):
            return None
        credential = caller.header("authorization")
        if operation is Operation.INFER and (kept_as := _kept_as(caller, credential)):
            principal = self._permits.get(kept_as, _NOTHING).get(model)
            if principal is not None and _is_sure(caller, kept_as, principal):
                caller.principal = principal
                return None
        found = self._verified(caller, credential)
        if isinstance(found, Verified):
            self._decide(found, caller, operation, model)
            return None
        return self._wait(found, caller, operation, model)

    def _needs_nothing(self, operation: AnyOperation) -> bool:
        is_open = self._is_open.get(operation)
        if is_open is None:
            is_open = self._is_open[operation] = self._access.is_open(str(operation), operation.category)
        return is_open

    async def _wait(
        self, found: Awaitable[Verified | str], caller: Caller, operation: AnyOperation, model: str
    ) -> Watch | None:
        self._decide(_right(await found), caller, operation, model)
        return None

    def _verified(self, caller: Caller, credential: str | None) -> Verified | Awaitable[Verified | str]:
        """Return who the caller is, and how long what he has shown is right. Raises `Unauthenticated`."""
        assert self._watcher is not None
        reading = self._watcher.check()
        return self._shown(caller, credential) if reading is None else self._checked(reading, caller, credential)

    async def _checked(self, reading: asyncio.Task[None], caller: Caller, credential: str | None) -> Verified | str:
        assert self._watcher is not None
        await self._watcher.checked(reading)
        found = self._shown(caller, credential)
        return found if isinstance(found, Verified) else await found

    def _shown(self, caller: Caller, credential: str | None) -> Verified | Awaitable[Verified | str]:
        assert self._watcher is not None
        file = self._watcher.file
        given = _key_in(caller, credential)
        if not given:
            if file.takes_certificates and caller.certificate is not None and caller.principal:
                return Verified(file.holder(caller.principal, caller.certificate), 0)
            what = "a key or a token" if file.issuers else "a key"
            raise Unauthenticated(
                f"this server needs {what}, in the header 'Authorization: Bearer <key>'", challenge=_CHALLENGE
            )
        if len(given) > MOST_CHARACTERS:
            raise _refused("key", "it is too long")
        if not file.issuers or given.startswith("hr_"):
            found = file.find(given)
            if isinstance(found, str):
                raise _refused("key", found)
            return Verified(found.principal, found.until_s)
        token = self._watcher.tokens.find(given)
        return token if isinstance(token, Awaitable) else _right(token)

    def _decide(self, found: Verified, caller: Caller, operation: AnyOperation, model: str) -> None:
        """Name the principal of the caller. Raises `PermissionDenied` if no rule allows the operation."""
        principal = found.principal
        caller.principal = principal.name
        has_parts = getattr(operation, "has_parts", False)
        if not principal.may(str(operation), operation.category, model, has_parts):
            on = f" on model '{one_line(model)}'" if model else ""
            raise PermissionDenied(f"'{principal.name}' may not do '{operation}'{on}")
        if operation is not Operation.INFER:
            return
        shown = _kept_as(caller, caller.header("authorization"))
        if found.until_s:
            if shown and not isinstance(shown, int):
                self._permits.keep(shown, model, principal.name, found.until_s)
        # Not with a header beside the certificate: it may be a password for a proxy, or anything.
        elif isinstance(shown, int) and caller.certificate is not None and _names(caller.certificate, principal.name):
            self._permits.keep_certificate(caller.certificate, model, principal.name)


def _key_in(caller: Caller, credential: str | None) -> str:
    """Return what the caller sent in ``Authorization: Bearer`` or in ``X-Api-Key``; empty without one.

    Raises `Unauthenticated` for several of one of these headers: a proxy may have checked another one.
    """
    name = "x-api-key" if credential is None else "authorization"
    if caller.transport == "grpc" and _has_several(caller, name):  # over HTTP, commas join them to no key
        raise _refused("key", f"there are several headers '{name}'")
    if credential is None:
        return (caller.header(name) or "").strip()
    scheme, _, key = credential.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _kept_as(caller: Caller, credential: str | None) -> Credential | int | None:
    """Return what the caller has shown, as it is kept; None or empty if he has shown nothing."""
    if credential is not None:
        return credential
    key = caller.header("x-api-key")
    if key is not None:
        return (KeptPermits.header, key) if key else None
    return None if caller.certificate is None else id(caller.certificate)


def _is_sure(caller: Caller, kept_as: Credential | int, principal: str) -> bool:
    """True if nothing else that the caller has sent, or that another interceptor has set, changes what is kept."""
    if isinstance(kept_as, int):
        return caller.principal == principal
    name = "x-api-key" if isinstance(kept_as, tuple) else "authorization"
    return caller.transport != "grpc" or not _has_several(caller, name)


def _names(certificate: Mapping[str, Any], principal: str) -> bool:
    """True if the principal is that of the certificate, and not one that another interceptor has set."""
    return Caller("", certificate=certificate).principal == principal


def _has_several(caller: Caller, header: str) -> bool:
    return [name for name, _ in caller.headers()].count(header) > 1


def _right(token: Verified | str) -> Verified:
    if isinstance(token, str):
        raise _refused("token", token)
    return token


def _refused(what: str, reason: str) -> Unauthenticated:
    return Unauthenticated(f"the {what} is refused: {reason}", challenge=f'{_CHALLENGE}, error="invalid_token"')
