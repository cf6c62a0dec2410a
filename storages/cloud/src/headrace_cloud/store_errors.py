"""Errors of requests to a cloud in one line: the server's answer, endpoint, bucket, region and source of credentials.

obstore's errors contain the URL, which may have a signature, and a dump of its structures. Only the status and the
server's text are used.
"""

from __future__ import annotations

import json

from headrace import HeadraceError, LoadError, Unavailable, one_line

_STATUS = "status code: "
_DUMP = "\n\nDebug source:"
_LONGEST = 300
#: In obstore's dump of a failed connection, and what it means.
_CAUSES = (
    ("ConnectionRefused", "it refuses connections"),
    ("dns error", "its name has no address"),
    ("failed to lookup address", "its name has no address"),
    ("NotValidForName", "its certificate is for another name"),
    ("Expired", "its certificate has expired"),
    ("InvalidCertificate", "its certificate is not trusted; --cloud-ca-file names more authorities"),
    ("received corrupt message", "it does not speak TLS"),
    ("InvalidContentType", "it does not speak TLS"),
    ("kind: Timeout", "it has not answered within --cloud-timeout-s"),
    ("TimedOut", "it has not answered within --cloud-timeout-s"),
    ("ConnectionReset", "it closed the connection"),
    ("IncompleteMessage", "it closed the connection in the middle of its answer"),
    ("end of file before message length reached", "it sent less than it had announced"),
    ("NetworkUnreachable", "there is no route to it"),
    ("too many redirects", "it redirects in a circle"),
    ("without LOCATION", "it says that the bucket is elsewhere, and not where: set AWS_DEFAULT_REGION to its region"),
    ("Content-Range header not present", "it sent less than it had announced"),
)


def answer_of(error: BaseException) -> tuple[int, str]:
    """Return the HTTP status and the text of the response; without a response, 0 and the cause."""
    text = str(error)
    message, _, dump = text.partition(_DUMP)
    message = message.rpartition("HTTP error: ")[2] if _STATUS not in message else message
    _, found, answer = message.partition(_STATUS)
    if found:
        number, _, rest = answer.partition(" ")
        reason, _, body = rest.partition(":")
        words = _words_of(body)
        return int(number) if number.isdecimal() else 0, _short(f"{number} {words or reason}")
    for mark, meaning in _CAUSES:
        if mark in dump or mark in message:
            return 0, meaning
    return 0, _short(message)


def failure(what: str, error: BaseException, place: str) -> HeadraceError:
    """Return the error for messages: ``what`` failed at ``place``."""
    status, answer = answer_of(error)
    verb = "answered" if status else "failed"
    kind = LoadError if 300 <= status < 500 and status != 429 else Unavailable
    return kind(f"{what} failed. The storage {verb}: {answer.rstrip('.')}. {place}")


def _words_of(body: str) -> str:
    """Return code and message of an error document in XML or JSON; empty if it is neither."""
    body = body.strip()
    if body.startswith("{"):
        try:
            found = json.loads(body)["error"]
            return str(found.get("message") or found.get("code"))
        except (ValueError, TypeError, KeyError, AttributeError):
            return ""
    parts = [_element(body, name) for name in ("Code", "Message", "Region", "Endpoint")]
    return ": ".join(part for part in parts if part)


def _element(body: str, name: str) -> str:
    return body.partition(f"<{name}>")[2].partition(f"</{name}>")[0].partition("\n")[0]


def _short(text: str) -> str:
    text = one_line(text.strip().replace("\n", " "))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
