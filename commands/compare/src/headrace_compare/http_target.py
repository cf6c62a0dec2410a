"""A server over HTTP."""

from __future__ import annotations

import http.client
import json
import zlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from headrace_compare.answers import NO_ANSWER, ServerAnswer, Unreachable
from headrace_compare.named_tensors import BINARY_ONLY, BadTensor, NamedTensor
from headrace_compare.request_sources import ComparedRequest

_JSON_LENGTH = "Inference-Header-Content-Length"
#: Headers of an answer that clients read. The length of the JSON part is compared by its presence.
_HEADERS = ("content-type", "content-encoding")
_MAX_BYTES = 1 << 30


class HttpTarget:
    """A server at an ``http://`` or ``https://`` address. It uses one persistent connection."""

    protocol = "http"

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self.url, self._headers = url, headers
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        self._path = parts.path.rstrip("/")

    def document(self, kind: str, model: str = "", version: str = "") -> tuple[str, Any]:
        name = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{version}" if version else "")
        paths = {"server": "/v2", "metadata": name, "config": f"{name}/config", "statistics": f"{name}/stats"}
        if kind == "index":
            status, _, body = self._ask("POST", "/v2/repository/index", b"{}", {})
        else:
            status, _, body = self._ask("GET", paths[kind], b"", {})
        try:
            return str(status), json.loads(body) if body else None
        except ValueError as error:
            raise Unreachable(f"{self.url} answers {kind} with no JSON") from error

    def infer(self, request: ComparedRequest, *, is_stream: bool) -> list[ServerAnswer]:
        del is_stream  # HTTP has one answer
        version = f"/versions/{request.version}" if request.version else ""
        body, headers = _encoded(request)
        path = f"/v2/models/{quote(request.model, safe='')}{version}/infer"
        try:
            status, head, content = self._ask("POST", path, body, {**headers, **request.headers})
        except Unreachable as error:
            return [ServerAnswer(NO_ANSWER, str(error))]
        return [_decoded(status, head, content)]

    def close(self) -> None:
        self._connection.close()

    def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        for is_last in (False, True):  # an idle connection may have been closed
            try:
                self._connection.request(method, self._path + path, body, {**self._headers, **headers})
                reply = self._connection.getresponse()
                return reply.status, reply.headers, reply.read(_MAX_BYTES)
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if is_last or isinstance(error, TimeoutError):
                    raise Unreachable(f"{self.url}: {error or type(error).__name__}") from error
        raise AssertionError


def _encoded(request: ComparedRequest) -> tuple[bytes, dict[str, str]]:
    """Return the body and its headers: JSON as it was recorded, but for datatypes that JSON does not carry."""
    inputs, tail = list[Any](), list[bytes]()
    for each in request.body["inputs"]:
        if each["datatype"] not in BINARY_ONLY:
            inputs.append(each)
            continue
        data = NamedTensor.from_json(each).wire_bytes()
        parameters = {**each.get("parameters", {}), "binary_data_size": len(data)}
        inputs.append({**{key: each[key] for key in ("name", "datatype", "shape")}, "parameters": parameters})
        tail.append(data)
    document = {**request.body, "inputs": inputs}
    if tail:
        document["parameters"] = {**request.body.get("parameters", {}), "binary_data_output": True}
    text = json.dumps(document).encode()
    return b"".join([text, *tail]), {_JSON_LENGTH: str(len(text))} if tail else {}


def _decoded(status: int, head: http.client.HTTPMessage, content: bytes) -> ServerAnswer:
    length = head.get(_JSON_LENGTH)
    headers = {name: head.get(name, "") for name in _HEADERS}
    headers[_JSON_LENGTH.lower()] = "present" if length else ""
    try:
        if head.get("content-encoding", "identity") in ("gzip", "deflate"):
            content = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(content, _MAX_BYTES)
        document = json.loads(content[: int(length)] if length else content)
        if not isinstance(document, dict):
            raise TypeError("the body is no JSON object")
        outputs, at = list[NamedTensor](), int(length or 0)
        for each in document.pop("outputs", ()):
            size = each.get("parameters", {}).pop("binary_data_size", None)
            if size is None:
                outputs.append(NamedTensor.from_json(each))
                continue
            outputs.append(
                NamedTensor.from_bytes(each["name"], each["datatype"], each["shape"], content[at : at + size])
            )
            at += size
    except (ValueError, LookupError, TypeError, AttributeError, BadTensor, zlib.error) as error:
        return ServerAnswer(str(status), f"no answer of the protocol: {error}", headers=headers)
    error_text = str(document.pop("error", ""))
    return ServerAnswer(str(status), error_text, document, headers, tuple(outputs))
