"""Fetching of images: from real servers on this machine, and which addresses are never asked."""

from __future__ import annotations

import asyncio
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from headrace import SecurityReview
from headrace_openai import image_addresses
from headrace_openai.image_addresses import ImageFetcher
from headrace_openai.image_hosts import ImageHosts
from headrace_openai.openai_errors import BadMember

IMAGE = bytes(range(256)) * 300


class Answers(BaseHTTPRequestHandler):
    """Each path is an image server with a habit of its own."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        getattr(self, self.path.strip("/").partition("?")[0])()

    def head(self, status: int = 200, **fields: str) -> None:
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def image(self) -> None:
        self.head(content_type="image/png", content_length=str(len(IMAGE)))
        self.wfile.write(IMAGE)

    def chunked(self) -> None:
        self.head(content_type="image/png; q=1", transfer_encoding="chunked")
        for at in range(0, len(IMAGE), 50_000):
            some = IMAGE[at : at + 50_000]
            self.wfile.write(b"%x;x=1\r\n%b\r\n" % (len(some), some))
        self.wfile.write(b"0\r\n\r\n")

    def closed(self) -> None:
        self.head(content_type="image/jpeg", connection="close")
        self.wfile.write(IMAGE)
        self.close_connection = True

    def redirect(self) -> None:
        self.head(302, location="http://127.0.0.1/", content_length="0")

    def missing(self) -> None:
        self.head(404, content_length="0")

    def page(self) -> None:
        self.head(content_type="text/html", content_length="0")

    def large(self) -> None:
        self.head(content_type="image/png", content_length=str(11 << 20))

    def largechunk(self) -> None:
        self.head(content_type="image/png", transfer_encoding="chunked")
        self.wfile.write(b"ffffffff\r\n")

    def cut(self) -> None:
        self.head(content_type="image/png", content_length="100")
        self.wfile.write(b"x")
        self.close_connection = True

    def slow(self) -> None:
        self.head(content_type="image/png", content_length="100")
        self.server.stopping.wait(10)  # type: ignore[attr-defined]
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None: ...


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.stopping = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.stopping.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(hosts: str, *urls: str) -> list[str]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": "what is this?"})
    asyncio.run(ImageFetcher(ImageHosts(hosts)).replace([{"role": "user", "content": parts}, {"role": "user"}, 3]))
    return [part["image_url"]["url"] for part in parts[:-1]]


def test_an_address_becomes_its_image(port: int) -> None:
    content = b64encode(IMAGE).decode()
    urls = [f"http://127.0.0.1:{port}/{path}" for path in ("image?a=1#x", "chunked", "closed")]
    found = fetch(f"127.0.0.1:{port}", *urls, "data:image/png;base64,AA==")
    kinds = ("png", "png", "jpeg")
    assert found == [*[f"data:image/{kind};base64,{content}" for kind in kinds], "data:image/png;base64,AA=="]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("redirect", "is a redirect, which is not followed"),
        ("missing", "status 404"),
        ("page", "its Content-Type is 'text/html'"),
        ("large", "has 11534336 bytes, the limit is 10485760"),
        ("largechunk", "has 4294967295 bytes, the limit is 10485760"),
        ("cut", "can not be fetched"),
        ("slow", "did not arrive in 0.2 s"),
        ("nothing", "can not be fetched"),
    ],
)
def test_what_is_no_image_is_refused(port: int, path: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_addresses, "FETCH_S", 0.2)
    with pytest.raises(BadMember, match=why) as raised:
        fetch(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/{path}")
    assert raised.value.param == "messages[0].content[0].image_url.url"


def test_a_name_that_stands_for_this_machine_is_not_asked(port: int) -> None:
    with pytest.raises(BadMember, match="a network that is not public"):
        fetch(f"localhost:{port}", f"http://localhost:{port}/image")
    assert fetch(f"localhost:{port},127.0.0.0/8,::1/128", f"http://localhost:{port}/image")[0].startswith("data:image")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/image",
        "http://images.example.evil.com/image",
        "http://images.example:8080/image",
        "http://images.example@127.0.0.1:{port}/image",
        "http://user:pass@images.example/image",
        "http://images.example/a b",
        "http://images.example/\r\nX: 1",
        "http://[::1/image",
        "http://:80/image",
        "http://images.example:99999/image",
        "HTTP://169.254.169.254/latest/meta-data",
        "http://0x7f000001/image",
        "http://example/image",
    ],
)
def test_a_host_that_the_flag_does_not_name_is_not_asked(port: int, url: str) -> None:
    with pytest.raises(BadMember, match=r"does not name '|has characters|is no address"):
        fetch("images.example,*.pictures.example", url.replace("{port}", str(port)))


def test_without_the_flag_nothing_is_asked() -> None:
    assert fetch("", "http://127.0.0.1/image") == ["http://127.0.0.1/image"]  # which other code refuses


def test_the_images_of_a_request_have_a_limit_together(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_addresses, "MAX_TOTAL_BYTES", 2 * len(IMAGE))
    with pytest.raises(BadMember, match="more than 153600 bytes together"):
        fetch(f"127.0.0.1:{port}", *[f"http://127.0.0.1:{port}/image"] * 3)


def test_a_request_has_few_addresses(port: int) -> None:
    with pytest.raises(BadMember, match="17 addresses of images, the limit is 16"):
        fetch(f"127.0.0.1:{port}", *[f"http://127.0.0.1:{port}/image"] * 17)


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True), ("10.1.2.3", False),
        ("127.0.0.1", False), ("0.0.0.0", False), ("169.254.169.254", False), ("192.168.0.1", False),
        ("100.64.0.1", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False), ("::", False),
        ("fe80::1", False), ("fd00::1", False), ("fec0::1", False), ("ff02::1", False), ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("::127.0.0.1", False),
        ("10.9.0.1", True),
    ],
)  # fmt: skip
def test_which_addresses_a_name_may_stand_for(address: str, is_allowed: bool) -> None:
    assert ImageHosts("a.example,10.9.0.0/16").allows_address(ip_address(address)) is is_allowed


def test_the_certificates_of_the_machine_are_read_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ssl.SSLContext] = []

    def make() -> ssl.SSLContext:
        made.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", make)
    image_addresses._tls.cache_clear()
    for _ in range(2):
        with pytest.raises(BadMember, match="can not be fetched"):
            fetch(f"127.0.0.1:{port}", f"https://127.0.0.1:{port}/image")
    image_addresses._tls.cache_clear()
    assert len(made) == 1


def test_a_flag_names_hosts_with_all_their_forms() -> None:
    hosts = ImageHosts("A.example, b.example:8080,*.c.example,10.9.0.0/16,[::1]:9")
    assert [hosts.allows(*each) for each in (("a.example", 443), ("a.example", 80), ("b.example", 8080))] == [True] * 3
    assert [hosts.allows(*each) for each in (("x.c.example", 443), ("10.9.1.1", 80), ("::1", 9))] == [True] * 3
    assert [hosts.allows(*each) for each in (("a.example", 22), ("b.example", 443), ("c.example", 443))] == [False] * 3
    assert [hosts.allows(*each) for each in (("xc.example", 443), ("10.9.1.1", 22), ("x.c.example", 22))] == [False] * 3
    assert not ImageHosts(" , ")
    for wrong in ("http://a.example", "a.example/x", "u@a.example", "a.example:x", ":80"):
        with pytest.raises(ValueError, match=r".+"):
            ImageHosts(wrong)


@pytest.mark.parametrize(
    ("hosts", "wide"),
    [
        ("images.example.com,*.cdn.example.com,10.0.0.5,93.184.216.0/24,2606:2800::/32", []),
        ("10.0.0.0/8", ["10.0.0.0/8"]),
        ("127.0.0.0/30,fd00::/8,*.com", ["127.0.0.0/30", "fd00::/8", "*.com"]),
        ("0.0.0.0/0,::/0,128.0.0.0/1", ["0.0.0.0/0", "::/0", "128.0.0.0/1"]),
    ],
)
def test_a_review_names_hosts_that_reach_inner_networks(tmp_path: Path, hosts: str, wide: list[str]) -> None:
    """``headrace check --security``, and the profile ``public``, by the options of the flag."""
    review = SecurityReview.of_command_line([f"--model-repository={tmp_path}", f"--openai-image-hosts={hosts}"])
    lines = [line for line in review.exposures() if line.where == "--openai-image-hosts"]
    assert [line.what for line in lines] == [f"images from {each}, at addresses in messages" for each in wide]
    assert all(line.is_open and line.flags == ("--openai-image-hosts",) for line in lines)
