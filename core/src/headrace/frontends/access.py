"""Who may do what: calls that need a key, and files that come with a load. Decided here for every frontend.

The files of a model are code, which the server will run. By default whoever reaches it from the machine itself may
send them, or has brought the key of the restricted category ``model-repository``. What a proxy passes on, or a page in
a browser asks for, does not come from the machine, although its connection does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hmac import compare_digest
from ipaddress import IPv6Address, ip_address
from typing import TypeAlias

from headrace.config.options import ModelFilesFrom, Restriction
from headrace.errors import Unsupported

#: Looks up a header or an entry of metadata by its name in lower case.
Header: TypeAlias = Callable[[str], "bytes | str | None"]

#: Headers of requests that somebody else has caused: proxies put in the first four, browsers the others.
_FOREIGN = ("forwarded", "via", "x-forwarded-for", "x-real-ip", "origin", "sec-fetch-site")


class Restrictions:
    """Categories of calls that need a header with a secret value (docs/spec/behaviours.md sections 1.2 and 2.2).

    What a refusal looks like is the transport's affair.
    """

    def __init__(self, rules: Mapping[str, Restriction], noun: str = "API") -> None:
        """``noun`` is what the refusal calls the thing that is restricted."""
        self._noun = noun
        self._rules = {
            category: (rule.header.lower(), rule.value.encode(), rule.header) for category, rule in rules.items()
        }

    def __bool__(self) -> bool:
        """Whether anything is restricted."""
        return bool(self._rules)

    def covers(self, category: str) -> bool:
        """Whether calls of ``category`` need a key at all."""
        return category in self._rules

    def refusal(self, category: str, header: Header) -> str | None:
        """Why a call of ``category`` is refused, or None. ``header`` looks up a lower-case name.

        The answer names the header and never its value, and takes the same time for every wrong one.
        """
        rule = self._rules.get(category)
        if rule is None:
            return None
        name, expected, shown = rule
        given = header(name)
        if given is not None and compare_digest(given.encode() if isinstance(given, str) else given, expected):
            return None
        return f"This {self._noun} is restricted, expecting header '{shown}'"


class Uploads:
    """Who may send files along with a load to one frontend. ``has_key`` says that its loads are restricted, and
    checked already; ``restriction`` is the flag that would restrict them."""

    def __init__(self, allowed: ModelFilesFrom, has_key: bool, restriction: str) -> None:
        self._allowed = allowed
        self._has_key = has_key
        self._restriction = restriction

    def check(self, parameters: Iterable[str], address: str, header: Header) -> None:
        """Raise `Unsupported` if the sender of a load may not bring these ``parameters`` along.

        ``address`` is the connection's other end, empty where that is not known.
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
            where += f" with the header '{foreign}', on behalf of somebody else"
        raise Unsupported(
            f"files that come with a load are taken from loopback addresses only, and this load came from {where}. "
            f"Restrict model-repository by {self._restriction}, which lets whoever has the key, or start the server "
            "with --model-files-from=any"
        )


def is_loopback(address: str) -> bool:
    """Whether ``address``, IPv4 or IPv6 without a port, is of the machine's own loopback interface."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped  # a socket for both families sees IPv4 so
    return found.is_loopback


def host_of(peername: object) -> str:
    """The address in a socket's ``peername``; empty for what is no network address."""
    return str(peername[0]) if isinstance(peername, tuple | list) and peername else ""
