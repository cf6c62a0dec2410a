"""What else fsspec reads: only what is allowed, and no redirects."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from headrace import ConfigError, LoadError
from headrace_cloud import fsspec_store, register_storages
from headrace_cloud.cloud_storage import schemes
from headrace_cloud.stored_objects import PART_BYTES
from tests.storages.cloud.faulty_s3 import faulty_s3
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


def test_nothing_but_the_three_clouds_is_read_unless_it_is_allowed() -> None:
    assert [each.name for each in register_storages()] == ["s3", "gs", "as", "*"]
    assert {"hf", "http", "https", "memory"} <= schemes()
    for scheme in schemes():
        with pytest.raises(ConfigError, match=f"'{scheme}://' is not read unless --cloud-schemes={scheme} allows it"):
            open_storage(f"{scheme}://host/models", schemes="another")
    for scheme in ("local", "zip", "data", "simplecache", "reference", "nothing"):
        with pytest.raises(ConfigError, match=f"no plugin provides storage '{scheme}', and fsspec does not read it"):
            open_storage(f"{scheme}://host/models", schemes=scheme)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("memory://x::file:///etc", "'::', by which fsspec opens one URL through another"),
        ("http://user:secret@host/models", "has a password, which does not belong there"),
    ],
)
def test_a_url_that_is_more_than_one_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        open_storage(url, schemes="http, MEMORY")
    assert told in refusal.value.message
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
    (folder / "n/1/large").write_bytes(os.urandom(PART_BYTES + 1))  # this server does not send parts
    storage = open_storage(url, schemes="http", cache_directory=str(tmp_path / "cache"), timeout_s=5)
    assert sorted(storage.models()) == ["m", "n"]
    before = dict(storage.fingerprint("m"))
    assert set(before) == {"config.pbtxt", "1/weights"}
    fetched = storage.fetch("n", ["1/large"], new_directories(tmp_path / "n"))
    assert (fetched / "1/large").read_bytes() == (folder / "n/1/large").read_bytes()
    (folder / "m/1/weights").write_bytes(b"9876543210")
    os.utime(folder / "m/1/weights", (1, 1))
    assert dict(storage.fingerprint("m")) != before
    with pytest.raises(LoadError, match="does not exist"):
        open_storage(f"{url}/nowhere", schemes="http", cache_directory=str(tmp_path / "cache")).models()


def test_a_web_server_without_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "MOST_FOLDERS", 20)
    with faulty_s3() as server:
        page = '<a href="x/">x</a>'
        server.fault = lambda request: request.answer(200, page, **{"Content-Type": "text/html"})
        url = f"http://127.0.0.1:{server.port}/models"
        storage = open_storage(url, schemes="http", cache_directory=str(tmp_path / "cache"), timeout_s=5)
        with pytest.raises(LoadError, match="has more than 20 folders"):
            storage.models()


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with faulty_s3() as other, faulty_s3() as server:
        server.fault = lambda request: request.answer(302, "", Location=f"http://127.0.0.1:{other.port}/m/1/weights")
        url = f"http://127.0.0.1:{server.port}/models"
        storage = open_storage(url, schemes="http", cache_directory=str(tmp_path / "cache"), timeout_s=5)
        assert list(storage.models()) == []
        assert server.requests
        assert other.requests == []


def test_a_driver_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'oci://' cannot be read: Install ocifs"):
        open_storage("oci://bucket/models", schemes="oci", cache_directory=str(tmp_path / "cache"))
