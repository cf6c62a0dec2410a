"""What was decided for a credential: kept, so that the next inference passes by two look-ups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import time
from typing import Any, TypeAlias

#: Kept credentials, their characters, and the models of each.
_MOST_CREDENTIALS, _MOST_CHARACTERS, _MOST_MODELS = 4096, 4 << 20, 256
#: For so many characters counts a certificate.
_CERTIFICATE = 2048
#: Every second, those that have expired are removed, and changes of files are noticed.
TICK_S = 1.01
#: After so many ticks all are removed, so that a server without callers need not wake up.
_TICKS = 30
#: The value of ``authorization``, or the name and the value of another header.
Credential: TypeAlias = "str | tuple[bytes, str]"


class KeptPermits(dict["str | bytes | tuple[bytes, str | bytes] | int", dict[str, str]]):
    """Principals by credential and model, for `headrace.Interceptor.permits`. Event loop only.

    A credential is the value of the header ``authorization``, as text and as bytes; without that header, it is `header`
    and its value, and without both it is the certificate of the connection, by its ``id``. Only those that were found
    right are here. A look-up takes as long whatever the credential is, because the hashes of Python have a secret seed.
    """

    header = b"x-api-key"

    def __init__(self, each_second: Callable[[], object]) -> None:
        super().__init__()
        self._each_second = each_second
        self._until_s: dict[Credential, float] = {}
        #: Keeps the ids from being those of other certificates.
        self._certificates: list[Mapping[str, Any]] = []
        self._characters = self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, credential: Credential, model: str, principal: str, until_s: float) -> None:
        """Let inferences with ``model`` pass until ``until_s``, in seconds since 1970."""
        text = _text(credential)
        if not text.isascii():
            return
        models = self.get(credential)
        if models is None:
            self._make_room()
            models = self[credential] = self[_encoded(credential)] = {}
            self._characters += len(text)
        self._keep(models, model, principal)
        self._until_s[credential] = until_s

    def keep_certificate(self, certificate: Mapping[str, Any], model: str, principal: str) -> None:
        """Let inferences with ``model`` pass over the connection that has the object ``certificate``."""
        models = self.get(id(certificate))
        if models is None:
            self._make_room()
            models = self[id(certificate)] = {}
            self._certificates.append(certificate)
            self._characters += _CERTIFICATE
        self._keep(models, model, principal)

    def _make_room(self) -> None:
        if len(self) >= 2 * _MOST_CREDENTIALS or self._characters >= _MOST_CHARACTERS:
            self.clear()

    def _keep(self, models: dict[str, str], model: str, principal: str) -> None:
        if len(models) >= _MOST_MODELS:
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
    """Return the form over HTTP."""
    return credential.encode() if isinstance(credential, str) else (credential[0], credential[1].encode())
