"""The hosts that images may be fetched from: names, addresses and networks, as a flag names them."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

#: The ports of the schemes that are fetched.
PORTS: Final = {"http": 80, "https": 443}
#: IPv6 networks whose addresses stand for IPv4 addresses, in their last 32 bits.
_EMBEDS = (ip_network("64:ff9b::/96"), ip_network("::/96"))


class ImageHosts:
    """The hosts that images may be fetched from, as a flag names them."""

    def __init__(self, text: str) -> None:
        """Read ``text``: names with or without a port, ``*.name``, addresses and networks, separated by commas.

        Raises `ValueError` for one that is none of these.
        """
        self._names: set[tuple[str, int]] = set()
        self._suffixes: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for each in filter(None, map(str.strip, text.lower().split(","))):
            self._add(each)

    def __bool__(self) -> bool:
        return bool(self._names or self._suffixes or self._networks)

    def _add(self, text: str) -> None:
        try:
            self._networks.append(ip_network(text))
            return
        except ValueError:
            pass
        parts = urlsplit(f"//{text}")
        if "/" in text or "@" in text or not parts.hostname:
            raise ValueError(f"'{text}' is no name of a host, address or network")
        host, port = parts.hostname, parts.port or 0  # a wrong port is a ValueError
        if host.startswith("*.") and not port:
            self._suffixes.add(host[1:])
            return
        self._names.add((host, port))
        if (address := _address(host)) is not None:
            self._networks.append(ip_network(address))

    def wide(self) -> list[str]:
        """Return the networks of several addresses that are not public, and domains like ``*.com``."""
        networks = [str(network) for network in self._networks if _has_inner(network)]
        return [*networks, *sorted(f"*{suffix}" for suffix in self._suffixes if suffix.count(".") == 1)]

    def allows(self, host: str, port: int) -> bool:
        """True if images may be fetched from ``host``. Without a port in the flag, it is that of the scheme."""
        named = (host, port) in self._names or ((host, 0) in self._names and port in PORTS.values())
        if named or any(host.endswith(suffix) for suffix in self._suffixes):
            return named or port in PORTS.values()
        address = _address(host)
        return address is not None and port in PORTS.values() and self._has_network(address)

    def allows_address(self, address: IPv4Address | IPv6Address) -> bool:
        """True if a name may stand for ``address``: it is public, or the flag names it or its network."""
        return self._has_network(address) or all(_is_public(each) for each in _meanings(address))

    def _has_network(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address.version == each.version and address in each for each in self._networks)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _meanings(address: IPv4Address | IPv6Address) -> Sequence[IPv4Address | IPv6Address]:
    """Return ``address``, and the IPv4 address that it stands for, if any."""
    if isinstance(address, IPv4Address):
        return [address]
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and any(address in network for network in _EMBEDS):
        inner = IPv4Address(int(address) & 0xFFFFFFFF)
    return [address] if inner is None else [inner] if address.ipv4_mapped else [address, inner]


def _has_inner(network: IPv4Network | IPv6Network) -> bool:
    ends = (network[0], network[-1])
    return network.num_addresses > 1 and (network.prefixlen < 8 or not all(map(_is_public, ends)))


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    is_site_local = isinstance(address, IPv6Address) and address.is_site_local  # fec0::/10, global for Python
    return (
        not is_site_local
        and address.is_global
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
    )
