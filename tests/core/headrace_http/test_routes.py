"""Paths, methods, categories (docs/spec/behaviours.md sections 1.1, 1.2, 1.6; docs/spec/security.md C23)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headrace.config.option_parts import RESTRICTED_CATEGORIES, Restriction
from headrace.engine import Phase
from headrace.errors import Code, HeadraceError, PermissionDenied, ResourceExhausted, Unauthenticated
from headrace_http.message import STATUS, HttpReply, HttpRequest, error_reply

MakeCaller = Callable[..., Any]
X = {"X": ("FP32", (4,))}

#: Every path of docs/spec/behaviours.md section 1.2, its method and its category; and ``explain``, which is our own.
PATHS = [
    ("GET", "/v2", "metadata"),
    ("GET", "/v2/health/live", "health"),
    ("GET", "/v2/health/ready", "health"),
    *[
        (method, f"/v2/models/echo{version}{suffix}", category)
        for version in ("", "/versions/1")
        for method, suffix, category in (
            ("GET", "", "metadata"),
            ("GET", "/ready", "health"),
            ("GET", "/config", "model-config"),
            ("GET", "/stats", "statistics"),
            ("GET", "/explain", "statistics"),
            ("POST", "/infer", "inference"),
            ("POST", "/generate", "inference"),
            ("POST", "/generate_stream", "inference"),
        )
    ],
    ("GET", "/v2/models/stats", "statistics"),
    *[
        (method, path, "trace")
        for method in ("GET", "POST")
        for path in ("/v2/trace/setting", "/v2/models/echo/trace/setting")
    ],
    ("GET", "/v2/logging", "logging"),
    ("POST", "/v2/logging", "logging"),
    *[
        (method, f"/v2/{kind}sharedmemory{region}/{verb}", "shared-memory")
        for kind in ("system", "cuda")
        for region in ("", "/region/r")
        for method, verb in (("GET", "status"), ("POST", "register"), ("POST", "unregister"))
    ],
    *[("POST", f"/v2/repository{repository}/index", "model-repository") for repository in ("", "/any")],
    *[
        ("POST", f"/v2/repository{repository}/models/m/{verb}", "model-repository")
        for repository in ("", "/any")
        for verb in ("load", "unload")
    ],
]


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(Code)


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (Unauthenticated("who?"), 401, {}),
        (
            Unauthenticated("who?", challenge='Bearer realm="models"'),
            401,
            {b"WWW-Authenticate": b'Bearer realm="models"'},
        ),
        (Unauthenticated("who?", challenge="Basic\r\nX-Evil: 1"), 401, {b"WWW-Authenticate": b"Basic X-Evil: 1"}),
        (PermissionDenied("no"), 403, {}),
        (ResourceExhausted("later"), 429, {}),
        (ResourceExhausted("later", retry_after_s=1.2), 429, {b"Retry-After": b"2"}),
        (ResourceExhausted("later", retry_after_s=0), 429, {b"Retry-After": b"0"}),
    ],
)
def test_a_refused_caller_is_told_what_to_do(error: HeadraceError, status: int, headers: dict[bytes, bytes]) -> None:
    reply = error_reply(error)
    assert (reply.status, dict(reply.headers)) == (status, {b"Content-Type": b"application/json", **headers})


@pytest.mark.parametrize(("method", "path", "category"), PATHS)
def test_every_path_needs_its_key_and_only_that(make_caller: MakeCaller, method: str, path: str, category: str) -> None:
    rules = {name: Restriction(f"key-{name}", "secret") for name in RESTRICTED_CATEGORIES}
    caller = make_caller(X, http_restricted_api=rules)
    others = {f"Key-{name}": "secret" for name in RESTRICTED_CATEGORIES if name != category}
    for verb in (method, "DELETE"):  # the restriction is checked before the method
        reply, body = caller.send(verb, path, headers=others)
        assert reply.status == 403
        assert json.loads(body) == {"error": f"This API is restricted, expecting header 'key-{category}'"}
    reply, body = caller.send("DELETE", path, headers={f"Key-{category}": "secret"})
    assert (reply.status, json.loads(body)) == (405, {"error": "Method Not Allowed"})


def test_table_has_no_route_without_a_category_and_none_untested(make_caller: MakeCaller) -> None:
    for route in make_caller(X).routes.table:
        category = route.operation.category
        assert category in RESTRICTED_CATEGORIES
        assert category in {known for _, path, known in PATHS if route.pattern.fullmatch(path)}


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/v2/",
        "//v2",
        "/V2",
        "/v2/models",
        "/v2/models/",
        "/v2/models//infer",
        "/v2/models/echo/",
        "/v2/models/echo/infer/",
        "/v2/models/echo/versions/x/infer",
        "/v2/models/echo/versions/-1",
        "/v2/models/echo/versions/²",
        "/v2/models/echo/versions/1/trace/setting",
        "/v2/models/echo%2Finfer/x",
        "/v2/health",
        "/v2/repository/index/x",
        "/v1/models/echo",
        "/metrics",
    ],
)
def test_anything_else_is_not_found(make_caller: MakeCaller, path: str) -> None:
    reply, body = make_caller(X).send("GET", path)
    assert (reply.status, body) == (404, b'{"error":"Not Found"}')


def test_model_may_be_called_stats(make_caller: MakeCaller) -> None:
    body = make_caller(X).send("GET", "/v2/models/stats/ready")[1]
    assert json.loads(body)["error"] == "Request for unknown model: 'stats' is not found"


def test_strangers_paths_are_remembered_within_bounds(make_caller: MakeCaller) -> None:
    caller = make_caller(X)
    for number in range(3000):
        caller.send("GET", f"/v2/models/m{number}")
    assert len(caller.routes._found) <= 1024
    caller.send("GET", "/v2")
    assert "/v2" in caller.routes._found  # earlier paths do not keep it out
    assert caller.send("GET", "/v2/models/echo")[0].status == 200


def test_health_while_the_server_is_up_not_ready_and_exiting(make_caller: MakeCaller) -> None:
    caller = make_caller(X)
    assert caller.send("GET", "/v2/health/ready")[0].status == 200
    caller.engine.phase = Phase.STARTING
    reply, body = caller.send("GET", "/v2/health/ready")
    assert (reply.status, body) == (400, b"")
    caller.engine.phase = Phase.EXITING
    reply, body = caller.send("GET", "/v2/health/live")
    assert (reply.status, json.loads(body)) == (503, {"error": "Server exiting"})


def test_model_metadata(make_caller: MakeCaller) -> None:
    body = make_caller({"X": ("FP32", (-1, 4))}, 8).send("GET", "/v2/models/echo")[1]
    io = b'[{"name":"X","datatype":"FP32","shape":[-1,-1,4]}]'
    assert body == b'{"name":"echo","versions":["1"],"platform":"stub","inputs":%s,"outputs":%s}' % (io, io)


def test_model_that_is_not_ready(make_caller: MakeCaller) -> None:
    caller = make_caller(X)
    assert caller.send("GET", "/v2/models/echo/ready")[0].status == 200
    caller.model.ready = False
    reply, body = caller.send("GET", "/v2/models/echo/ready")
    assert (reply.status, json.loads(body)) == (400, {"error": "Model version not ready"})


def test_readiness_says_which_instance_has_died_without_paths_of_the_server(make_caller: MakeCaller) -> None:
    caller = make_caller(X)
    caller.model.ready, caller.model.why_not_alive = False, "died 5 times: no file /srv/secret/model.py"
    caller.engine.lifecycle.are_settled = False
    caller.engine.lifecycle.why_not_alive = "model 'echo' is not ready: no file /srv/secret/model.py"
    for path, reason in (
        ("/v2/models/echo/ready", "Model version not ready: died 5 times: no file .../model.py"),
        ("/v2/health/ready", "model 'echo' is not ready: no file .../model.py"),
    ):
        reply, body = caller.send("GET", path)
        assert (reply.status, json.loads(body)) == (400, {"error": reason})
    assert caller.send("GET", "/v2/health/live")[0].status == 200


@pytest.mark.parametrize("path", ["/v2/health/ready", "/v2/models/echo/ready"])
@pytest.mark.parametrize(("is_ready", "status"), [(True, 200), (False, 400)])
def test_an_instance_that_takes_its_time_is_waited_for(
    make_caller: MakeCaller, path: str, is_ready: bool, status: int
) -> None:
    caller = make_caller(X)
    replies: list[HttpReply] = []

    async def scenario() -> None:
        readiness: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        caller.model.has_checks, caller.model.check_ready = True, partial(asyncio.wait_for, readiness, 5)
        caller.routes.dispatch(HttpRequest("GET", path, {}, memoryview(b""), []), replies.append)
        await asyncio.sleep(0)
        assert replies == []
        readiness.set_result(is_ready)
        while not replies:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert [reply.status for reply in replies] == [status]


def test_statistics_have_tritons_keys(make_caller: MakeCaller) -> None:
    (entry,) = json.loads(make_caller(X).send("GET", "/v2/models/stats")[1])["model_stats"]
    assert list(entry) == [
        "name", "version", "last_inference", "inference_count", "execution_count", "inference_stats",
        "response_stats", "batch_stats", "memory_usage",
    ]  # fmt: skip
    assert list(entry["inference_stats"]) == [
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
    ]  # fmt: skip
    assert entry["inference_stats"]["success"] == {"count": 0, "ns": 0}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/models/echo/generate", 501),
        ("POST", "/v2/models/echo/generate_stream", 501),
        ("GET", "/v2/trace/setting", 501),
        ("POST", "/v2/logging", 501),
        ("POST", "/v2/systemsharedmemory/region/r/register", 501),
        ("POST", "/v2/cudasharedmemory/unregister", 501),
        ("GET", "/v2/cudasharedmemory/region/r/status", 404),
    ],
)
def test_unsupported_route_is_refused_by_name(make_caller: MakeCaller, method: str, path: str, status: int) -> None:
    reply, body = make_caller(X).send(method, path)
    assert reply.status == status
    assert "\n" not in json.loads(body)["error"]


def test_shared_memory_status_is_an_empty_list(make_caller: MakeCaller) -> None:
    reply, body = make_caller(X).send("GET", "/v2/systemsharedmemory/status")
    assert (reply.status, body) == (200, b"[]")


@pytest.mark.parametrize("depth", [101, 1_000_000])
@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/models/echo/infer"])
def test_deep_documents_are_refused_on_every_route(make_caller: MakeCaller, path: str, depth: int) -> None:
    reply, body = make_caller(X).send("POST", path, b"[" * depth + b"]" * depth)
    assert (reply.status, json.loads(body)["error"]) == (400, "JSON nesting depth exceeds maximum allowed limit (100)")


#: Levels that a reader takes and we do not, that none of its stack takes, and more than the loop reads at once.
NESTED = [b"[" * depth + b"]" * depth for depth in (3, 101, 1_000, 1_000_000)]


@pytest.mark.parametrize("ready", [b'"x"', b"1", b"null", *NESTED, b'{"a":' * 200 + b"1" + b"}" * 200])
def test_index_takes_a_boolean(make_caller: MakeCaller, ready: bytes) -> None:
    reply, body = make_caller(X).send("POST", "/v2/repository/index", b'{"ready":%s}' % ready)
    assert (reply.status, json.loads(body)["error"]) == (400, "Invalid value for 'ready': expected a boolean")


@pytest.mark.parametrize("depth", [3, 101, 1_000_000])
def test_index_refuses_a_document_that_does_not_end_before_it_reads_it(make_caller: MakeCaller, depth: int) -> None:
    reply, body = make_caller(X).send("POST", "/v2/repository/index", b'{"ready":' + b"[" * depth)
    assert (reply.status, json.loads(body)["error"][:39]) == (500, "failed to parse the request JSON buffer")
