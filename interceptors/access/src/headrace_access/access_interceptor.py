"""The interceptor ``access``: authenticates each caller as a principal, and authorizes its operations.

A caller sends a key, a token or a certificate. A refusal does not depend on the existence of the model, so it does not
reveal which models exist.
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
from headrace_access.access_rules import MAX_CHARACTERS, Verified
from headrace_access.key_options import AccessOptions
from headrace_access.permit_cache import Credential, PermitCache

if TYPE_CHECKING:
    from headrace_access.key_file_watcher import KeyFileWatcher

_CHALLENGE = 'Bearer realm="headrace"'
_INSIDE = ("program", "model")
_NOTHING: Mapping[str, str] = {}


class AccessControl(Interceptor):
    """Refuses callers without a valid key, token or certificate, and operations that no rule allows."""

    name: ClassVar[str] = "access"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._access = options.group(AccessOptions)
        #: True for an operation that needs no key.
        self._is_open: dict[str, bool] = {}
        self._watcher: KeyFileWatcher | None = None
        if self._access.keys:
            from headrace_access.key_file_watcher import KeyFileWatcher

            self._watcher = KeyFileWatcher(Path(self._access.keys))
            self.permits = self._permits = PermitCache(self._watcher.check)
            self._watcher.on_change = self._permits.clear

    @property
    def enabled(self) -> bool:
        return self._watcher is not None

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str | None:
        if self._watcher is None or transport in _INSIDE:
            return None
        return (
            "" if self._is_public(operation) else self._watcher.file.allowed_callers(str(operation), operation.category)
        )

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | Awaitable[Watch | None] | None:
        if caller.transport in _INSIDE or self._is_public(operation):
            return None
        credential = caller.header("authorization")
        if operation is Operation.INFER and (permit_key := _permit_key(caller, credential)):
            principal = self._permits.get(permit_key, _NOTHING).get(model)
            if principal is not None and _is_valid(caller, permit_key, principal):
                caller.principal = principal
                return None
        found = self._authenticate(caller, credential)
        if isinstance(found, Verified):
            self._authorize(found, caller, operation, model)
            return None
        return self._wait(found, caller, operation, model)

    def _is_public(self, operation: AnyOperation) -> bool:
        is_open = self._is_open.get(operation)
        if is_open is None:
            is_open = self._is_open[operation] = self._access.is_open(str(operation), operation.category)
        return is_open

    async def _wait(
        self, found: Awaitable[Verified | str], caller: Caller, operation: AnyOperation, model: str
    ) -> Watch | None:
        self._authorize(_require_verified(await found), caller, operation, model)
        return None

    def _authenticate(self, caller: Caller, credential: str | None) -> Verified | Awaitable[Verified | str]:
        """Return the principal of the caller, and the end of its credential. Raises `Unauthenticated`."""
        assert self._watcher is not None
        reading = self._watcher.check()
        return self._identify(caller, credential) if reading is None else self._after_check(reading, caller, credential)

    async def _after_check(self, reading: asyncio.Task[None], caller: Caller, credential: str | None) -> Verified | str:
        assert self._watcher is not None
        await self._watcher.checked(reading)
        found = self._identify(caller, credential)
        return found if isinstance(found, Verified) else await found

    def _identify(self, caller: Caller, credential: str | None) -> Verified | Awaitable[Verified | str]:
        assert self._watcher is not None
        file = self._watcher.file
        key = _key_in(caller, credential)
        if not key:
            if file.accepts_certificates and caller.certificate is not None and caller.principal:
                return Verified(file.holder(caller.principal, caller.certificate), 0)
            what = "a key or a token" if file.issuers else "a key"
            raise Unauthenticated(
                f"this server needs {what}, in the header 'Authorization: Bearer <key>'", challenge=_CHALLENGE
            )
        if len(key) > MAX_CHARACTERS:
            raise _refused("key", "it is too long")
        if not file.issuers or key.startswith("hr_"):
            found = file.find(key)
            if isinstance(found, str):
                raise _refused("key", found)
            return Verified(found.principal, found.until_s)
        token = self._watcher.tokens.find(key)
        return token if isinstance(token, Awaitable) else _require_verified(token)

    def _authorize(self, found: Verified, caller: Caller, operation: AnyOperation, model: str) -> None:
        """Set the principal of the caller. Raises `PermissionDenied` if no rule allows the operation."""
        principal = found.principal
        caller.principal = principal.name
        has_parts = getattr(operation, "has_parts", False)
        if not principal.may(str(operation), operation.category, model, has_parts):
            on = f" on model '{one_line(model)}'" if model else ""
            raise PermissionDenied(f"'{principal.name}' may not do '{operation}'{on}")
        if operation is not Operation.INFER:
            return
        permit_key = _permit_key(caller, caller.header("authorization"))
        if found.until_s:
            if permit_key and not isinstance(permit_key, int):
                self._permits.add(permit_key, model, principal.name, found.until_s)
        # Not if there is a header beside the certificate, for example a password for a proxy.
        elif (
            isinstance(permit_key, int)
            and caller.certificate is not None
            and _matches(caller.certificate, principal.name)
        ):
            self._permits.add_certificate(caller.certificate, model, principal.name)


def _key_in(caller: Caller, credential: str | None) -> str:
    """Return the key in ``Authorization: Bearer`` or in ``X-Api-Key``; empty without one.

    Raises `Unauthenticated` if one of these headers is repeated: a proxy may have checked another one.
    """
    name = "x-api-key" if credential is None else "authorization"
    if caller.transport == "grpc" and _has_several(
        caller, name
    ):  # over HTTP, they are joined by commas, which no key has
        raise _refused("key", f"there are several headers '{name}'")
    if credential is None:
        return (caller.header(name) or "").strip()
    scheme, _, key = credential.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _permit_key(caller: Caller, credential: str | None) -> Credential | int | None:
    """Return the key of the credential in the cache; None or empty without a credential."""
    if credential is not None:
        return credential
    key = caller.header("x-api-key")
    if key is not None:
        return (PermitCache.header, key) if key else None
    return None if caller.certificate is None else id(caller.certificate)


def _is_valid(caller: Caller, permit_key: Credential | int, principal: str) -> bool:
    """True if the cached permit holds: no repeated header, no other principal set by another interceptor."""
    if isinstance(permit_key, int):
        return caller.principal == principal
    name = "x-api-key" if isinstance(permit_key, tuple) else "authorization"
    return caller.transport != "grpc" or not _has_several(caller, name)


def _matches(certificate: Mapping[str, Any], principal: str) -> bool:
    """True if ``principal`` is that of the certificate. Another interceptor may have set another one."""
    return Caller("", certificate=certificate).principal == principal


def _has_several(caller: Caller, header: str) -> bool:
    return [name for name, _ in caller.headers()].count(header) > 1


def _require_verified(token: Verified | str) -> Verified:
    if isinstance(token, str):
        raise _refused("token", token)
    return token


def _refused(what: str, reason: str) -> Unauthenticated:
    return Unauthenticated(f"the {what} is refused: {reason}", challenge=f'{_CHALLENGE}, error="invalid_token"')
