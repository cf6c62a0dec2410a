"""A repository in moto's S3, through the storage kit and through a server."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

import pytest

from headrace_testing import StorageConformance
from tests.storages.cloud.conftest import Bucket


@pytest.mark.usefixtures("s3_keys")
class TestS3(StorageConformance):
    plugin, storage = "headrace_cloud", "s3"

    @pytest.fixture(autouse=True)
    def place(self, bucket: Bucket) -> None:
        self.bucket, self.prefix = bucket, f"models/{uuid4().hex}"

    def store(self, models: Mapping[str, Mapping[str, bytes]]) -> str:
        return self.bucket.store(self.prefix, models)
