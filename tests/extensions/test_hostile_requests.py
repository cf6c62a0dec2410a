"""Hostile requests to the routes of headrace-logging, headrace-generate and headrace-openapi, together on one server.

The classes are those of the security page.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

CONFIG = """backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
SECRET = "s3cret-canary"
PATHS = ["/v2/logging", "/v2/models/m/generate", "/v2/models/m/generate_stream"]
DEPTH = 1_000_000
BODIES = {
    "101 deep": b'{"x": ' + b"[" * 101 + b"]" * 101 + b"}",
    "a million deep": b"[" * DEPTH + b"]" * DEPTH,
    "a million deep in a member": b'{"x": ' + b'{"a":' * DEPTH,
    "cut off": b'{"x": [1',
    "beyond a double": b'{"x": [1e400], "log_verbose_level": 1e400}',
    "a number of a million digits": b'{"x": ' + b"9" * DEPTH + b', "log_verbose_level": ' + b"9" * DEPTH + b"}",
    "no UTF-8": b'{"x": "\xff"}',
    "empty": b"",
}


@pytest.fixture(scope="module")
def access_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "access.log"


@pytest.fixture(scope="module")
def server(
    keep_serving: Callable[..., Headrace], tmp_path_factory: pytest.TempPathFactory, access_log: Path
) -> Headrace:
    folder = tmp_path_factory.mktemp("models")
    (folder / "m/1").mkdir(parents=True)
    (folder / "m/config.pbtxt").write_text(CONFIG)
    return keep_serving(
        f"--model-repository={folder}", "--openapi-docs=true", "--log-verbose=2",
        f"--access-log-file={access_log}", f"--http-restricted-api=metadata:key={SECRET}",
    )  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", BODIES)
def test_a_hostile_body_is_refused_soon_and_changes_nothing(server: Headrace, path: str, body: str) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}", timeout=30) as client:
        before = client.get("/v2/logging").json()
        began = time.monotonic()
        answer = client.post(path, content=BODIES[body])
        assert time.monotonic() - began < 5
        assert answer.status_code in (400, 500), answer.text[:200]
        assert answer.json()["error"]
        assert client.get("/v2/logging").json() == before
        assert client.post("/v2/models/m/generate", json={"x": [1.5]}).json()["y"] == 1.5


@pytest.mark.parametrize("path", ["/v2/models/m/generate", "/v2/models/m/generate_stream"])
def test_a_reserved_parameter_is_refused(server: Headrace, path: str) -> None:
    answer = httpx.post(f"http://127.0.0.1:{server.http}{path}", json={"x": [1], "triton_anything": 1})
    assert answer.status_code == 400
    assert "starting with 'triton_' are reserved" in answer.json()["error"]


def test_a_restricted_route_has_no_other_way_in(server: Headrace) -> None:
    """Another spelling of the path is refused, or is no path."""
    url = f"http://127.0.0.1:{server.http}"
    for path in ("/openapi.json", "/openapi/models/m/example.json", "/docs", "/docs/viewer.js"):
        assert httpx.get(url + path).status_code == 403
        assert httpx.get(url + path, headers={"key": SECRET}).status_code == 200
        for other in (path.upper(), f"/{path}", f"{path}/", path.replace("/", "/./", 1), path.replace("o", "%6F", 1)):
            assert httpx.get(url + other).status_code in (400, 403, 404), other
        assert httpx.post(url + path).status_code in (403, 405)


def test_no_secret_is_in_what_the_server_says(
    server: Headrace, access_log: Path, wait_until: Callable[..., None]
) -> None:
    url = f"http://127.0.0.1:{server.http}"
    paths = ("/openapi.json", "/v2", "/v2/models/m", "/v2/logging", "/docs")
    replies = [httpx.get(url + path, headers={"key": key}).text for path in paths for key in (SECRET, f"{SECRET}x")]
    wait_until(lambda: "server_metadata" in access_log.read_text(), "the access log has the requests")
    for text in (*replies, access_log.read_text(), server.log):
        assert SECRET not in text
    assert json.loads(replies[0])["openapi"] == "3.1.0"
