"""Cached decisions by credential: the next inference needs two look-ups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import time
from typing import Any, TypeAlias

#: The maximum number of credentials, of their characters, and of models per credential.
_MAX_CREDENTIALS, _MAX_CHARACTERS, _MAX_MODELS = 4096, 4 << 20, 256
#: A certificate counts as this many characters.
_CERTIFICATE = 2048
#: The interval at which expired credentials are removed and files are checked.
TICK_S = 1.01
#: After this many ticks all are removed, so that an idle server does not wake up.
_TICKS = 30
#: The value of ``authorization``, or the name and the value of another header.
Credential: TypeAlias = "str | tuple[bytes, str]"


class PermitCache(dict["str | bytes | tuple[bytes, str | bytes] | int", dict[str, str]]):
    """Principals by credential and model, for `headrace.Interceptor.permits`. Event loop only.

    A credential is the value of the header ``authorization``, as text and as bytes; without that header, it is `header`
    and its value, and without both it is the certificate of the connection, by its ``id``. Only valid credentials are
    cached. The time of a look-up reveals nothing, because Python's hashes have a secret seed.
    """

    header = b"x-api-key"

    def __init__(self, each_second: Callable[[], object]) -> None:
        super().__init__()
        self._each_second = each_second
        self._until_s: dict[Credential, float] = {}
        #: Keeps the certificates alive, so that their ids are not reused.
        self._certificates: list[Mapping[str, Any]] = []
        self._characters = self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, credential: Credential, model: str, principal: str, until_s: float) -> None:
        """Permit inferences with ``model`` until ``until_s``, in seconds since 1970."""
        text = _text(credential)
        if not text.isascii():
            return
        models = self.get(credential)
        if models is None:
            self._make_room()
            models = self[credential] = self[_encoded(credential)] = {}
            self._characters += len(text)
        self._add(models, model, principal)
        self._until_s[credential] = until_s

    def add_certificate(self, certificate: Mapping[str, Any], model: str, principal: str) -> None:
        """Permit inferences with ``model`` over the connection with the object ``certificate``."""
        models = self.get(id(certificate))
        if models is None:
            self._make_room()
            models = self[id(certificate)] = {}
            self._certificates.append(certificate)
            self._characters += _CERTIFICATE
        self._add(models, model, principal)

    def _make_room(self) -> None:
        if len(self) >= 2 * _MAX_CREDENTIALS or self._characters >= _MAX_CHARACTERS:
            self.clear()

    def _add(self, models: dict[str, str], model: str, principal: str) -> None:
        if len(models) >= _MAX_MODELS:
            models.clear()
        models[model] = principal
        if self._timer is None:
            self._ticks = 0
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def clear(self) -> None:
        super().clear()
        self._until_s.clear()
        self._certificates.clear()
        self._characters = 0

    def _tick(self) -> None:
        self._timer, self._ticks = None, self._ticks + 1
        now_s = time()
        for credential in [each for each, until_s in self._until_s.items() if until_s <= now_s]:
            del self[credential], self[_encoded(credential)], self._until_s[credential]
            self._characters -= len(_text(credential))
        if self._ticks >= _TICKS:
            self.clear()
        if self:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._each_second()


def _text(credential: Credential) -> str:
    return credential if isinstance(credential, str) else credential[1]


def _encoded(credential: Credential) -> bytes | tuple[bytes, bytes]:
    """Return the credential as bytes, as HTTP hosts look it up."""
    return credential.encode() if isinstance(credential, str) else (credential[0], credential[1].encode())
