"""Other schemes of fsspec: only allowed ones, and no redirects."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from headrace import ConfigError, LoadError, Storage
from headrace_cloud import fsspec_store, register_storages
from headrace_cloud.cloud_storage import schemes
from headrace_cloud.stored_objects import PART_BYTES
from tests.storages.cloud.faulty_s3 import Handler, faulty_s3
from tests.storages.cloud.opened_storage import new_directories, open_storage

FILES = {"m/config.pbtxt": b"config", "m/1/weights": b"0123456789", "n/1/weights": b"n"}


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server with the files of a repository: its URL, and the directory."""
    folder = tmp_path / "site"
    for path, content in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


def test_other_servers_than_the_three_clouds_must_be_allowed() -> None:
    assert [each.name for each in register_storages()] == ["s3", "gs", "as", "*"]
    assert {"hf", "http", "https", "memory"} <= schemes()
    for scheme in schemes():
        with pytest.raises(ConfigError, match=f"'{scheme}://' is not read unless --cloud-schemes={scheme} allows it"):
            open_storage(f"{scheme}://host/models", schemes="another")
    for scheme in ("local", "zip", "data", "simplecache", "reference", "nothing"):
        with pytest.raises(ConfigError, match=f"no plugin provides storage '{scheme}', and fsspec does not read it"):
            open_storage(f"{scheme}://host/models", schemes=scheme)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://x::file:///etc", "'::', by which fsspec opens one URL through another"),
        ("memory://user:secret@host/models", "has a user or a password, which do not belong there"),
        ("http://secret@host/models", "has a user or a password, which do not belong there"),
        ("http://host/models?token=secret", "has a query or a fragment; it is a folder"),
        ("nothing://user:secret@host/models", "no plugin provides storage 'nothing'"),
    ],
)
def test_a_url_with_credentials_or_queries_is_refused_without_repeating_them(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        open_storage(url, schemes="http, MEMORY")
    assert message in refusal.value.message
    assert "secret" not in refusal.value.message


def test_memory_is_read_and_followed(tmp_path: Path) -> None:
    root = f"/{uuid4().hex}"
    files = fsspec.filesystem("memory")
    large = os.urandom(PART_BYTES + 1)
    for path, content in {**FILES, "n/1/large": large}.items():
        files.pipe(f"{root}/{path}", content)
    storage = open_storage(f"memory:/{root}", schemes="memory", cache_directory=str(tmp_path / "cache"))
    assert sorted(storage.models()) == ["m", "n"]
    before = dict(storage.fingerprint("m"))
    assert set(before) == {"config.pbtxt", "1/weights"}
    fetched = storage.fetch("n", ["1/large", "1/weights"], new_directories(tmp_path / "n"))
    assert (fetched / "1/large").read_bytes() == large
    files.pipe(f"{root}/m/1/weights", b"9876543210")
    assert dict(storage.fingerprint("m")) != before
    files.rm(f"{root}/m", recursive=True)
    assert dict(storage.fingerprint("m")) == {}
    assert list(storage.models()) == ["n"]


def test_a_web_server_is_read_and_followed(site: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = site
    (folder / "n/1/large").write_bytes(os.urandom(2 * PART_BYTES + 1))  # this server does not send parts
    (folder / "n/1/50 %").write_bytes(b"half")
    storage = open_storage(url, schemes="http", cache_directory=str(tmp_path / "cache"), timeout_s=5)
    assert sorted(storage.models()) == ["m", "n"]
    before = dict(storage.fingerprint("m"))
    assert set(before) == {"config.pbtxt", "1/weights"}
    fetched = storage.fetch("n", ["1/large", "1/50 %"], new_directories(tmp_path / "n"))
    assert (fetched / "1/large").read_bytes() == (folder / "n/1/large").read_bytes()
    assert (fetched / "1/50 %").read_bytes() == b"half"
    (folder / "m/1/weights").write_bytes(b"9876543210")
    os.utime(folder / "m/1/weights", (1, 1))
    assert dict(storage.fingerprint("m")) != before
    with pytest.raises(LoadError, match="does not exist"):
        open_storage(f"{url}/nowhere", schemes="http", cache_directory=str(tmp_path / "cache")).models()


def test_an_endless_web_server_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "MAX_FOLDERS", 20)
    with faulty_s3() as server:
        page = '<a href="x/">x</a>'
        server.fault = lambda request: request.answer(200, page, **{"Content-Type": "text/html"})
        url = f"http://127.0.0.1:{server.port}/models"
        storage = open_storage(url, schemes="http", cache_directory=str(tmp_path / "cache"), timeout_s=5)
        with pytest.raises(LoadError, match="has more than 20 folders"):
            storage.models()


PAGES = {
    "/models/": '<a href="?C=M;O=A">Last modified</a><a href="/">Parent Directory</a><a href="m/">m/</a>',
    "/models/m/": '<a href="?C=M;O=A">Last modified</a><a href="/models/">Parent Directory</a><a href="1/">1/</a>',
    "/models/m/1/": '<a href="?C=M;O=A">Last modified</a><a href="w">w</a>',
}


class Apache:
    """Answers with pages as Apache writes them, which have no length. ``send`` answers a request for the file."""

    def __init__(self) -> None:
        self.size = 10
        self.send: Callable[[Handler], bool] = lambda request: request.answer(200, "0123456789")

    def __call__(self, request: Handler) -> bool:
        page = PAGES.get(request.path)
        if page is not None:
            request.close_connection = True
            request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + page.encode())
            return True
        if request.command == "HEAD":
            return request.answer(200, "", **{"Content-Length": str(self.size)})
        return self.send(request)


@pytest.fixture
def apache(tmp_path: Path) -> Iterator[tuple[Apache, Storage]]:
    """A web server, and the repository that it has."""
    with faulty_s3() as server:
        server.fault = found = Apache()
        url = f"http://127.0.0.1:{server.port}/models"
        yield found, open_storage(url, schemes="http", cache_directory=str(tmp_path / "cache"), timeout_s=5)


def test_sort_links_of_a_page_are_no_files(apache: tuple[Apache, Storage]) -> None:
    _, storage = apache
    assert list(storage.models()) == ["m"]
    assert set(storage.fingerprint("m")) == {"1/w"}


@pytest.mark.parametrize("size", [10, 2 * PART_BYTES], ids=["whole", "parts"])
def test_no_more_is_read_than_needed(size: int, apache: tuple[Apache, Storage], tmp_path: Path) -> None:
    server, storage = apache
    server.size, sent = size, []

    def send(request: Handler) -> bool:
        request.close_connection = True
        with suppress(OSError):
            request.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for _ in range(256):
                request.wfile.write(bytes(1 << 20))
                sent.append(1 << 20)
        return True

    server.send = send
    with pytest.raises(LoadError, match="'m/1/w' has not the size of the listing"):
        storage.fetch("m", ["1/w"], new_directories(tmp_path / "m"))
    assert sum(sent) < 128 << 20


@pytest.mark.parametrize("size", [10, 2 * PART_BYTES], ids=["whole", "parts"])
def test_a_redirect_of_a_file_is_not_followed(size: int, apache: tuple[Apache, Storage], tmp_path: Path) -> None:
    server, storage = apache
    server.size = size
    with faulty_s3() as other:
        server.send = lambda request: request.answer(302, "", Location=f"http://127.0.0.1:{other.port}/w")
        with pytest.raises(LoadError, match="'m/1/w' has not the size of the listing"):
            storage.fetch("m", ["1/w"], new_directories(tmp_path / "m"))
        assert other.requests == []


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with faulty_s3() as other, faulty_s3() as server:
        server.fault = lambda request: request.answer(302, "", Location=f"http://127.0.0.1:{other.port}/m/1/weights")
        url = f"http://127.0.0.1:{server.port}/models"
        storage = open_storage(url, schemes="http", cache_directory=str(tmp_path / "cache"), timeout_s=5)
        assert list(storage.models()) == []
        assert server.requests
        assert other.requests == []


def test_a_missing_driver_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'oci://' cannot be read: Install ocifs"):
        open_storage("oci://bucket/models", schemes="oci", cache_directory=str(tmp_path / "cache"))
