"""Sources of credentials: Triton's credential file, variables, profiles, identities, in this order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from headrace import ConfigError
from headrace_cloud import CloudStorageOptions
from headrace_cloud import google_credentials as google
from headrace_cloud import s3_credentials as s3
from headrace_cloud.azure_credentials import azure_credentials
from headrace_cloud.clouds import CloudStore
from headrace_cloud.credentials import Credentials
from headrace_cloud.google_credentials import google_credentials
from headrace_cloud.s3_credentials import s3_credentials
from headrace_cloud.urls import parse_url

_SECRET = "canary-7f3e"


@pytest.fixture
def write_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], Path]:
    """Write Triton's credential file."""

    def write(document: Any) -> Path:
        path = tmp_path / "credentials.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", str(path))
        return path

    return write


def _s3(url: str = "s3://bucket/models") -> Credentials:
    return s3_credentials(url, parse_url(url))


def _keys(found: Credentials) -> tuple[str, str, str | None]:
    assert found.provider is not None
    keys = found.provider()
    return keys["access_key_id"], keys["secret_access_key"], keys["token"]


def test_the_longest_matching_prefix_applies(write_file: Callable[[Any], Path]) -> None:
    write_file(
        {
            "s3": {
                "": {"key_id": "any", "secret_key": "1", "region": "eu-north-1"},
                "s3://bucket": {"key_id": "bucket", "secret_key": "2", "session_token": "token"},
                "s3://bucket/models": {"key_id": "models", "secret_key": "3"},
            }
        }
    )
    assert _keys(_s3("s3://other/models")) == ("any", "1", None)
    assert _s3("s3://other/models").region == "eu-north-1"
    assert _keys(_s3("s3://bucket/others")) == ("bucket", "2", "token")
    assert _keys(_s3("s3://bucket/models/all")) == ("models", "3", None)
    assert _s3("s3://bucket/models").source == "entry 's3://bucket/models' of 's3' in TRITON_CLOUD_CREDENTIAL_PATH"


def test_the_file_takes_precedence_over_the_variables(
    write_file: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "variable")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-the-variables")
    write_file({"s3": {"s3://bucket": {"key_id": "file", "secret_key": "2"}}})
    assert _keys(_s3()) == ("file", "2", None)
    assert _keys(_s3("s3://other")) == ("variable", "1", "of-the-variables")


def test_keys_of_the_file_are_read_again(write_file: Callable[[Any], Path]) -> None:
    write_file({"s3": {"": {"key_id": "old", "secret_key": "1"}}})
    found = _s3()
    write_file({"s3": {"": {"key_id": "new", "secret_key": "2"}}})
    assert _keys(found) == ("new", "2", None)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (f'{{"s3": "{_SECRET}"', "is no JSON"),
        ({"s3": [_SECRET]}, "'s3' is not an object"),
        ([_SECRET], "is not an object"),
        ({"s3": {"": _SECRET}}, "s3.'' is not an object with secret_key"),
        ({"s3": {"": {"key": _SECRET}}}, "unknown field 'key'"),
        ({"s3": {"": {"key_id": [_SECRET]}}}, "s3.''.key_id is not a string"),
        ({"s3": {"": {"key_id": _SECRET}}}, "only one of key_id and secret_key"),
        ({"s3": {"": {"profile": "nobody"}}}, "profile 'nobody' is in neither of the files"),
    ],
)
def test_a_broken_file_is_refused_by_place_and_without_its_values(
    document: Any, message: str, write_file: Callable[[Any], Path]
) -> None:
    write_file(document)
    with pytest.raises(ConfigError) as refusal:
        _s3()
    assert message in refusal.value.message
    assert _SECRET not in refusal.value.message


def test_a_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", "/nowhere/file.json")
    with pytest.raises(ConfigError, match=r"'/nowhere/file\.json', which cannot be read: No such file"):
        _s3()


def _profiles(monkeypatch: pytest.MonkeyPatch, folder: Path, credentials: str = "", config: str = "") -> None:
    (folder / "c").write_text(credentials)
    (folder / "f").write_text(config)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "c"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "f"))


def test_a_profile_has_its_keys_and_its_region_in_two_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = (
        "[default]\naws_access_key_id=d\naws_secret_access_key=1\n[work]\naws_access_key_id=w\naws_secret_access_key=2"
    )
    _profiles(monkeypatch, tmp_path, keys, "[profile work]\nregion = eu-west-3\n")
    assert _keys(_s3()) == ("d", "1", None)
    monkeypatch.setenv("AWS_PROFILE", "work")
    found = _s3()
    assert (_keys(found), found.region) == (("w", "2", None), "eu-west-3")
    assert found.source == f"profile 'work' in {tmp_path / 'c'}"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert _s3().region == "eu-west-1"


@pytest.mark.parametrize(
    ("keys", "name"),
    [("", "default"), ("profile", "default"), ("profile", "work"), ("variables", "default"), ("variables", "work")],
)
def test_a_region_is_found_as_by_boto3(keys: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also that of a profile without keys, as on a machine that has a role."""
    lines = "aws_access_key_id = k\naws_secret_access_key = s\n" if keys == "profile" else ""
    config = "[default]\nregion = eu-north-1\n[profile work]\nregion = eu-west-3\n"
    _profiles(monkeypatch, tmp_path, f"[{name}]\n{lines}", config)
    if keys == "variables":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    if name != "default":
        monkeypatch.setenv("AWS_PROFILE", name)
    found, session = _s3(), boto3.Session()
    assert found.region == session.region_name
    assert (found.provider is None) == (session.get_credentials() is None)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert _s3().region == boto3.Session().region_name == "eu-west-1"
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    assert _s3().region == "eu-west-2"


def test_a_profile_file_that_is_damaged_is_not_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _profiles(monkeypatch, tmp_path, f"aws_secret_access_key = {_SECRET}")
    with pytest.raises(ConfigError) as refusal:
        _s3()
    assert "is no file of AWS profiles" in refusal.value.message
    assert _SECRET not in refusal.value.message


def test_a_named_profile_must_have_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _profiles(monkeypatch, tmp_path, config="[profile work]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    with pytest.raises(ConfigError, match=r"profile 'work' in .* has no aws_access_key_id and aws_secret_access_key"):
        _s3()


def test_a_profile_of_an_external_program_needs_boto3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _profiles(monkeypatch, tmp_path, config="[default]\nsso_session = work\n")
    monkeypatch.setattr(s3, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="by 'sso_session', which needs boto3: pip install boto3"):
        _s3()


def test_keys_of_an_external_program_come_from_boto3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "keys"
    document = {"Version": 1, "AccessKeyId": "p", "SecretAccessKey": "3"}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(document)}'\n")
    program.chmod(0o700)
    _profiles(monkeypatch, tmp_path, config=f"[default]\ncredential_process = {program}\n")
    assert _keys(_s3()) == ("p", "3", None)


def test_keys_take_precedence_over_workload_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/token")
    assert _s3().source == "AWS_WEB_IDENTITY_TOKEN_FILE"
    assert _s3().provider is None


def test_half_a_pair_of_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    with pytest.raises(ConfigError, match="only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set"):
        _s3()


@pytest.mark.parametrize(("is_there", "source"), [(True, "the identity of this machine"), (False, "none found: anon")])
def test_the_machine_identity_is_requested_only_in_a_cloud(
    is_there: bool, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setattr(s3, "has_metadata_service", lambda: is_there)
    monkeypatch.setattr(google, "has_metadata_service", lambda: is_there)
    assert _s3().source.startswith(source)
    assert google_credentials("gs://bucket").source.startswith(source)
    assert _s3("s3://minio:9000/bucket").source.startswith("none found")


@pytest.mark.parametrize(
    ("kind", "config"), [("service_account", "service_account"), ("authorized_user", "application_credentials")]
)
def test_a_google_key_file_has_one_of_two_types(
    kind: str, config: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "key.json"
    path.write_text(json.dumps({"type": kind, "private_key": _SECRET}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    found = google_credentials("gs://bucket/models")
    assert (found.source, found.config) == ("GOOGLE_APPLICATION_CREDENTIALS", {config: str(path)})


def test_the_credential_file_names_key_files_of_google(write_file: Callable[[Any], Path], tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    path.write_text('{"type": "service_account"}')
    write_file({"gs": {"": "", "gs://bucket": str(path)}})
    assert google_credentials("gs://bucket/models").config == {"service_account": str(path)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "GOOGLE_APPLICATION_CREDENTIALS cannot be read: No such file"),
        (f"{_SECRET}", "is no key file of Google"),
        (f'["{_SECRET}"]', "is no key file of Google"),
    ],
)
def test_a_broken_key_file_is_refused_and_not_quoted(
    text: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "key.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(ConfigError) as refusal:
        google_credentials("gs://bucket/models")
    assert message in refusal.value.message
    assert _SECRET not in refusal.value.message


def test_azure_accepts_a_key_an_identity_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "as://account/container"
    assert azure_credentials(url, "account").config == {"account_name": "account", "skip_signature": True}
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")
    found = azure_credentials(url, "account")
    assert found.config == {"account_name": "mine", "account_key": "a2V5", "credential_type": "access_key"}
    assert found.source == "AZURE_STORAGE_KEY"
    monkeypatch.setenv("AZURE_STORAGE_AUTH_TYPE", "managed_identity")
    monkeypatch.setenv("AZURE_STORAGE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", "login.example.com")
    assert azure_credentials(url, "account").config == {
        "account_name": "mine",
        "authority_host": "https://login.example.com",
        "credential_type": "managed_identity",
        "client_id": "client",
    }
    monkeypatch.setenv("AZURE_STORAGE_AUTH_TYPE", "magic")
    with pytest.raises(ConfigError, match="the auth type 'magic' is neither 'managed_identity' nor 'default'"):
        azure_credentials(url, "account")


def test_the_url_names_the_azure_server_for_any_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")
    store = CloudStore("as://account/container/models", CloudStorageOptions())
    assert store.identity == "as://https://account.blob.core.windows.net/container/models"


def test_the_credential_file_has_accounts_of_azure(write_file: Callable[[Any], Path]) -> None:
    write_file({"as": {"as://account/container": {"account_str": "other", "account_key": "a2V5"}}})
    found = azure_credentials("as://account/container/models", "account")
    assert found.config == {"account_name": "other", "account_key": "a2V5", "credential_type": "access_key"}
    assert found.source == "entry 'as://account/container' of 'as' in TRITON_CLOUD_CREDENTIAL_PATH"
    assert "a2V5" not in repr(found)
