"""A server that speaks enough of S3 to list and to read, and that does what no emulator does: it fails."""

from __future__ import annotations

import hashlib
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TIME = "2026-11-26T00:00:00.000Z"


class FaultyS3:
    """``objects`` are the contents by key. ``requests`` are the requested paths.

    ``fault``, if set, may answer a request itself, and then returns True.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"s3://127.0.0.1:{port}/bucket/models"
        self.objects: dict[str, bytes] = {}
        self.listed_tag = "<ETag>{}</ETag>"
        self.requests: list[str] = []
        self.fault: Callable[[Handler], bool] | None = None
        #: Set at the end: a fault may wait for it.
        self.ending = threading.Event()

    def put(self, files: Mapping[str, bytes]) -> None:
        """Add files by their paths below the repository."""
        self.objects |= {f"models/{path}": content for path, content in files.items()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    s3: FaultyS3

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.s3.requests.append(self.path)
        if self.s3.fault is not None and self.s3.fault(self):
            return
        key = unquote(urlsplit(self.path).path).removeprefix("/bucket/")
        if "list-type" in self.path:
            self.answer(200, _listing(self.s3.objects, parse_qs(urlsplit(self.path).query), self.s3.listed_tag))
        elif (content := self.s3.objects.get(key)) is None:
            self.answer(404, error("NoSuchKey", "The specified key does not exist."))
        else:
            self.send_object(content)

    @property
    def is_listing(self) -> bool:
        return "list-type" in self.path

    def answer(self, status: int, body: str, **headers: str) -> bool:
        """Send an answer. Return True. The Content-Length may be false."""
        length = int(headers.pop("Content-Length", len(body)))
        self._head(status, length, headers)
        self.wfile.write(body.encode())
        return True

    def send_object(self, content: bytes, sent: int | None = None) -> None:
        """Send an object or its requested range; only ``sent`` bytes of it if given."""
        wanted = self.headers.get("Range")
        tag = {"ETag": etag(content), "Last-Modified": "Thu, 26 Nov 2026 00:00:00 GMT"}
        part = content
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last or len(content)) + 1]
            tag["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._head(206 if wanted else 200, len(part), tag)
        if self.command == "GET":
            self.wfile.write(part[:sent])
        if sent is not None:
            self.close_connection = True

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def error(code: str, message: str) -> str:
    return f"<Error><Code>{code}</Code><Message>{message}</Message><AWSAccessKeyId>user</AWSAccessKeyId></Error>"


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def _listing(objects: Mapping[str, bytes], query: Mapping[str, list[str]], listed_tag: str) -> str:
    (prefix,), is_flat = query.get("prefix", [""]), "delimiter" not in query
    lines = []
    for key, content in sorted(objects.items()):
        _, slash, _ = key[len(prefix) :].partition("/")
        if key.startswith(prefix) and (is_flat or not slash):
            lines.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{TIME}</LastModified>"
                f"{listed_tag.format(escape(etag(content)))}<Size>{len(content)}</Size></Contents>"
            )
    if not is_flat:
        below = {key[len(prefix) :].partition("/")[0] for key in objects if key.startswith(prefix)}
        lines += [f"<CommonPrefixes><Prefix>{escape(prefix + each)}/</Prefix></CommonPrefixes>" for each in below]
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(lines)}</ListBucketResult>"


@contextmanager
def faulty_s3(tls: ssl.SSLContext | None = None) -> Iterator[FaultyS3]:
    handler = type("OwnHandler", (Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.daemon_threads = True
        handler.s3 = s3 = FaultyS3(server.server_port)  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield s3
        finally:
            s3.ending.set()
            server.shutdown()
            thread.join()
