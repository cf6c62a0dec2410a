"""Images that a message names by an address: fetched from hosts that a flag names, and from no others.

A caller names the address, so it may be that of this machine, of a database beside it, or of a cloud's metadata. Hosts
are compared with the flag before their names are looked up, and addresses before a connection is opened. Redirects are
not followed. docs/openai.md describes the flag.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import SplitResult, urlsplit

from headrace import one_line
from headrace_openai.openai_errors import BadMember

#: The most addresses of one request, bytes of one image and of all of a request, and seconds to fetch one.
MAX_ADDRESSES, MAX_IMAGE_BYTES, MAX_TOTAL_BYTES, FETCH_S = 16, 10 << 20, 32 << 20, 10.0
#: The most images that a server fetches at once.
_AT_ONCE = 16
_HEAD_BYTES = 64 << 10
_PORTS = {"http": 80, "https": 443}
_NOT_NAMED = "and --openai-image-hosts does not name it"
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
        named = (host, port) in self._names or ((host, 0) in self._names and port in _PORTS.values())
        if named or any(host.endswith(suffix) for suffix in self._suffixes):
            return named or port in _PORTS.values()
        address = _address(host)
        return address is not None and port in _PORTS.values() and self._has_network(address)

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


@dataclass(frozen=True, slots=True)
class _ImagePlace:
    """Where an image is: the part of the body that names it, and its address."""

    where: str
    url: SplitResult
    host: str
    port: int

    def refusal(self, why: str) -> BadMember:
        return BadMember(self.where, f"{self.where}: the image at '{one_line(self.url.geturl())[:200]}' {why}")


class ImageFetcher:
    """Replaces addresses of images by their content. Event loop only."""

    def __init__(self, hosts: ImageHosts) -> None:
        self._hosts, self._free = hosts, asyncio.Semaphore(_AT_ONCE)

    async def replace(self, messages: Any) -> bool:
        """Replace each ``http`` and ``https`` address in ``messages`` of a chat by a data URL, in place.

        Return True if there are any. Does nothing if no host is allowed: other code refuses the addresses. Raises
        `BadMember`.
        """
        if not self._hosts:
            return False
        places = [
            (image, f"messages[{row}].content[{column}].image_url.url")
            for row, message in enumerate(messages if type(messages) is list else ())
            for column, part in enumerate(_parts(message))
            if (image := _image(part)) is not None
        ]
        if len(places) > MAX_ADDRESSES:
            raise BadMember("messages", f"messages has {len(places)} addresses of images, the limit is {MAX_ADDRESSES}")
        total = 0
        for image, where in places:
            image["url"] = await self._fetch(self._place(where, image["url"]))
            total += len(image["url"]) * 3 // 4  # of base64
            if total > MAX_TOTAL_BYTES:
                raise BadMember(where, f"the images of messages have more than {MAX_TOTAL_BYTES} bytes together")
        return bool(places)

    def _place(self, where: str, text: str) -> _ImagePlace:
        try:
            url = urlsplit(text)
            host, port = (url.hostname or "").lower(), url.port or _PORTS[url.scheme]
        except ValueError as error:
            raise BadMember(where, f"{where} is no address: {one_line(str(error))[:100]}") from None
        place = _ImagePlace(where, url, host, port)
        if not text.isascii() or not text.isprintable() or " " in text or "@" in url.netloc:
            raise place.refusal("has characters that no address of an image has, or a password")
        if not self._hosts.allows(host, port):
            raise place.refusal(f"is not fetched: --openai-image-hosts does not name '{host}' with port {port}")
        return place

    async def _fetch(self, place: _ImagePlace) -> str:
        """Return the image at ``place`` as a data URL."""
        async with self._free:
            try:
                return await asyncio.wait_for(self._ask(place), FETCH_S)
            except (asyncio.TimeoutError, TimeoutError):
                raise place.refusal(f"did not arrive in {FETCH_S:g} s") from None
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                raise place.refusal(f"can not be fetched: {one_line(str(error))[:100]}") from None

    async def _ask(self, place: _ImagePlace) -> str:
        address = await self._find(place)
        context = _tls() if place.url.scheme == "https" else None
        name = place.host if context is not None else None
        reader, writer = await asyncio.open_connection(
            address, place.port, ssl=context, server_hostname=name, limit=_HEAD_BYTES
        )
        try:
            path = place.url._replace(scheme="", netloc="", fragment="").geturl() or "/"
            head = f"GET {path} HTTP/1.1\r\nHost: {place.url.netloc}\r\nAccept: image/*\r\nUser-Agent: headrace\r\n"
            writer.write(f"{head}Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii"))
            return await _read_answer(place, reader)
        finally:
            writer.transport.abort()

    async def _find(self, place: _ImagePlace) -> str:
        """Return the address of the host. Every address of the name must be allowed."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        for address in addresses:
            if not self._hosts.allows_address(ip_address(address.partition("%")[0])):
                raise place.refusal(f"is not fetched: its host is in a network that is not public, {_NOT_NAMED}")
        return addresses[0]


@cache
def _tls() -> ssl.SSLContext:
    """Return how servers are verified. Made once: it reads all certificates of the machine, in about 30 ms."""
    return ssl.create_default_context()


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if type(message) is dict else None
    return content if type(content) is list else ()


def _image(part: Any) -> dict[str, Any] | None:
    """Return the object of an image whose ``url`` is an address; None for all other parts."""
    image = part.get("image_url") if type(part) is dict else None
    url = image.get("url") if type(image) is dict else None
    return image if type(url) is str and url[:8].lower().startswith(("http://", "https://")) else None


async def _read_answer(place: _ImagePlace, reader: asyncio.StreamReader) -> str:
    status, headers = _read_head(await reader.readuntil(b"\r\n\r\n"))
    if 300 <= status < 400:
        raise place.refusal("is a redirect, which is not followed")
    if status != 200:
        raise place.refusal(f"is not there: status {status}")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith("image/") or not kind.isascii() or "," in kind:
        raise place.refusal(f"is no image: its Content-Type is '{one_line(kind)[:100]}'")
    content = await _read_body(place, reader, headers)
    return f"data:{kind};base64,{b64encode(content).decode()}"


def _read_head(head: bytes) -> tuple[int, Mapping[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if not words[0].startswith("HTTP/1.") or len(words) < 2:
        raise ValueError("no answer in HTTP/1.1")
    fields = [line.partition(":") for line in lines if line]
    return int(words[1]), {name.lower(): value.strip() for name, _, value in fields}


async def _read_body(place: _ImagePlace, reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        content = bytearray()
        while size := int((await reader.readline()).partition(b";")[0], 16):
            _check_size(place, len(content) + size)
            content += await reader.readexactly(size)
            await reader.readexactly(2)
        return bytes(content)
    if "content-length" in headers:
        size = int(headers["content-length"])
        _check_size(place, size)
        return await reader.readexactly(size)
    found = bytearray()
    while some := await reader.read(1 << 16):
        found += some
        _check_size(place, len(found))
    return bytes(found)


def _check_size(place: _ImagePlace, size: int) -> None:
    if not 0 <= size <= MAX_IMAGE_BYTES:
        raise place.refusal(f"has {size} bytes, the limit is {MAX_IMAGE_BYTES}")
