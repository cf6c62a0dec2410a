"""obstore's client of a cloud: its server, its settings and its timeouts."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import ConfigError
from headrace_cloud.cloud_options import CloudStorageOptions
from headrace_cloud.credentials import Credentials
from headrace_cloud.google_credentials import EMULATOR
from headrace_cloud.store_errors import answer_of
from headrace_cloud.urls import Location, checked_endpoint, is_address

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

#: Retries of a request if the server does not answer or answers 5xx.
_RETRIES = 3
_BACKOFF = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2}


def connect(
    location: Location, credentials: Credentials, options: CloudStorageOptions, answer_s: float
) -> tuple[Client, str]:
    """Return obstore's client, and the URL of its server. A whole answer may take ``answer_s``.

    Asks nothing. Raises `ConfigError`.
    """
    from obstore.store import AzureStore, GCSStore, S3Store

    kind: Any
    if location.scheme == "s3":
        kind, (endpoint, own) = S3Store, _s3(location, credentials, options)
    elif location.scheme == "gs":
        kind, (endpoint, own) = GCSStore, _google()
    else:
        kind, (endpoint, own) = AzureStore, _azure(location)
    settings: dict[str, Any] = {
        "config": {**credentials.config, **own},
        "client_options": _client_options(endpoint, options, answer_s),
        "retry_config": {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=options.timeout_s * 2),
            "backoff": _BACKOFF,
        },
    }
    if credentials.provider is not None:
        settings["credential_provider"] = credentials.provider
    try:
        return kind(location.bucket, **settings), endpoint
    except Exception as error:
        _, reason = answer_of(error)
        raise ConfigError(
            f"'{location.scheme}' cannot be used with credentials from {credentials.source}: {reason}"
        ) from None


def _s3(location: Location, credentials: Credentials, options: CloudStorageOptions) -> tuple[str, Mapping[str, Any]]:
    """Return the URL of the server, and the settings of obstore for it; as the functions for the other clouds."""
    region = credentials.region
    endpoint = location.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = endpoint or f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    endpoint = url = checked_endpoint(endpoint)
    is_virtual = options.s3_addressing == "virtual"
    if options.s3_addressing == "auto":  # Amazon's certificate is for names with one more part
        is_virtual = ".amazonaws.com" in endpoint and "." not in location.bucket
    if is_virtual:
        way, _, host = endpoint.partition("://")
        if is_address(endpoint):
            raise ConfigError(f"--cloud-s3-addressing=virtual needs a server with a name, which '{host}' is not")
        url = f"{way}://{location.bucket}.{host}"
    return endpoint, {
        "region": region,
        "endpoint": url,
        "aws_endpoint_url_s3": url,  # overrides the variable of this name
        "virtual_hosted_style_request": is_virtual,
    }


def _google() -> tuple[str, Mapping[str, Any]]:
    endpoint = os.environ.get(EMULATOR) or "https://storage.googleapis.com"
    if "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    endpoint = checked_endpoint(endpoint)
    return endpoint, {"base_url": endpoint}


def _azure(location: Location) -> tuple[str, Mapping[str, Any]]:
    endpoint = location.endpoint or os.environ.get("AZURE_STORAGE_ENDPOINT")
    # The account that signs may be another one.
    endpoint = checked_endpoint(endpoint or f"https://{location.account}.blob.core.windows.net")
    return endpoint, {"endpoint": endpoint}


def _client_options(endpoint: str, options: CloudStorageOptions, answer_s: float) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=min(options.timeout_s, 10)),
        "read_timeout": timedelta(seconds=options.timeout_s),
        "timeout": timedelta(seconds=answer_s),
    }
    if options.ca_file:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(options.ca_file)
            found["root_certificate"] = Path(options.ca_file).read_bytes()
        except ssl.SSLError as error:
            raise ConfigError(f"--cloud-ca-file: '{options.ca_file}' has no certificate in PEM") from error
        except OSError as error:
            raise ConfigError(f"--cloud-ca-file: '{options.ca_file}' cannot be read: {error.strerror}") from error
    return found
