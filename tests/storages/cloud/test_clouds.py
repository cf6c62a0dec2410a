"""A repository in each cloud, through the storage kit. The servers are real and the clients that write are others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import pytest

from headrace_testing import StorageConformance
from tests.storages.cloud.conftest import AZURE_KEY, Container, GoogleBucket, RcloneBucket


@pytest.mark.usefixtures("s3_keys")
class TestRclone(StorageConformance):
    plugin, storage = "headrace_cloud", "s3"

    @pytest.fixture(autouse=True)
    def place(self, rclone_bucket: RcloneBucket) -> None:
        self.bucket, self.prefix = rclone_bucket, f"models/{uuid4().hex}"

    def store(self, models: Mapping[str, Mapping[str, bytes]]) -> str:
        return self.bucket.store(self.prefix, models)

    def test_a_large_file_is_read_without_parts(self, tmp_path: Path) -> None:
        content = os.urandom(20 << 20)
        storage = self.open({"m": {"1/weights": content}})
        fetched = storage.fetch("m", ["1/weights"], lambda: tmp_path)
        assert (fetched / "1/weights").read_bytes() == content


class TestGoogle(StorageConformance):
    plugin, storage = "headrace_cloud", "gs"

    @pytest.fixture(autouse=True)
    def place(self, google_bucket: GoogleBucket, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bucket, self.prefix = google_bucket, f"models/{uuid4().hex}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_bucket.endpoint)

    def store(self, models: Mapping[str, Mapping[str, bytes]]) -> str:
        return self.bucket.store(self.prefix, models)


class TestAzure(StorageConformance):
    plugin, storage = "headrace_cloud", "as"

    @pytest.fixture(autouse=True)
    def place(self, container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
        self.container, self.prefix = container, f"models/{uuid4().hex}"
        monkeypatch.setenv("AZURE_STORAGE_KEY", AZURE_KEY)

    def store(self, models: Mapping[str, Mapping[str, bytes]]) -> str:
        return self.container.store(self.prefix, models)
