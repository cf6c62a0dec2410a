"""Fair shares of a model: by arithmetic in the gate, and over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient import grpc as grpc_client
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from headrace import Caller, InferRequest, Operation, ResourceExhausted, ServerOptions, Unavailable, Watch
from headrace.messages.request import Undecoded
from headrace_access import AccessOptions
from headrace_access.key_file import new_key
from headrace_http import text_format
from headrace_quotas import QuotaOptions, Quotas
from headrace_testing import InterceptorConformance
from headrace_testing.serving import on_loop, serve

CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
SLOW = CONFIG + 'parameters { key: "execute_delay_ms" value { string_value: "5" } }'
BODY = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
INFER = "/v2/models/m/infer"


class TestSharing(InterceptorConformance):
    """The kit, with a model of which each caller after the first waits."""

    plugin, interceptor = "headrace_quotas", "quotas"

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "quotas.json"
        self.path.write_text(json.dumps({"sharing": {"*": {"in_flight": 1}}}))

    def options(self) -> Mapping[str, Any]:
        return {"plugin_options": [QuotaOptions(file=str(self.path))]}


class Shared:
    """The interceptor with a model that is shared, without a server. ``served`` are the principals in order."""

    def __init__(self, folder: Path, document: Any) -> None:
        path = folder / "quotas.json"
        path.write_text(json.dumps(document))
        self.quotas = Quotas(ServerOptions(plugin_options=[QuotaOptions(file=str(path))]))
        self.served: list[str] = []
        self.callers: list[Caller] = []

    def ask(self, principal: str, size: int = 0, deadline_ns: int = 0) -> tuple[Caller, Awaitable[None] | None]:
        caller = Caller("http", principal=principal, deadline_ns=deadline_ns, body_bytes=size)
        caller.operation, caller.model = Operation.INFER, "m"
        verdict = self.quotas.admit(caller, Operation.INFER, "m")
        if isinstance(verdict, Watch):
            caller.watch(verdict)
            self.go_in(caller)
            return caller, None
        assert isinstance(verdict, asyncio.Future)
        verdict.add_done_callback(lambda done: None if done.cancelled() or done.exception() else self.go_in(caller))
        return caller, verdict

    def go_in(self, caller: Caller) -> None:
        self.served.append(caller.principal)
        self.callers.append(caller)

    async def serve(self, count: int) -> list[str]:
        """End the oldest request in flight, ``count`` times. Return the principals that were admitted."""
        before = len(self.served)
        for _ in range(count):
            self.callers.pop(0).end()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return self.served[before:]

    def counts(self) -> tuple[int, int, int, int]:
        gate = self.quotas.table.gates["m"]
        tenants, uses = self.quotas.table.tenants.values(), self.quotas.table.uses.values()
        return (
            gate.in_flight,
            gate.waiting,
            sum(each.account.in_flight for each in tenants),
            sum(each.in_flight for each in uses),
        )


@pytest.fixture
def shared(tmp_path: Path) -> Callable[..., Shared]:
    return lambda sharing=None, **document: Shared(
        tmp_path, {"sharing": {"*": {"in_flight": 1} | (sharing or {})}} | document
    )


def test_each_principal_gets_its_weight_of_the_model(shared: Callable[..., Shared]) -> None:
    """In each window in which all wait, the counts over the weights differ by at most the costs of two requests."""
    weights = {"heavy": 4, "middle": 2, "light": 0.5}

    async def ask() -> None:
        callers = shared(principals={name: {"weight": weight} for name, weight in weights.items()})
        for name in weights:
            for _ in range(130):
                callers.ask(name)
        served = await callers.serve(200)
        for begin in range(0, 150, 7):
            for length in (13, 26, 50):
                counts = Counter(served[begin : begin + length])
                shares = {name: counts[name] / weight for name, weight in weights.items()}
                for one in weights:
                    for other in weights:
                        most = 1 / weights[one] + 1 / weights[other]
                        assert shares[one] - shares[other] <= most + 1e-9, (begin, length, counts)
        counts = Counter(served[:195])  # the sum of the weights is 6.5
        assert abs(counts["heavy"] - 120) <= 1
        assert abs(counts["light"] - 15) <= 1
        for caller in callers.callers:
            caller.end()

    asyncio.run(ask())


def test_an_idle_principal_is_next_and_gets_no_credit(shared: Callable[..., Shared]) -> None:
    async def ask() -> None:
        callers = shared()
        for _ in range(40):
            callers.ask("flood")
        await callers.serve(10)
        for _ in range(10):
            callers.ask("quiet")
        assert await callers.serve(1) == ["quiet"]
        assert Counter(await callers.serve(10)) == {"quiet": 5, "flood": 5}

    asyncio.run(ask())


def test_a_request_costs_as_much_as_its_rows(shared: Callable[..., Shared], tmp_path: Path) -> None:
    """On a real server: of two principals with equal weights, one sends three rows at a time."""
    keys = _write(tmp_path, {"sharing": {"*": {"in_flight": 1}}}, "wide", "narrow")
    with serving(tmp_path, SLOW) as (server, quotas):
        order = _race(server, keys, {"wide": 3, "narrow": 1}, connections=20, answers=130)
        require_empty(server, quotas)
    counts = Counter(order[45:])
    assert abs(counts["wide"] * 3 - counts["narrow"]) <= 9, counts


def test_requests_without_competition_cause_no_debt(shared: Callable[..., Shared]) -> None:
    """A request that declares a billion rows is not charged for them: it is refused after the gate."""

    async def ask() -> None:
        callers = shared()
        view: Any = SimpleNamespace(name="m", version=1, max_batch_size=8, decoupled=False, outputs={}, inputs={})
        view.capacity, view.occupancy = lambda: 1, SimpleNamespace(last_ns=10_000_000)
        wide = InferRequest("m", {"x": Undecoded("FP32", (1_000_000_000, 1), memoryview(b""))})
        for _ in range(100):
            caller, _ = callers.ask("alice")
            callers.quotas.intercept(wide, view, caller)
            await callers.serve(1)
        for _ in range(20):
            callers.ask("alice")
            callers.ask("bob")
        assert Counter(await callers.serve(20)) == {"alice": 10, "bob": 10}
        callers.quotas.intercept(wide, view, callers.callers[0])  # now it costs eight rows, because others wait
        late = await callers.serve(9)
        assert 1 <= min(Counter(late).values()) <= 2
        for caller in callers.callers:
            caller.end()
        callers.quotas._tick()
        assert callers.quotas.table.gates["m"].view is None  # a model that is unloaded can go

    asyncio.run(ask())


@pytest.mark.parametrize("leaves", ["ends", "is cancelled", "both"])
def test_a_caller_that_disconnects_while_it_waits_does_not_count(shared: Callable[..., Shared], leaves: str) -> None:
    async def ask() -> None:
        callers = shared()
        first, _ = callers.ask("alice")
        waiting = [callers.ask("alice") for _ in range(5)]
        assert callers.counts() == (1, 5, 6, 6)
        for caller, future in waiting[:4]:
            assert isinstance(future, asyncio.Future)
            if leaves != "ends":
                future.cancel()
            if leaves != "is cancelled":
                caller.end()
        await asyncio.sleep(0)
        assert callers.counts() == (1, 1, 2, 2)
        first.end()
        await asyncio.sleep(0)
        assert callers.counts() == (1, 0, 1, 1)
        waiting[4][0].end()
        assert callers.counts() == (0, 0, 0, 0)

    asyncio.run(ask())


def test_a_full_queue_refuses_the_principal_with_the_largest_load(shared: Callable[..., Shared]) -> None:
    async def ask() -> None:
        callers = shared({"max_waiting": 6, "max_waiting_bytes": 1000})
        callers.ask("flood")
        flood = [callers.ask("flood")[1] for _ in range(6)]
        with pytest.raises(ResourceExhausted) as raised:
            callers.ask("flood")
        assert raised.value.message == "6 requests wait for model 'm', which is the limit"
        assert raised.value.retry_after_s == 1
        callers.ask("quiet")  # takes the place of the newest one
        last = flood.pop()
        assert isinstance(last, asyncio.Future)
        with pytest.raises(ResourceExhausted):
            await last
        assert callers.counts()[1] == 6
        for _ in range(2):
            callers.ask("quiet")
        assert await callers.serve(2) in (["quiet", "flood"], ["flood", "quiet"])
        callers.ask("large", size=900)
        with pytest.raises(ResourceExhausted):
            callers.ask("large", size=101)
        callers.ask("small", size=101)  # it waits with less than the large one, which is refused
        assert "large" not in await callers.serve(6)
        refused = callers.quotas.counters.by_label
        assert {name: each.refused["queue_full"] for name, each in refused.items()} == {
            "flood": 4, "quiet": 0, "large": 2, "small": 0,
        }  # fmt: skip

    asyncio.run(ask())


def test_waiting_ends_at_its_limit_and_at_the_deadline(shared: Callable[..., Shared]) -> None:
    async def ask() -> None:
        callers = shared({"max_wait_seconds": 0.05})
        callers.ask("alice")
        _, long = callers.ask("alice")
        deadline_ns = int((callers.quotas._clock() + 0.01) * 1e9)
        _, short = callers.ask("alice", deadline_ns=deadline_ns)
        assert long is not None
        assert short is not None
        with pytest.raises(Unavailable, match=r"^Request timeout expired$"):
            await short
        with pytest.raises(ResourceExhausted, match=r"^the request has waited 0\.05 s for a share of model 'm'"):
            await long

    asyncio.run(ask())


def test_after_random_ends_every_count_is_zero(shared: Callable[..., Shared]) -> None:
    async def ask(seed: int) -> None:
        chance = random.Random(seed)
        callers = shared({"in_flight": chance.randrange(1, 4), "max_waiting": 12, "max_wait_seconds": 0.001})
        requests: list[tuple[Caller, Any]] = []
        for _ in range(300):
            what = chance.random()
            if what < 0.5:
                with suppress(ResourceExhausted):
                    requests.append(callers.ask(chance.choice("abc"), chance.randrange(100)))
            elif what < 0.9 and requests:
                caller, future = requests.pop(chance.randrange(len(requests)))
                if future is not None and chance.random() < 0.5:
                    future.cancel()
                elif future is not None and future.done() and not future.cancelled():
                    future.exception()
                caller.end()
            elif what < 0.95:
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(0.002)
            gate = callers.quotas.table.gates.get("m")
            assert gate is None or gate.in_flight <= gate.limit.now
        for caller, future in requests:
            if future is not None:
                future.cancel()
            caller.end()
        await asyncio.sleep(0.002)
        assert callers.counts() == (0, 0, 0, 0)
        assert not any(each.waiting for each in callers.quotas.table.uses.values())

    for seed in range(10):
        asyncio.run(ask(seed))


# ---------------------------------------------------------------------- real servers


def _write(folder: Path, quotas: Any, *principals: str) -> dict[str, str]:
    keys, document = {}, {}
    for name in principals:
        keys[name], key_id, digest = new_key()
        document[name] = {"keys": {key_id: {"sha256": digest}}, "allow": [{"models": ["*"], "operations": ["*"]}]}
    (folder / "access.json").write_text(json.dumps({"principals": document}))
    (folder / "quotas.json").write_text(json.dumps(quotas))
    return keys


@contextmanager
def serving(folder: Path, config: str, **options: Any) -> Iterator[tuple[Any, Quotas]]:
    server: Any
    (folder / "models/m/1").mkdir(parents=True)
    (folder / "models/m/config.pbtxt").write_text(f'name: "m" {config}')
    groups = [AccessOptions(keys=f"{folder}/access.json"), QuotaOptions(file=f"{folder}/quotas.json")]
    with serve(folder / "models", listen=True, plugin_options=groups, **options) as server:
        [quotas] = [each for each in server.engine.admission.interceptors if isinstance(each, Quotas)]
        yield server, quotas


def in_flight(quotas: Quotas) -> tuple[int, int]:
    """Return the number of requests in flight and of waiting ones, of all models."""
    gates = tuple(quotas.table.gates.values())
    return sum(each.in_flight for each in gates), sum(each.waiting for each in gates)


def require_empty(server: Any, quotas: Quotas) -> None:
    """Wait until nothing is in flight, by every count."""

    async def wait() -> None:
        while in_flight(quotas) != (0, 0):
            await asyncio.sleep(0.005)
        assert not any(each.account.in_flight for each in quotas.table.tenants.values())
        assert not any(each.in_flight or each.waiting for each in quotas.table.uses.values())

    on_loop(server, asyncio.wait_for(wait(), 60))


async def _ask_on(server: Any, key: str, rows: int, answered: Callable[[], bool]) -> None:
    """Send requests on one connection until ``answered``, called after each answer, returns False."""
    tensor = {"name": "x", "shape": [rows, 1], "datatype": "FP32", "data": [1] * rows}
    body = json.dumps({"inputs": [tensor]})
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.options.http_port)
    while True:
        writer.write((head + body).encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", answer)[0]))
        if not answered():
            break
    writer.close()


def _race(server: Any, keys: Mapping[str, str], rows: Mapping[str, int], connections: int, answers: int) -> list[str]:
    """Send requests of each principal from several connections. Return the answered principals, in order."""
    order: list[str] = []

    def note(name: str) -> bool:
        order.append(name)
        return len(order) < answers

    async def run() -> None:
        asking = [
            _ask_on(server, keys[name], rows[name], partial(note, name)) for name in rows for _ in range(connections)
        ]
        await asyncio.wait_for(asyncio.gather(*asking), 60)

    asyncio.run(run())
    return order[:answers]  # behind them, connections have ended


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.options.http_port}"


def test_over_http_each_principal_gets_its_weight(tmp_path: Path) -> None:
    weights = {"heavy": {"weight": 3}, "light": {}}
    keys = _write(tmp_path, {"principals": weights, "sharing": {"m": {"in_flight": 1}}}, *weights)
    with serving(tmp_path, SLOW) as (server, quotas):
        order = _race(server, keys, {"heavy": 1, "light": 1}, connections=20, answers=150)
        require_empty(server, quotas)
        page = text_format.text(on_loop(server, collected(server)))
    steady = order[45:]  # by then, all connections are open
    counts = Counter(steady)
    assert abs(counts["heavy"] / 3 - counts["light"]) <= 1 / 3 + 1 + 1, counts  # one answer may be under way
    last = -1
    for at, name in enumerate(steady):  # a bound on starvation: of each four, one
        if name == "light":
            assert at - last <= 4 + 2, order
            last = at
    assert 'headrace_quotas_admitted_total{principal="heavy"}' in page


async def collected(server: Any) -> list[Any]:
    return list(server.engine.collect())


# ---------------------------------------------------------------------- disconnects, and the end of the server


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Quotas, dict[str, str]]]:
    """Yield a server whose model admits one request at a time, each for 20 ms."""
    folder = tmp_path_factory.mktemp("busy")
    keys = _write(folder, {"sharing": {"*": {"in_flight": 1}}}, "alice", "bob")
    with serving(folder, CONFIG + 'parameters { key: "execute_delay_ms" value { string_value: "20" } }') as (
        server,
        callers,
    ):
        yield server, callers, keys


def tensor() -> grpc_client.InferInput:
    callers = grpc_client.InferInput("x", [1, 1], "FP32")
    callers.set_data_from_numpy(np.ones((1, 1), np.float32))
    return callers


def test_a_deadline_ends_the_wait_as_in_a_model_queue(busy: tuple[Any, Quotas, dict[str, str]]) -> None:
    server, quotas, keys = busy

    async def ask() -> None:
        is_over: list[bool] = []
        flood = [asyncio.create_task(_ask_on(server, keys["alice"], 1, lambda: not is_over)) for _ in range(12)]
        while in_flight(quotas)[1] < 8:
            await asyncio.sleep(0.001)
        async with httpx.AsyncClient(base_url=url(server), headers={"X-Api-Key": keys["alice"]}, timeout=60) as client:
            expired = await client.post(INFER, json=BODY, headers={"Request-Timeout-Ms": "10"})
        assert (expired.status_code, expired.json()) == (503, {"error": "Request timeout expired"})
        own = {"headers": {"x-api-key": keys["alice"]}, "client_timeout": 0.05}
        with (
            grpc_client.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as other,
            pytest.raises(InferenceServerException) as raised,
        ):
            await asyncio.to_thread(other.infer, "m", [tensor()], **own)
        assert "DEADLINE_EXCEEDED" in str(raised.value.status())
        is_over.append(True)
        await asyncio.wait_for(asyncio.gather(*flood), 60)

    asyncio.run(ask())
    require_empty(server, quotas)


def test_a_storm_of_disconnects_leaks_no_slot(busy: tuple[Any, Quotas, dict[str, str]]) -> None:
    server, quotas, keys = busy
    chance = random.Random(1)
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[np.ones(1, np.float32).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    encoded = request.SerializeToString()

    async def over_http(name: str) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.options.http_port)
        body = json.dumps(BODY)
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {keys[name]}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        await asyncio.sleep(chance.random() * 0.1)
        writer.close()

    async def over_grpc(channel: Any, name: str, streams: bool) -> None:
        metadata = (("x-api-key", keys[name]),)
        if streams:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(metadata=metadata)
            for _ in range(3):
                await call.write(encoded)
        else:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(encoded, metadata=metadata)
        await asyncio.sleep(chance.random() * 0.1)
        call.cancel()

    async def storm() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.options.grpc_port}") as channel:
            work = []
            for number in range(90):
                name = chance.choice(("alice", "bob"))
                work.append(over_http(name) if number % 3 == 0 else over_grpc(channel, name, number % 3 == 1))
            await asyncio.gather(*work)

    asyncio.run(storm())
    require_empty(server, quotas)
    assert all(quotas.counters.by_label[name].waited_s > 0 for name in keys)
    answered = httpx.post(url(server) + INFER, json=BODY, headers={"X-Api-Key": keys["alice"]})
    assert answered.status_code == 200


def test_requests_that_wait_when_the_server_stops_are_answered(tmp_path: Path) -> None:
    keys = _write(tmp_path, {"sharing": {"*": {"in_flight": 1}}}, "alice")
    answered: list[int] = []

    def note() -> bool:
        answered.append(1)
        return False

    config = CONFIG + 'parameters { key: "execute_delay_ms" value { string_value: "100" } }'
    with serving(tmp_path, config) as (server, quotas):

        async def ask() -> None:
            asking = [asyncio.create_task(_ask_on(server, keys["alice"], 1, note)) for _ in range(6)]
            while "alice" not in quotas.counters.by_label or quotas.counters.by_label["alice"].admitted < 6:
                await asyncio.sleep(0.001)
            stopping = asyncio.run_coroutine_threadsafe(server.stop(), server.loop)
            await asyncio.wait_for(asyncio.gather(*asking), 60)
            await asyncio.wrap_future(stopping)

        asyncio.run(ask())
        assert quotas.counters.by_label["alice"].waited_s > 0
    assert sum(answered) == 6
