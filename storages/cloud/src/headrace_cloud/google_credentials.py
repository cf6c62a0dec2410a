"""Credentials for Google Cloud Storage: Triton's file, a key file, gcloud's file, and the machine's identity."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace import ConfigError
from headrace_cloud.credentials import Credentials, entry_of_file, entry_source, has_metadata_service

_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
#: The address of an emulator; requests to it are anonymous.
EMULATOR = "STORAGE_EMULATOR_HOST"


def google_credentials(url: str) -> Credentials:
    """Return the credentials for ``url``. Blocks for at most `METADATA_S` seconds. Raises `ConfigError`."""
    found = entry_of_file("gs", url)
    if found is not None:
        prefix, path = found
        if not isinstance(path, str):
            raise ConfigError(f"{entry_source('gs', prefix)} is not the path of a key file")
        if path:
            return _of_file(Path(path), entry_source("gs", prefix))
    if path := os.environ.get(_VARIABLE):
        return _of_file(Path(path), _VARIABLE)
    if os.environ.get(EMULATOR):
        return Credentials(f"{EMULATOR}: anonymous requests", {"skip_signature": True})
    folder = os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud"
    by_gcloud = Path(folder).expanduser() / "application_default_credentials.json"
    if by_gcloud.is_file():
        return _of_file(by_gcloud, "gcloud's application default credentials")
    if has_metadata_service():
        return Credentials("the identity of this machine")
    return Credentials("none found: anonymous requests", {"skip_signature": True})


def _of_file(path: Path, source: str) -> Credentials:
    try:
        kind = json.loads(path.read_bytes())["type"]
    except OSError as error:
        raise ConfigError(f"the file of {source} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"the file of {source} is no key file of Google: JSON with a 'type'") from None
    if kind == "service_account":
        return Credentials(source, {"service_account": str(path)})
    if kind == "authorized_user":
        return Credentials(source, {"application_credentials": str(path)})
    if find_spec("google.auth" if find_spec("google") else "google") is None:
        raise ConfigError(f"the file of {source} is of type '{kind}', which needs google-auth: pip install google-auth")
    return Credentials(source, provider=_by_google_auth(path))


def _by_google_auth(path: Path) -> Callable[[], Any]:
    from google.auth import load_credentials_from_file
    from obstore.auth.google import GoogleCredentialProvider

    credentials, _ = load_credentials_from_file(
        str(path), scopes=["https://www.googleapis.com/auth/devstorage.read_only"]
    )
    return GoogleCredentialProvider(credentials=credentials)
