"""The URLs of model repositories in a cloud, as Triton writes them.

=================================================  ===============================================================
``s3://bucket/prefix``                             S3 of Amazon
``s3://host:port/bucket/prefix``                   another S3, such as MinIO, by HTTP
``s3://https://host:port/bucket/prefix``           the same by HTTPS; ``s3://http://...`` by HTTP
``gs://bucket/prefix``                             Google Cloud Storage
``as://account/container/prefix``                  Azure Storage; the account may be ``account.blob.core.windows.net``
``as://https://host:port/account/container/...``   another Azure Storage, such as Azurite
=================================================  ===============================================================

Source: docs/spec/behaviours.md section 5.8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from headrace import ConfigError, one_line

_AZURE_HOST = ".blob.core.windows.net"
#: The name of a bucket, a container such as ``$web``, or an account.
_NAME = re.compile(r"[A-Za-z0-9._$-]+", re.ASCII)
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9._:\[\]-]+(/[A-Za-z0-9._~/-]*)?", re.ASCII | re.IGNORECASE)
_FORMS = {
    "s3": "s3://bucket/prefix, or s3://https://host:port/bucket/prefix",
    "gs": "gs://bucket/prefix",
    "as": "as://account/container/prefix",
}


@dataclass(frozen=True, slots=True)
class Location:
    """A prefix of a bucket.

    ``endpoint`` is the URL of the server, without a slash at its end; empty for that of the cloud. ``prefix`` has no
    slashes at its ends, and is empty for the whole bucket. ``account`` is that of Azure.
    """

    scheme: str
    bucket: str
    prefix: str
    endpoint: str = ""
    account: str = ""

    def key(self, path: str) -> str:
        """Return the key of ``path`` below the prefix."""
        return f"{self.prefix}/{path}" if self.prefix else path


def parse_url(url: str) -> Location:
    """Return the location of ``url``, whose scheme is ``s3``, ``gs`` or ``as``. Repeated slashes are ignored.

    Raises `ConfigError`.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    endpoint, rest = _split_endpoint(scheme, rest.lstrip("/"))
    if "@" in rest.partition("/")[0] or "@" in endpoint:
        # The URL is not repeated: it has a secret.
        raise ConfigError(f"the URL of a model repository in '{scheme}' has an '@'; credentials do not belong in a URL")
    for mark, what in (("?", "query"), ("#", "fragment")):
        if mark in rest:
            raise ConfigError(f"'{url.partition(mark)[0]}...' has a {what}; a model repository is {_FORMS[scheme]}")
    parts = [part for part in rest.split("/") if part]
    bad = next((part for part in parts if part in (".", "..") or "\\" in part or not part.isprintable()), None)
    needed = 2 if scheme == "as" else 1
    if bad is not None:
        raise ConfigError(f"'{url}' has {bad!r} in its path; a model repository is {_FORMS[scheme]}")
    if len(parts) < needed:
        raise ConfigError(f"'{url}' names no {'container' if parts else 'bucket'}; it should be {_FORMS[scheme]}")
    odd = next((part for part in parts[:needed] if not _NAME.fullmatch(part)), None)
    if odd is not None:
        raise ConfigError(f"'{url}' names '{odd}', which cannot be a bucket, container or account")
    account = parts.pop(0) if scheme == "as" else ""
    if account.endswith(_AZURE_HOST):
        account = account.removesuffix(_AZURE_HOST)
    if account and endpoint:
        endpoint = f"{endpoint}/{account}"
    return Location(scheme, parts[0], "/".join(parts[1:]), endpoint, account)


def checked_endpoint(endpoint: str) -> str:
    """Return the URL of a server, with its scheme in lower case, and no slash at its end. Raises `ConfigError`."""
    try:
        parts = urlsplit(endpoint)
        is_server = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # a port or an address that cannot be
        is_server = False
    if "@" in endpoint:  # it is not repeated: it has a secret
        raise ConfigError("the URL of a cloud's server has an '@'; credentials do not belong in a URL")
    if not is_server or not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"'{one_line(endpoint)}' is not the URL of a server: expected https://host:port")
    way, mark, rest = endpoint.partition("://")
    return f"{way.lower()}{mark}{rest.rstrip('/')}"


def is_address(endpoint: str) -> bool:
    """True if the server has an IP address, and no name."""
    try:
        ip_address(urlsplit(endpoint).hostname or "")
    except ValueError:
        return False
    return True


def _split_endpoint(scheme: str, rest: str) -> tuple[str, str]:
    """Return the endpoint in ``rest``, which is empty if it has none, and what follows."""
    for way in ("https://", "http://"):
        if rest.lower().startswith(way):
            host, _, rest = rest[len(way) :].lstrip("/").partition("/")
            if scheme == "gs":
                raise ConfigError(f"'gs://{way}...' names a server; STORAGE_EMULATOR_HOST does that for 'gs'")
            return f"{way}{host}", rest
    host, _, after = rest.partition("/")
    name, colon, port = host.rpartition(":")
    if scheme == "s3" and colon and name and port.isdecimal():
        return f"http://{host}", after
    return "", rest
