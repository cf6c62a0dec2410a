"""Credentials for S3: Triton's file, the variables of AWS, its profiles, and the identity of a workload or machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from configparser import ConfigParser, Error
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace import ConfigError, one_line
from headrace_cloud.credentials import (
    Credentials,
    entry_of_file,
    entry_source,
    has_metadata_service,
    texts_of_entry,
)
from headrace_cloud.urls import Location

_FIELDS = ("secret_key", "key_id", "region", "session_token", "profile")
_DEFAULT_REGION = "us-east-1"
_REGION = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_KEY = re.compile(r"[!-~]+")
#: Files with keys are read again after this time: other programs renew the keys in them.
_READ_AGAIN = timedelta(minutes=5)
#: Settings of a profile with another source of credentials than keys. They need boto3.
_INDIRECT = (
    "sso_session",
    "sso_start_url",
    "credential_process",
    "role_arn",
    "web_identity_token_file",
    "login_session",
)
_WORKLOAD = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def s3_credentials(url: str, location: Location) -> Credentials:
    """Return the credentials for ``url``. Blocks for at most `METADATA_S` seconds. Raises `ConfigError`."""
    found = _find(url, location)
    if not _REGION.fullmatch(found.region):
        raise ConfigError(f"the region '{one_line(found.region)}', for credentials from {found.source}, cannot be one")
    return found


def _find(url: str, location: Location) -> Credentials:
    found = entry_of_file("s3", url)
    if found is None:
        return _from_environment(location)
    prefix, entry = found
    fields = texts_of_entry("s3", prefix, entry, _FIELDS)
    if "key_id" in fields or "secret_key" in fields:
        if not {"key_id", "secret_key"} <= fields.keys():
            raise ConfigError(f"{entry_source('s3', prefix)} has only one of key_id and secret_key")
        _entry_keys(url)
        return Credentials(
            entry_source("s3", prefix), provider=lambda: _entry_keys(url), region=fields.get("region") or _region()
        )
    if "profile" in fields:
        return _of_profile(fields["profile"], fields.get("region", ""))
    return _from_environment(location, fields.get("region", ""))


def _entry_keys(url: str) -> dict[str, Any]:
    """Return the keys that the credential file has for ``url`` now."""
    found = entry_of_file("s3", url)
    if found is None:
        raise ConfigError(f"the credential file has no entry for '{url}' any more")
    fields = texts_of_entry("s3", *found, _FIELDS)
    keys = (fields.get("key_id", ""), fields.get("secret_key", ""), fields.get("session_token"))
    return _keys(entry_source("s3", found[0]), *keys, is_renewed=True)


def _from_environment(location: Location, region: str = "") -> Credentials:
    of = os.environ.get
    if of("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return _anonymous("AWS_SKIP_SIGNATURE", region)
    key, secret = of("AWS_ACCESS_KEY_ID"), of("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        keys = _keys("AWS_ACCESS_KEY_ID", key, secret, of("AWS_SESSION_TOKEN"))
        return Credentials("AWS_ACCESS_KEY_ID", provider=lambda: keys, region=region or _region())
    if key or secret:
        raise ConfigError("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set")
    if profile := of("AWS_PROFILE"):
        return _of_profile(profile, region)
    if _has_credentials(_profile("default")[1]):  # otherwise it has only a region
        return _of_profile("default", region)
    for variable in _WORKLOAD:
        if of(variable):
            return Credentials(variable, region=region or _region())
    is_disabled = of("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if not location.endpoint and not is_disabled and has_metadata_service():
        return Credentials("the identity of this machine", region=region or _region())
    return _anonymous("none found", region)


def _anonymous(source: str, region: str) -> Credentials:
    return Credentials(f"{source}: anonymous requests", {"skip_signature": True}, region=region or _region())


def _region(profile: str = "") -> str:
    """Return the region of the variables, or that of ``profile``, which is by default the one in use."""
    of = os.environ.get
    region = of("AWS_DEFAULT_REGION") or of("AWS_REGION")
    return region or _profile(profile or of("AWS_PROFILE") or "default")[1].get("region") or _DEFAULT_REGION


def _keys(source: str, key: str, secret: str, token: str | None, *, is_renewed: bool = False) -> dict[str, Any]:
    """Return the keys for obstore. Raises `ConfigError` for invalid header values, which make obstore panic."""
    if not all(map(_KEY.fullmatch, (key, secret, token or "-"))):
        raise ConfigError(
            f"credentials from {source} have a key or token that is empty, or has blanks, line breaks, or characters "
            "that are not ASCII"
        )
    expiry = datetime.now(timezone.utc) + _READ_AGAIN if is_renewed else None
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expiry}


# ---------------------------------------------------------------------------
# Profiles
# ---------------------------------------------------------------------------


def _of_profile(name: str, region: str) -> Credentials:
    where, settings = _profile(name)
    if not settings:
        raise ConfigError(f"the profile '{name}' is in neither of the files {' and '.join(map(str, _files()))}")
    region = region or _region(name)
    source = f"profile '{name}' in {where}"
    if _has_keys(settings):
        _profile_keys(name)
        return Credentials(source, provider=lambda: _profile_keys(name), region=region)
    indirect = next((each for each in _INDIRECT if each in settings), None)
    if indirect is None:
        raise ConfigError(f"{source} has no aws_access_key_id and aws_secret_access_key")
    if find_spec("boto3") is None:
        raise ConfigError(f"{source} has its credentials by '{indirect}', which needs boto3: pip install boto3")
    return Credentials(source, provider=_by_boto3(name), region=region)


def _has_keys(settings: Mapping[str, str]) -> bool:
    return bool(settings.get("aws_access_key_id") and settings.get("aws_secret_access_key"))


def _has_credentials(settings: Mapping[str, str]) -> bool:
    return _has_keys(settings) or any(each in settings for each in _INDIRECT)


def _by_boto3(name: str) -> Callable[[], Any]:
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(boto3.Session(profile_name=name))


def _profile_keys(name: str) -> dict[str, Any]:
    """Return the keys that the profile has now."""
    where, settings = _profile(name)
    key, secret = settings.get("aws_access_key_id", ""), settings.get("aws_secret_access_key", "")
    return _keys(f"profile '{name}' in {where}", key, secret, settings.get("aws_session_token"), is_renewed=True)


def _profile(name: str) -> tuple[Path, Mapping[str, str]]:
    """Return the file with the profile, and its settings: those of both files. Empty if there is no such profile."""
    secrets, config = _files()
    sections = {secrets: (name,), config: (name,) if name == "default" else (f"profile {name}", name)}
    found: dict[str, str] = {}
    where = secrets
    for path in (config, secrets):  # the second one counts
        for section in sections[path]:
            settings = _section(path, section)
            if settings:
                found.update(settings)
                where = path
                break
    return where, found


def _files() -> tuple[Path, Path]:
    """Return the paths of AWS's files of credentials and of configuration."""
    home = Path("~/.aws")
    named = (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config"))
    secrets, config = (Path(os.environ.get(variable) or home / name).expanduser() for variable, name in named)
    return secrets, config


def _section(path: Path, name: str) -> dict[str, str]:
    """Return the settings of one section; empty if there is no such file or section."""
    parser = ConfigParser(interpolation=None, default_section="-")
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}") from error
    except (Error, UnicodeDecodeError):
        raise ConfigError(f"'{path}' is no file of AWS profiles") from None  # the error would quote a line of it
    return dict(parser[name]) if parser.has_section(name) else {}
