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
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from headrace import one_line
from headrace_openai.image_hosts import PORTS, ImageHosts
from headrace_openai.openai_errors import BadMember

#: The most addresses of one request, bytes of one image and of all of a request, and seconds to fetch one.
MAX_ADDRESSES, MAX_IMAGE_BYTES, MAX_TOTAL_BYTES, FETCH_S = 16, 10 << 20, 32 << 20, 10.0
#: The most images that a server fetches at once.
_AT_ONCE = 16
_HEAD_BYTES = 64 << 10
_NOT_NAMED = "and --openai-image-hosts does not name it"


@dataclass(frozen=True, slots=True)
class _ImagePlace:
    """The address of an image, and ``where`` the body names it."""

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
            host, port = (url.hostname or "").lower(), url.port or PORTS[url.scheme]
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
