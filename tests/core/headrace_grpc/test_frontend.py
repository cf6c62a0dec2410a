"""The frontend of a real server, driven by stock clients over a socket.

For the native host, and the hosts of plugins, whose tests import these.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from time import monotonic_ns
from typing import Any, ClassVar

import grpc
import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as client
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2 as triton
from tritonclient.utils import InferenceServerException

from headrace import AnyOperation, Caller, Interceptor, Unsupported, builtins, hookimpl
from headrace.config.option_parts import Restriction
from headrace.config.options import ServerOptions
from headrace.engine import ModelView, RequestSubmitter
from headrace.errors import ConfigError, Unavailable
from headrace.messages.ticket import Ticket
from headrace.models.submission import check_and_enqueue
from headrace.server import Server
from headrace_grpc.hosts import GrpcHost

CONFIG = """
backend: "identity"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" } ]
"""
#: Waits in its queue for longer than any test runs, unless eight rows wait together.
PATIENT = CONFIG + "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 600000000 }"


class Watched(Server):
    """A server that records its requests and their cancellations."""

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.taken = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.deadlines_ns: list[int] = []

        make = self.engine.submitter

        def watched(*arguments: Any) -> RequestSubmitter:
            submitter = make(*arguments)
            submitter.start = self.start_watched
            return submitter

        self.engine.submitter = watched  # type: ignore[method-assign, assignment]

    def start_watched(self, view: ModelView, ticket: Ticket, call: Any = None, reply: Any = None) -> None:
        self.deadlines_ns.append(ticket.request.deadline_ns)
        check_and_enqueue(view, ticket)
        dequeue = ticket.on_cancel

        def cancelled(ticket: Ticket) -> None:
            if dequeue is not None:
                dequeue(ticket)
            self.cancelled.set()

        ticket.on_cancel = cancelled
        self.taken.set()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("models")
    for name, config in (("identity", CONFIG), ("patient", PATIENT)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        (root / name / "labels.txt").write_text("zero\none\ntwo\n")
    return str(root)


Test = Callable[[str], Coroutine[Any, Any, None]]


def asynchronous(test: Test) -> Callable[[str], None]:
    """Runs ``test`` on a loop of its own, for no longer than a test may take."""

    @wraps(test)
    def run(repository: str) -> None:
        asyncio.run(asyncio.wait_for(test(repository), 30))

    return run


DEFAULTS: dict[str, Any] = {"grpc_address": "127.0.0.1", "grpc_port": 0, "exit_timeout_secs": 5}


class Chosen:
    """The host that `serving` starts."""

    host: ClassVar[type[GrpcHost]]


@pytest.fixture(autouse=True)
def chosen(host: type[GrpcHost], monkeypatch: pytest.MonkeyPatch) -> None:
    Chosen.host = host
    monkeypatch.setitem(DEFAULTS, "grpc_server", "native" if host.name == "grpc" else host.name)


def options_for(repository: str, **options: Any) -> ServerOptions:
    return ServerOptions(model_repository=(repository,), **{**DEFAULTS, **options})


@asynccontextmanager
async def serving(repository: str, **options: Any) -> AsyncIterator[tuple[Watched, GrpcHost]]:
    server = Watched(options_for(repository, **options))
    async with server:
        frontend = Chosen.host(server.engine)
        await frontend.start()
        try:
            yield server, frontend
        finally:
            await frontend.stop()


@asynccontextmanager
async def connected(repository: str, **options: Any) -> AsyncIterator[tuple[Watched, Any]]:
    """A server, and the stock client connected to it."""
    async with (
        serving(repository, **options) as (server, frontend),
        client.InferenceServerClient(f"127.0.0.1:{frontend.port}") as connection,
    ):
        yield server, connection


def tensor(rows: int, columns: int = 3) -> tuple[Any, np.ndarray[Any, Any]]:
    array = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    result = client.InferInput("x", [rows, columns], "FP32")
    result.set_data_from_numpy(array)
    return result, array


def method(channel: grpc.aio.Channel, name: str) -> Callable[[bytes], Any]:
    """An RPC that sends and receives bytes."""
    multicallable: Callable[[bytes], Any] = channel.unary_unary(f"/{name}", None, None)
    return multicallable


async def refusal(call: Coroutine[Any, Any, Any]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        await call
    return caught.value.status(), caught.value.message()


@asynchronous
async def test_the_stock_client_sees_the_server_and_its_model(repository: str) -> None:
    async with connected(repository) as (_, connection):
        assert await connection.is_server_live()
        assert await connection.is_server_ready()
        assert await connection.is_model_ready("identity", "1")
        assert (await connection.get_server_metadata()).name == "triton"
        metadata = await connection.get_model_metadata("identity")
        assert (metadata.name, list(metadata.versions), metadata.platform) == ("identity", ["1"], "identity")
        assert [(io.name, io.datatype, list(io.shape)) for io in metadata.inputs] == [("x", "FP32", [-1, -1])]
        config = (await connection.get_model_config("identity")).config
        assert (config.name, config.max_batch_size, config.input[0].data_type) == ("identity", 8, 11)
        index = await connection.get_model_repository_index()
        assert [(m.name, m.state) for m in index.models] == [("identity", "READY"), ("patient", "READY")]


@asynchronous
async def test_inference_and_its_statistics(repository: str) -> None:
    async with connected(repository) as (_, connection):
        x, array = tensor(2)
        result = await connection.infer("identity", [x], request_id="7")
        np.testing.assert_array_equal(result.as_numpy("y"), array)
        assert (result.get_response().id, result.get_response().model_version) == ("7", "1")
        large, array = tensor(4, 100_000)
        np.testing.assert_array_equal((await connection.infer("identity", [large])).as_numpy("y"), array)
        top = client.InferRequestedOutput("y", class_count=1)
        classes = (await connection.infer("identity", [x], outputs=[top])).as_numpy("y").tolist()
        assert classes == [[b"2.000000:2:two"], [b"5.000000:2:two"]]
        (statistics,) = (await connection.get_inference_statistics("identity")).model_stats
        assert (statistics.name, statistics.version) == ("identity", "1")
        assert (statistics.inference_count, statistics.execution_count) == (8, 3)
        assert statistics.inference_stats.success.count == 3
        assert [(batch.batch_size, batch.compute_infer.count) for batch in statistics.batch_stats] == [(2, 2), (4, 1)]


@asynchronous
async def test_refusals_have_tritons_status_and_text(repository: str) -> None:
    async with connected(repository) as (_, connection):
        x, _ = tensor(9)
        unknown = "Request for unknown model: 'z' is not found"
        assert await refusal(connection.infer("z", [x])) == ("StatusCode.NOT_FOUND", unknown)
        assert not await connection.is_model_ready("z")  # and no error
        assert not await connection.is_model_ready("identity", "9")
        version = "Request for unknown model: 'identity' version 9 is not found"
        assert await refusal(connection.get_model_config("identity", "9")) == ("StatusCode.NOT_FOUND", version)
        batch = "[request id: 7] inference request batch-size must be <= 8 for 'identity'"
        assert await refusal(connection.infer("identity", [x], request_id="7")) == (
            "StatusCode.INVALID_ARGUMENT",
            batch,
        )
        statistics = "requested model 'z' is not available"
        assert await refusal(connection.get_inference_statistics("z")) == ("StatusCode.INVALID_ARGUMENT", statistics)
        mode = (
            "explicit model load / unload is not allowed in model control mode 'none'; start the server with "
            "--model-control-mode=explicit"
        )
        assert await refusal(connection.load_model("identity")) == ("StatusCode.UNAVAILABLE", mode)
        shm = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        assert await refusal(connection.register_system_shared_memory("r", "/r", 4)) == (
            "StatusCode.UNIMPLEMENTED",
            shm,
        )


@asynchronous
async def test_a_stream_keeps_order_and_survives_errors(repository: str) -> None:
    async with connected(repository) as (_, connection):
        x, _ = tensor(1)

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in range(20):
                yield {
                    "model_name": "z" if number == 5 else "identity",
                    "inputs": [x],
                    "request_id": str(number),
                }

        ids, errors = [], []
        async for result, error in connection.stream_infer(requests()):
            if error is not None:
                errors.append(error.message())
                ids.append("5")
            else:
                ids.append(result.get_response().id)
                assert result.get_response().parameters["triton_final_response"].bool_param
        assert ids == [str(number) for number in range(20)]
        assert errors == ["Request for unknown model: 'z' is not found"]


def test_the_blocking_client_streams(repository: str) -> None:
    with Server(options_for(repository, allow_http=False, allow_metrics=False)) as server:
        asyncio.run_coroutine_threadsafe(server.start_frontends(), server.loop).result(10)
        (frontend,) = server.frontends
        assert isinstance(frontend, Chosen.host)
        x, array = tensor(1)
        with blocking.InferenceServerClient(f"127.0.0.1:{frontend.port}") as connection:
            results: list[Any] = []
            connection.start_stream(lambda result, error: results.append((result, error)))
            for _ in range(3):
                connection.async_stream_infer("identity", [x])
            connection.stop_stream()  # half-closes, and waits for the answers
            assert [error for _, error in results] == [None] * 3
            np.testing.assert_array_equal(results[2][0].as_numpy("y"), array)


@asynchronous
async def test_a_cancelled_call_leaves_the_queue(repository: str) -> None:
    async with connected(repository) as (server, connection):
        call = asyncio.ensure_future(connection.infer("patient", [tensor(1)[0]]))
        await server.taken.wait()
        call.cancel()
        await server.cancelled.wait()
        snapshot = server.resolve("patient").snapshot()
        assert (snapshot.pending, snapshot.cancelled.count) == (0, 1)


@asynchronous
async def test_a_deadline_cancels_the_request(repository: str) -> None:
    async with connected(repository) as (server, connection):
        status, _ = await refusal(connection.infer("patient", [tensor(1)[0]], client_timeout=0.5))
        assert status == "StatusCode.DEADLINE_EXCEEDED"
        await server.cancelled.wait()
        assert server.resolve("patient").snapshot().pending == 0


@asynchronous
async def test_a_request_knows_the_deadline_of_its_call(repository: str) -> None:
    """For the calls that a model makes meanwhile; they end with it."""
    async with connected(repository) as (server, connection):

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "identity", "inputs": [tensor(1)[0]]}

        await connection.infer("identity", [tensor(1)[0]])
        begun_ns = monotonic_ns()
        await connection.infer("identity", [tensor(1)[0]], client_timeout=100)
        assert [error async for _, error in connection.stream_infer(requests(), stream_timeout=100)] == [None]
        never, single, stream = server.deadlines_ns
        assert never == 0
        for deadline_ns in (single, stream):
            assert 0 < deadline_ns - begun_ns - 99 * 10**9 < monotonic_ns() - begun_ns + 2 * 10**9


@asynchronous
async def test_closing_the_connection_cancels_a_streams_requests(repository: str) -> None:
    async with serving(repository) as (server, frontend):
        connection = client.InferenceServerClient(f"127.0.0.1:{frontend.port}")

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "patient", "inputs": [tensor(1)[0]]}
            await asyncio.Event().wait()

        stream = connection.stream_infer(requests())
        reader = asyncio.ensure_future(anext(aiter(stream)))
        await server.taken.wait()
        reader.cancel()
        await connection.close()
        await server.cancelled.wait()
        assert server.resolve("patient").snapshot().pending == 0


@asynchronous
async def test_stopping_answers_what_is_in_flight(repository: str) -> None:
    async with connected(repository) as (server, connection):
        call = asyncio.ensure_future(connection.infer("patient", [tensor(1)[0]]))
        await server.taken.wait()
        frontend = Chosen.host(server.engine)
        await frontend.start()
        second = client.InferenceServerClient(f"127.0.0.1:{frontend.port}")
        server.taken.clear()
        late = asyncio.ensure_future(second.infer("patient", [tensor(3)[0]]))
        await server.taken.wait()
        stop = asyncio.ensure_future(frontend.stop())
        await connection.infer("patient", [tensor(4)[0]])  # fills the batch of eight
        np.testing.assert_array_equal((await late).as_numpy("y"), tensor(3)[1])
        await stop
        await call
        assert (await refusal(second.is_server_live()))[0] == "StatusCode.UNAVAILABLE"
        await second.close()


@asynchronous
async def test_stopping_gives_up_in_time(repository: str) -> None:
    async with serving(repository, exit_timeout_secs=1) as (server, frontend):
        connection = client.InferenceServerClient(f"127.0.0.1:{frontend.port}")
        call = asyncio.ensure_future(refusal(connection.infer("patient", [tensor(1)[0]])))
        await server.taken.wait()
        await frontend.stop()
        await server.cancelled.wait()
        assert (await call)[0] in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED")
        await connection.close()


@asynchronous
async def test_a_restricted_protocol_needs_its_header(repository: str) -> None:
    restricted = {"inference": Restriction("triton-grpc-protocol-key", "secret")}
    async with connected(repository, grpc_restricted_protocol=restricted) as (_, connection):
        x, _ = tensor(1)
        text = "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
        assert await refusal(connection.infer("identity", [x])) == ("StatusCode.UNAVAILABLE", text)
        await connection.infer("identity", [x], headers={"triton-grpc-protocol-key": "secret"})
        assert await connection.is_server_live()


class RawCall:
    """One unary call in plain HTTP/2, to see what grpc clients hide: encodings and the flag of the message."""

    def __init__(self, port: int, accepts: str, body: bytes) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.data = b""
        self._http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            self._http2.initiate_connection()
            self._http2.send_headers(1, [
                (":method", "POST"), (":scheme", "http"), (":authority", "x"),
                (":path", "/inference.GRPCInferenceService/ModelInfer"), ("te", "trailers"),
                ("content-type", "application/grpc"), ("grpc-accept-encoding", accepts),
            ])  # fmt: skip
            self._http2.send_data(1, b"\0" + len(body).to_bytes(4, "big") + body, end_stream=True)
            ended = False
            while not ended:
                connection.sendall(self._http2.data_to_send())
                for event in self._http2.receive_data(connection.recv(65536)):
                    ended = self._saw(event) or ended

    def _saw(self, event: h2.events.Event) -> bool:
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            self.headers.update(event.headers)
        if isinstance(event, h2.events.DataReceived):
            self.data += event.data
        return isinstance(event, h2.events.StreamEnded)


@pytest.mark.parametrize(
    ("level", "accepts", "encoding"),
    [
        ("none", "identity,gzip,deflate", b"identity"),
        ("low", "identity,gzip,deflate", b"gzip"),
        ("medium", "identity,gzip,deflate", b"deflate"),
        ("high", "identity,gzip,deflate", b"deflate"),
        ("high", "identity", b"identity"),
        ("low", "identity,deflate", b"deflate"),
    ],
)
def test_responses_are_compressed_as_asked(repository: str, level: str, accepts: str, encoding: bytes) -> None:
    @asynchronous
    async def check(repository: str) -> None:
        async with serving(repository, grpc_infer_response_compression_level=level) as (_, frontend):
            array = np.zeros((1, 1000), np.float32)
            body = triton.ModelInferRequest(model_name="identity", raw_input_contents=[array.tobytes()])
            body.inputs.add(name="x", datatype="FP32", shape=array.shape)
            call = await asyncio.to_thread(RawCall, frontend.port, accepts, body.SerializeToString())
            assert call.headers[b"grpc-status"] == b"0"
            assert call.headers.get(b"grpc-encoding", b"identity") == encoding
            packed = encoding != b"identity"
            assert call.data[0] == packed
            message = zlib.decompress(call.data[5:], 32 + 15) if packed else call.data[5:]
            assert triton.ModelInferResponse.FromString(message).raw_output_contents[0] == array.tobytes()

    check(repository)


@asynchronous
async def test_compressed_requests_are_read(repository: str) -> None:
    async with connected(repository) as (_, connection):
        for algorithm in ("gzip", "deflate"):
            x, array = tensor(1, 1000)
            result = await connection.infer("identity", [x], compression_algorithm=algorithm)
            np.testing.assert_array_equal(result.as_numpy("y"), array)


@asynchronous
async def test_the_health_service_tells_readiness(repository: str) -> None:
    async with (
        serving(repository) as (_, frontend),
        grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel,
    ):
        check = method(channel, "grpc.health.v1.Health/Check")
        request = health_pb2.HealthCheckRequest(service="anything").SerializeToString()
        assert health_pb2.HealthCheckResponse.FromString(await check(request)).status == 1


def test_reflection_describes_the_service(repository: str) -> None:
    with Server(options_for(repository, allow_http=False, allow_metrics=False)) as server:
        asyncio.run_coroutine_threadsafe(server.start_frontends(), server.loop).result(10)
        (frontend,) = server.frontends
        assert isinstance(frontend, Chosen.host)
        with grpc.insecure_channel(f"127.0.0.1:{frontend.port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= set(database.get_services())
            file = database.FindFileContainingSymbol("inference.GRPCInferenceService")
            assert file.package == "inference"
            assert len(file.service[0].method) == 20


@asynchronous
async def test_bytes_that_are_no_message_harm_only_their_call(repository: str) -> None:
    async with (
        serving(repository) as (_, frontend),
        grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel,
    ):
        infer = method(channel, "inference.GRPCInferenceService/ModelInfer")
        for body in (b"\xff" * 100, b"\x3a" + b"\xff" * 40_000):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(body)
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert caught.value.details() == "Unable to parse request"
        live = method(channel, "inference.GRPCInferenceService/ServerLive")
        assert triton.ServerLiveResponse.FromString(await live(b"")).live


@asynchronous
async def test_a_very_long_error_reaches_the_client(repository: str) -> None:
    async with connected(repository) as (_, connection):
        status, text = await refusal(connection.infer("m\n" * 50_000, [tensor(1)[0]]))
        assert status == "StatusCode.NOT_FOUND"
        assert text.startswith("Request for unknown model: 'm\nm")


def test_a_busy_port_is_named(repository: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        @asynchronous
        async def check(repository: str) -> None:
            with pytest.raises(Unavailable, match=f"^Socket '127.0.0.1:{port}' already in use $"):
                async with serving(repository, grpc_port=port):
                    """Not reached."""

        check(repository)


@asynchronous
async def test_a_foreign_address_is_named(repository: str) -> None:
    with pytest.raises(Unavailable, match=r"^can not listen on '192\.0\.2\.1:0' for gRPC: "):
        async with serving(repository, grpc_address="192.0.2.1"):
            """Not reached."""


@asynchronous
async def test_two_servers_share_a_port_only_if_the_option_is_set(repository: str) -> None:
    async with serving(repository, reuse_grpc_port=True) as (_, frontend):
        async with serving(repository, grpc_port=frontend.port, reuse_grpc_port=True) as (_, second):
            assert second.port == frontend.port
        with pytest.raises(Unavailable, match="already in use"):
            async with serving(repository, grpc_port=frontend.port):
                """Not reached."""


def test_the_start_is_logged(repository: str, caplog: pytest.LogCaptureFixture) -> None:
    ports: list[int] = []

    @asynchronous
    async def check(repository: str) -> None:
        async with serving(repository) as (_, frontend):
            ports.append(frontend.port)

    with caplog.at_level(logging.INFO):
        check(repository)
    assert f"Started GRPCInferenceService at 127.0.0.1:{ports[0]}" in caplog.messages


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "gRPC over TLS needs --grpc-server-cert: the path of a PEM file"),
        ({"grpc_server_cert": "/nowhere/a.pem"}, "--grpc-server-cert: can not read '/nowhere/a.pem': No such file"),
    ],
)
def test_a_missing_tls_file_is_named(repository: str, options: dict[str, Any], text: str) -> None:
    @asynchronous
    async def check(repository: str) -> None:
        with pytest.raises(ConfigError, match=text):
            async with serving(repository, grpc_use_ssl=True, **options):
                """Not reached."""

    check(repository)


@pytest.mark.parametrize("mutual", [False, True])
def test_tls_is_spoken(repository: str, pem: Path, mutual: bool) -> None:
    cert, key = str(pem / "cert.pem"), str(pem / "key.pem")
    options = {"grpc_server_cert": cert, "grpc_server_key": key, "grpc_root_cert": cert}
    mode = {"grpc_use_ssl_mutual": True} if mutual else {"grpc_use_ssl": True}

    @asynchronous
    async def check(repository: str) -> None:
        async with serving(repository, **options, **mode) as (_, frontend):
            url = f"localhost:{frontend.port}"
            identity = {"private_key": key, "certificate_chain": cert}
            async with client.InferenceServerClient(url, ssl=True, root_certificates=cert, **identity) as connection:
                assert await connection.is_server_live()
            async with client.InferenceServerClient(url, ssl=True, root_certificates=cert) as connection:
                if mutual:
                    status, _ = await refusal(connection.is_server_live(client_timeout=2))
                    assert status == "StatusCode.UNAVAILABLE"
                else:
                    assert await connection.is_server_live()

    check(repository)


class Doorkeeper(Interceptor):
    """Admits callers with a certificate for ``localhost``, and records all callers."""

    name = "doorkeeper"
    seen: ClassVar[list[str]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        self.seen.append(caller.principal)
        if caller.principal != "localhost":
            raise Unsupported(f"'{caller.principal}' may not use {model}")


@pytest.mark.parametrize("mutual", [False, True])
def test_an_interceptor_knows_callers_by_their_certificates(
    repository: str, pem: Path, mutual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = str(pem / "cert.pem"), str(pem / "key.pem")
    tls = {"grpc_server_cert": cert, "grpc_server_key": key, "grpc_root_cert": cert, "grpc_use_ssl": True}
    monkeypatch.setattr(builtins, "register_interceptors", hookimpl(lambda: [Doorkeeper]), raising=False)
    monkeypatch.setattr(Doorkeeper, "seen", [])

    @asynchronous
    async def check(repository: str) -> None:
        server = Server(options_for(repository, **tls, grpc_use_ssl_mutual=mutual))
        async with server:
            frontend = Chosen.host(server.engine)
            await frontend.start()
            url, identity = f"localhost:{frontend.port}", {"private_key": key, "certificate_chain": cert}
            async with client.InferenceServerClient(url, ssl=True, root_certificates=cert, **identity) as connection:
                for _ in range(2):
                    call = connection.infer("identity", [tensor(1)[0]])
                    if mutual:
                        assert (await call).as_numpy("y") is not None
                    else:
                        assert await refusal(call) == ("StatusCode.UNIMPLEMENTED", "'' may not use identity")
            await frontend.stop()

    check(repository)
    assert Doorkeeper.seen == (["localhost"] * 2 if mutual else [""] * 2)
