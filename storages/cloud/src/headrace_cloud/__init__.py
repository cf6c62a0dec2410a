"""Model repositories in clouds: S3, Google Cloud Storage, Azure Storage, and what fsspec reads.

::

    headrace serve --model-repository=s3://bucket/models
    headrace serve --model-repository=s3://https://minio.example.com:9000/bucket/models

`CloudStorageOptions` has the flags. Credentials are Triton's environment variables and its credential file.
"""

from __future__ import annotations

from headrace import OptionGroup, Storage, hookimpl
from headrace_cloud.cloud_options import CloudStorageOptions
from headrace_cloud.cloud_storage import AzureStorage, CloudStorage, GoogleStorage, OtherStorage, S3Storage

__all__ = ["AzureStorage", "CloudStorage", "CloudStorageOptions", "GoogleStorage", "S3Storage"]


@hookimpl
def register_storages() -> list[type[Storage]]:
    return [S3Storage, GoogleStorage, AzureStorage, OtherStorage]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [CloudStorageOptions]
