"""A storage that refuses, fails, is slow, sends false or incomplete files: the error names it, and no files remain."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from headrace import ConfigError, HeadraceError, LoadError, Storage, Unavailable
from headrace_cloud import clouds, s3_credentials, store_clients
from headrace_cloud.stored_objects import PART_BYTES
from tests.storages.cloud.faulty_s3 import FaultyS3, Handler, error, etag, faulty_s3
from tests.storages.cloud.opened_storage import new_directories, open_storage

pytestmark = pytest.mark.usefixtures("s3_keys")
MODEL = {"m/config.pbtxt": b"config", "m/1/weights": b"0123456789"}


@pytest.fixture
def s3() -> Iterator[FaultyS3]:
    with faulty_s3() as found:
        found.put(MODEL)
        yield found


@pytest.fixture
def storage(s3: FaultyS3) -> Iterator[Storage]:
    found = open_storage(s3.url, timeout_s=60)  # no limit that a busy machine reaches
    yield found
    found.close()


def _error_message(s3: FaultyS3, call: Callable[[], object], kind: type[HeadraceError]) -> str:
    """Return the message of the error, without the end that all have."""
    with pytest.raises(HeadraceError) as caught:
        call()
    assert type(caught.value) is kind
    message, found, rest = caught.value.message.partition(" It was asked at ")
    assert found
    assert rest == (
        f"http://127.0.0.1:{s3.port} for bucket 'bucket', region us-east-1, with credentials from AWS_ACCESS_KEY_ID"
    )
    return message


@pytest.mark.parametrize(
    ("status", "code", "kind", "requests"),
    [
        (403, "AccessDenied", LoadError, 1),
        (404, "NoSuchBucket", LoadError, 1),
        (400, "AuthorizationHeaderMalformed", LoadError, 1),
        (500, "InternalError", Unavailable, 4),
        (503, "SlowDown", Unavailable, 4),
    ],
)
def test_a_refusal_has_the_text_of_the_server(
    status: int, code: str, kind: type[HeadraceError], requests: int, s3: FaultyS3, storage: Storage
) -> None:
    s3.fault = lambda request: request.answer(status, error(code, "Its words."))
    message = _error_message(s3, storage.models, kind)
    assert message == f"listing 'models' failed. The storage answered: {status} {code}: Its words."
    assert len(s3.requests) == requests  # permanent errors are not retried


def test_a_redirect_to_another_region_is_named(s3: FaultyS3, storage: Storage) -> None:
    s3.fault = lambda request: request.answer(301, error("PermanentRedirect", "Use the endpoint."))
    assert "set AWS_DEFAULT_REGION to its region" in _error_message(s3, storage.models, Unavailable)


def test_no_signature_follows_a_redirect_to_another_host(s3: FaultyS3, storage: Storage) -> None:
    seen = []
    with faulty_s3() as other:
        s3.fault = lambda request: request.answer(
            307, "", Location=f"http://127.0.0.1:{other.port}/elsewhere?list-type=2"
        )

        def note(request: Handler) -> bool:
            seen.append(request.headers.get("Authorization"))
            return request.answer(403, error("AccessDenied", "No."))

        other.fault = note
        _error_message(s3, storage.models, LoadError)
    assert seen == [None]


def test_an_unreachable_server_is_named(s3: FaultyS3) -> None:
    storage = open_storage("s3://127.0.0.1:1/bucket/models", timeout_s=0.5)
    with pytest.raises(Unavailable, match=r"it refuses connections\. It was asked at http://127\.0\.0\.1:1 for bucket"):
        storage.models()
    storage = open_storage("s3://nowhere.invalid:1/bucket/models", timeout_s=0.5)
    with pytest.raises(Unavailable, match=r"its name has no address\. It was asked at http://nowhere\.invalid:1"):
        storage.models()


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)


def test_a_refused_certificate_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_clients, "_RETRIES", 0)
    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl(tmp_path, *new, "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    _openssl(tmp_path, *new, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
    (tmp_path / "names").write_text("subjectAltName=DNS:localhost")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-out", "server.pem"]
    _openssl(tmp_path, "x509", "-req", "-in", "server.csr", *signed)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    authority = str(tmp_path / "ca.pem")
    with faulty_s3(tls) as s3, faulty_s3() as plain:
        s3.put(MODEL)
        assert list(open_storage(f"s3://https://localhost:{s3.port}/bucket/models", ca_file=authority).models()) == [
            "m"
        ]
        for place, file, why in (
            (f"localhost:{s3.port}", "", "its certificate is not trusted; --cloud-ca-file names more authorities"),
            (f"127.0.0.1:{s3.port}", authority, "its certificate is for another name"),
            (f"localhost:{plain.port}", authority, "it does not speak TLS"),
        ):
            storage = open_storage(f"s3://https://{place}/bucket/models", ca_file=file)
            with pytest.raises(Unavailable, match=rf"The storage failed: {why}\. It was asked at https://{place} for"):
                storage.models()


@pytest.mark.parametrize(
    ("content", "why"), [(None, "cannot be read: No such file"), (b"key", "has no certificate in PEM")]
)
def test_a_file_without_authorities_is_refused(content: bytes | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--cloud-ca-file: '{path}' {why}"):
        open_storage("s3://bucket/models", ca_file=str(path))


def test_a_slow_server_fails_within_twice_the_limit(s3: FaultyS3) -> None:
    s3.fault = lambda request: s3.ending.wait(30)
    with contextlib.closing(open_storage(s3.url, timeout_s=0.5)) as storage:
        message = _error_message(s3, storage.models, Unavailable)
    assert message == "listing 'models' failed. The storage failed: it has not answered within --cloud-timeout-s."
    assert len(s3.requests) <= 3


def test_a_closed_connection_is_reported(s3: FaultyS3, storage: Storage) -> None:
    def close(request: Handler) -> bool:
        request.close_connection = True
        return True

    s3.fault = close
    assert "it closed the connection" in _error_message(s3, storage.models, Unavailable)


def test_a_large_object_in_one_response_may_be_slow(
    s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clouds, "_LEAST_RATE", PART_BYTES / (2 - 30))  # other answers have 2 s
    content = os.urandom(PART_BYTES + 1)
    s3.put({"m/1/weights": content})
    steps = 8

    def send_slowly(request: Handler) -> bool:
        if request.is_listing:
            return False
        request.answer(200, "", **{"Content-Length": str(len(content)), "ETag": etag(content)})
        with suppress(OSError):  # the first requests are for ranges
            for step in range(steps):
                request.wfile.write(content[step * len(content) // steps : (step + 1) * len(content) // steps])
                s3.ending.wait(0.3)
        return True

    s3.fault = send_slowly
    found = open_storage(s3.url).fetch("m", ["1/weights"], new_directories(tmp_path))
    assert (found / "1/weights").read_bytes() == content


def test_a_response_with_another_tag_than_the_listing_is_refused(
    s3: FaultyS3, storage: Storage, tmp_path: Path
) -> None:
    with faulty_s3() as other:  # a server that is no storage
        other.fault = lambda request: request.answer(200, "INTERNAL!!")
        place = f"http://127.0.0.1:{other.port}/"
        s3.fault = lambda request: not request.is_listing and request.answer(307, "", Location=place)
        with pytest.raises(LoadError, match="'m/1/weights' has changed since it was listed"):
            storage.fetch("m", ["1/weights"], new_directories(tmp_path))
        assert other.requests


def test_half_a_file_is_completed_by_another_request(s3: FaultyS3, storage: Storage, tmp_path: Path) -> None:
    halves: list[Handler] = []

    def send_half_once(request: Handler) -> bool:
        if request.path.endswith("weights") and not halves:
            halves.append(request)
            request.send_object(MODEL["m/1/weights"], 5)
            return True
        return False

    s3.fault = send_half_once
    found = storage.fetch("m", ["1/weights"], new_directories(tmp_path))
    assert (found / "1/weights").read_bytes() == b"0123456789"
    assert halves


def test_an_incomplete_file_is_an_error_and_is_removed(s3: FaultyS3, storage: Storage, tmp_path: Path) -> None:
    def send_half(request: Handler) -> bool:
        if not request.is_listing:
            request.answer(200, "01234", **{"Content-Length": "10", "ETag": etag(MODEL["m/1/weights"])})
            request.close_connection = True
        return not request.is_listing

    s3.fault = send_half
    _error_message(s3, lambda: storage.fetch("m", ["1/weights"], new_directories(tmp_path)), Unavailable)
    for folder in (tmp_path, Path(os.environ["TRITON_AWS_MOUNT_DIRECTORY"])):
        assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_a_file_that_has_changed_since_the_listing_is_not_loaded(
    s3: FaultyS3, storage: Storage, tmp_path: Path
) -> None:
    assert storage.fingerprint("m")
    s3.put({"m/1/weights": b"abcdefghij"})
    tags: list[str | None] = []
    s3.fault = lambda request: tags.append(request.headers["If-Match"]) or False  # type: ignore[func-returns-value]
    with pytest.raises(LoadError, match="'m/1/weights' has changed since it was listed"):
        storage.fetch("m", ["1/weights"], new_directories(tmp_path))
    assert tags == [etag(MODEL["m/1/weights"])]


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("AWS_ACCESS_KEY_ID", "user\n", "credentials from AWS_ACCESS_KEY_ID have a key or token that is empty, or has"),
        ("AWS_SESSION_TOKEN", "tökén", "credentials from AWS_ACCESS_KEY_ID have a key or token that is empty, or has"),
        (
            "AWS_DEFAULT_REGION",
            "eu west",
            "the region 'eu west', for credentials from AWS_ACCESS_KEY_ID, cannot be one",
        ),
        ("AWS_ENDPOINT_URL", "minio:9000", "'minio:9000' is not the URL of a server"),
        ("AWS_ENDPOINT_URL", "http://user:canary@minio", "credentials do not belong in a URL"),
    ],
)
def test_invalid_header_values_are_refused_at_once(
    variable: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore would panic: its exception is none that a server catches."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as refusal:
        open_storage("s3://bucket/models")
    assert why in refusal.value.message
    assert "canary" not in refusal.value.message


def test_a_bucket_is_no_part_of_an_address(s3: FaultyS3) -> None:
    with pytest.raises(ConfigError, match="virtual needs a server with a name, which '127"):
        open_storage(s3.url, s3_addressing="virtual")


def test_a_panic_in_obstore_is_a_storage_error(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(s3_credentials, "_KEY", re.compile(".*", re.DOTALL))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "line\nbreak")
    storage = open_storage(s3.url)
    assert "failed. The storage failed: called" in _error_message(s3, storage.models, Unavailable)


def test_keys_broken_at_run_time_are_reported(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", str(path))
    monkeypatch.setattr(s3_credentials, "_READ_AGAIN", timedelta(0))
    keys = '{"s3": {"": {"key_id": "%s", "secret_key": "canary"}}}'
    path.write_text(keys % "user")
    storage = open_storage(s3.url)
    assert list(storage.models()) == ["m"]
    for broken, why in ((keys % "user\\n", "have a key or token that is empty, or has blanks"), ("{", "is no JSON")):
        path.write_text(broken)
        with pytest.raises(HeadraceError) as caught:
            storage.models()
        assert why in caught.value.message
        assert "canary" not in caught.value.message
    path.write_text(keys % "user")
    assert list(storage.models()) == ["m"]


def test_an_empty_answer_of_a_proxy_unloads_nothing(s3: FaultyS3, storage: Storage) -> None:
    assert list(storage.models()) == ["m"]
    s3.fault = lambda request: request.answer(200, "<html>log in</html>") if request.is_listing else False
    with pytest.raises(Unavailable, match="empty listing, and 'm/1/weights' is still there"):
        storage.models()
    s3.objects.clear()
    assert list(storage.models()) == []


@pytest.mark.parametrize(
    ("addressing", "host", "path"),
    [
        ("auto", "s3.test", "/bucket?list-type=2&prefix=models%2F"),
        ("path", "s3.test", "/bucket?list-type=2&prefix=models%2F"),
        ("virtual", "bucket.s3.test", "/?list-type=2&prefix=models%2F"),
    ],
)
def test_the_bucket_is_in_the_path_or_in_the_host_and_a_proxy_is_used(
    addressing: str, host: str, path: str, s3: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{s3.port}")
    open_storage("s3://http://s3.test/bucket/models", s3_addressing=addressing).models()
    assert s3.requests == [f"http://{host}{path}"]


def test_the_server_of_the_url_takes_precedence_over_a_variable(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert list(open_storage(s3.url, timeout_s=0.5).models()) == ["m"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{s3.port}")
    assert list(open_storage("s3://bucket/models", timeout_s=0.5).models()) == ["m"]


@pytest.mark.parametrize("tag", ["", "<ETag></ETag>"])
def test_a_listing_without_tags_uses_the_times(tag: str, s3: FaultyS3, storage: Storage, tmp_path: Path) -> None:
    s3.listed_tag = tag
    before = dict(storage.fingerprint("m"))
    assert dict(storage.fingerprint("m")) == before
    found = storage.fetch("m", list(before), new_directories(tmp_path))
    assert (found / "1/weights").read_bytes() == b"0123456789"
