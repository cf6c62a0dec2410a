"""URLs of model repositories, as Triton writes them (docs/spec/behaviours.md section 5.8)."""

from __future__ import annotations

import pytest

from headrace import ConfigError
from headrace_cloud.urls import Location, checked_endpoint, parse_url


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket", Location("s3", "bucket", "")),
        ("s3://bucket/models/all", Location("s3", "bucket", "models/all")),
        ("S3://bucket/models/", Location("s3", "bucket", "models")),
        ("s3:///bucket//models/", Location("s3", "bucket", "models")),
        ("s3://minio:9000/bucket/models", Location("s3", "bucket", "models", "http://minio:9000")),
        ("s3://10.1.2.3:9000/bucket", Location("s3", "bucket", "", "http://10.1.2.3:9000")),
        ("s3://http://minio:9000/bucket", Location("s3", "bucket", "", "http://minio:9000")),
        ("s3://https://s3.example.com/bucket/a/b", Location("s3", "bucket", "a/b", "https://s3.example.com")),
        ("s3://https://s3.example.com:443//bucket/a", Location("s3", "bucket", "a", "https://s3.example.com:443")),
        ("gs://bucket/models", Location("gs", "bucket", "models")),
        ("as://account/container/models", Location("as", "container", "models", account="account")),
        ("as://account.blob.core.windows.net/container", Location("as", "container", "", account="account")),
        (
            "as://http://127.0.0.1:10000/devstoreaccount1/container/models",
            Location("as", "container", "models", "http://127.0.0.1:10000/devstoreaccount1", "devstoreaccount1"),
        ),
    ],
)
def test_a_url_names_a_prefix_of_a_bucket(url: str, location: Location) -> None:
    assert parse_url(url) == location


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "names no bucket"),
        ("s3://minio:9000", "names no bucket"),
        ("s3://https://minio:9000/", "names no bucket"),
        ("gs://", "names no bucket"),
        ("gs://http://localhost:9023/bucket", "STORAGE_EMULATOR_HOST"),
        ("as://account", "names no container"),
        ("s3://bucket/a/../b", "'..' in its path"),
        ("s3://bucket/./b", "'.' in its path"),
        ("s3://bucket/a\\b", "in its path"),
        ("s3://bucket/a\nb", "in its path"),
        ("s3://bucket/a?versionId=3", "has a query"),
        ("as://account/container/a#b", "has a fragment"),
        ("s3://my bucket!/models", "names 'my bucket!', which cannot be a bucket, container or account"),
        ("as://account:1/container", "names 'account:1', which cannot be"),
    ],
)
def test_another_url_is_refused_with_the_rule(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_url(url)
    assert message in refusal.value.message


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:secret@host:9000/bucket", "credentials do not belong in a URL"),
        ("s3://https://key:secret@host/b", "credentials do not belong in a URL"),
        ("as://a:secret@b/c", "credentials do not belong in a URL"),
        ("as://account/container/a?sig=secret", "'as://account/container/a...' has a query"),
        ("gs://http://key:secret@host/b", "'gs://http://...' names a server"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_url(url)
    assert message in refusal.value.message
    assert "secret" not in refusal.value.message


@pytest.mark.parametrize(
    "endpoint", ["http://minio:9000", "https://s3.example.com/", "http://[::1]:9000", "http://127.0.0.1:1/account"]
)
def test_an_endpoint_is_the_url_of_a_server(endpoint: str) -> None:
    assert checked_endpoint(endpoint) == endpoint.rstrip("/")
    assert checked_endpoint(endpoint.replace("http", "HTTP")) == endpoint.rstrip("/")


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "minio:9000",
            "ftp://minio",
            "http://",
            "http://minio:99999",
            "http://minio:port",
            "http://::1",
            "http://[::1",
        ),
        *("http://mi nio", "http://minio/a?b", "http://minio\n", "http://minio/a#b", "ht!tp://minio", "http://minio:0"),
    ],
)
def test_an_invalid_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a server: expected https://host:port"):
        checked_endpoint(endpoint)


def test_a_key_is_below_the_prefix() -> None:
    assert Location("s3", "bucket", "models").key("m/1") == "models/m/1"
    assert Location("s3", "bucket", "").key("m/1") == "m/1"
