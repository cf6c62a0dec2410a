"""Removes secrets from texts that others have written: errors, addresses, details of an operation."""

from __future__ import annotations

import re

#: The user and the password of a URL, the values of queries that are signed, and credentials of HTTP.
_SECRETS = (
    (re.compile(r"(?<=://)[^\s/@'\"\\]+@"), "***@"),
    (
        re.compile(
            r"(?i)\b((?:x-amz-)?(?:signature|credential|security-token)|sig|key|api[-_]?key|(?:access_)?token|password)"
            r"=[^&\s'\"\\]+"
        ),
        r"\1=***",
    ),
    (re.compile(r"(?i)\b(bearer|basic) +[a-z0-9._~+/=-]+"), r"\1 ***"),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), "***"),
)


def without_secrets(text: str) -> str:
    """Return ``text`` with ``***`` in place of passwords in URLs, signed queries, credentials of HTTP, and JWTs."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
