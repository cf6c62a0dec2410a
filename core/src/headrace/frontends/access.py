"""Access rules for every frontend: operations that need a key, and files that are sent with a load.

The files of a model are code that the server will run. By default, they may be sent from the machine itself, or with
the key of the restricted category ``model-repository``. A request through a proxy, or from a page in a browser, does
not count as from the machine, although its connection does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hmac import compare_digest
from ipaddress import IPv6Address, ip_address
from typing import TypeAlias

from headrace.config.option_parts import ModelFilesFrom, Restriction
from headrace.config.options import ServerOptions
from headrace.engine import AnyOperation, Caller, Interceptor
from headrace.errors import CallerError, Code, PermissionDenied, Unsupported

#: Returns a header, or an entry of metadata, by its name in lower case.
Header: TypeAlias = Callable[[str], "bytes | str | None"]

_NO_RULES: Mapping[str, Restriction] = {}
#: Headers of requests on behalf of others: the first four are added by proxies, the others by browsers.
_FOREIGN = ("forwarded", "via", "x-forwarded-for", "x-real-ip", "origin", "sec-fetch-site")


class RestrictedApis(Interceptor):
    """Refuses operations whose category needs a header with a secret value.

    For ``--http-restricted-api`` and ``--grpc-restricted-protocol``; docs/spec/behaviours.md sections 1.2 and 2.2. A
    refusal names the header and never its value, and takes the same time for every wrong value.
    """

    name = "restricted-apis"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._rules = {"http": options.http_restricted_api, "grpc": options.grpc_restricted_protocol}

    @property
    def enabled(self) -> bool:
        return any(self._rules.values())

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        rule = self._rules.get(caller.transport, _NO_RULES).get(operation.category)
        if rule is None:
            return
        header = caller.header(rule.header.lower())
        encoding = "latin-1" if caller.transport == "http" else "utf-8"
        if header is not None and compare_digest(header.encode(encoding, "replace"), rule.value.encode()):
            return
        text = f"restricted, expecting header '{rule.header}'"
        if caller.transport == "http":
            raise PermissionDenied(f"This API is {text}")
        raise CallerError(f"This protocol is {text}", Code.UNAVAILABLE)  # as Triton

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str:
        rule = self._rules.get(transport, _NO_RULES).get(operation.category)
        return "" if rule is None else f"callers with the header '{rule.header}'"


class ModelFilesRule:
    """Allows or refuses the model files in a load request of one frontend.

    ``has_key``: its loads are restricted, and already checked. ``restriction`` is the flag that restricts them.
    """

    def __init__(self, allowed: ModelFilesFrom, has_key: bool, restriction: str) -> None:
        self._allowed = allowed
        self._has_key = has_key
        self._restriction = restriction

    def check(self, parameters: Iterable[str], address: str, header: Header) -> None:
        """Raise `Unsupported` if the sender of a load may not send these ``parameters``.

        ``address`` is the other end of the connection; empty if unknown.
        """
        if not any(name.startswith("file:") for name in parameters) or self._allowed == "any":
            return
        if self._allowed == "none":
            raise Unsupported("files that come with a load are not taken: the server runs with --model-files-from=none")
        if self._has_key:
            return
        foreign = next((name for name in _FOREIGN if header(name) is not None), None)
        if is_loopback(address) and foreign is None:
            return
        where = address or "an unknown address"
        if foreign is not None:
            where += f" with the header '{foreign}', on behalf of another caller"
        raise Unsupported(
            f"files that come with a load are taken from loopback addresses only, and this load came from {where}. "
            f"Restrict model-repository by {self._restriction}, so that callers with the key may send files, "
            "or start the server with --model-files-from=any"
        )


def is_loopback(address: str) -> bool:
    """True if ``address``, IPv4 or IPv6 without a port, is a loopback address."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped  # how a socket for both families shows IPv4
    return ip.is_loopback


def host_of(peername: object) -> str:
    """Return the address in a socket's ``peername``; empty if it is not a network address."""
    return str(peername[0]) if isinstance(peername, tuple | list) and peername else ""
