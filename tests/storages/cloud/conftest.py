"""Real servers of each cloud's protocol, on this machine; one of each per process of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import pytest

_MOTO = "import sys; from moto.server import main; main(sys.argv[1:])"
#: Variables by which this machine could lend its own credentials to a test.
_FOREIGN = ("AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_", "STORAGE_", "TRITON_")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No variable of this machine, no file of its user, and no service of its cloud is asked."""
    for name in os.environ:
        if name.startswith(_FOREIGN):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for cloud in ("AWS", "GCS", "AZURE"):
        monkeypatch.setenv(f"TRITON_{cloud}_MOUNT_DIRECTORY", str(tmp_path_factory.mktemp("cache")))


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
        wanted = {f"{prefix}/{name}/{path}": text for name, files in models.items() for path, text in files.items()}
        for key in self.keys(f"{prefix}/"):
            if key not in wanted:
                self.remove(key)
        for key, content in wanted.items():
            self.put(key, content)
        return self.url(prefix)


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may use the buckets of the tests."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "password")


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    """The port of moto's S3."""
    words = [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        yield _port_in(process.stderr)
        process.kill()


@pytest.fixture(scope="session")
def bucket(moto_port: int) -> Iterator[Bucket]:
    found = Bucket(moto_port)
    yield found
    found.client.close()


def _port_in(lines: Any) -> int:
    """Return the port in the first line that has the address of the server."""
    for line in lines:
        _, found, rest = line.partition("http://127.0.0.1:")
        if found:
            return int(rest.split("/")[0].split()[0])
    raise AssertionError("the server has ended")
