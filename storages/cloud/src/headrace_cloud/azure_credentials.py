"""Credentials for Azure Storage: Triton's file, a key, an identity, and a shared access signature."""

from __future__ import annotations

import os

from headrace import ConfigError
from headrace_cloud.credentials import Credentials, entry_of_file, entry_source, texts_of_entry

_FIELDS = ("account_str", "account_key", "auth_type", "client_id")


def azure_credentials(url: str, account: str) -> Credentials:
    """Return the credentials for ``url``, whose account is ``account``. Raises `ConfigError`."""
    of = os.environ.get
    found = entry_of_file("as", url)
    if found is not None:
        prefix, entry = found
        source = entry_source("as", prefix)
        fields = texts_of_entry("as", prefix, entry, _FIELDS)
    else:
        source = ""
        named = {
            "account_str": "AZURE_STORAGE_ACCOUNT",
            "account_key": "AZURE_STORAGE_KEY",
            "auth_type": "AZURE_STORAGE_AUTH_TYPE",
            "client_id": "AZURE_STORAGE_CLIENT_ID",
        }
        fields = {name: of(variable, "") for name, variable in named.items() if of(variable)}
    account = fields.get("account_str") or account
    config: dict[str, object] = {"account_name": account}
    if host := of("AZURE_AUTHORITY_HOST"):
        config["authority_host"] = host if "://" in host else f"https://{host}"
    kind = fields.get("auth_type")
    if kind == "managed_identity":
        return _identity(source or "AZURE_STORAGE_AUTH_TYPE", config, "managed_identity", fields.get("client_id"))
    if kind == "default":
        return _identity(source or "AZURE_STORAGE_AUTH_TYPE", config, "auto", fields.get("client_id"))
    if kind:
        named_by = source or "AZURE_STORAGE_AUTH_TYPE"
        raise ConfigError(f"{named_by}: the auth type '{kind}' is neither 'managed_identity' nor 'default'")
    if key := fields.get("account_key"):
        config |= {"account_key": key, "credential_type": "access_key"}
        return Credentials(source or "AZURE_STORAGE_KEY", config)
    if of("AZURE_STORAGE_SAS_TOKEN"):
        return Credentials("AZURE_STORAGE_SAS_TOKEN", config | {"credential_type": "sas_token"})
    if of("AZURE_FEDERATED_TOKEN_FILE"):
        return Credentials("AZURE_FEDERATED_TOKEN_FILE", config | {"credential_type": "workload_identity"})
    if of("AZURE_CLIENT_SECRET"):
        return Credentials("AZURE_CLIENT_SECRET", config | {"credential_type": "client_secret"})
    return Credentials("none found: anonymous requests", config | {"skip_signature": True})


def _identity(source: str, config: dict[str, object], kind: str, client: str | None) -> Credentials:
    config["credential_type"] = kind
    if client:
        config["client_id"] = client
    return Credentials(f"{source} ({kind})", config)
