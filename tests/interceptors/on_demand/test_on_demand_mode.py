"""Models that are loaded at their first request: waits, evictions and refusals."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient import grpc as grpc_client
from tritonclient import http as http_client
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headrace import Caller, HeadraceError, InferRequest, NotFound, Operation, Unavailable, Watch
from headrace.messages.request import as_tensors
from headrace_on_demand import OnDemandOptions
from headrace_testing import InterceptorConformance, RefusedOperation
from tests.interceptors.on_demand.conftest import MIB, SIZE, Repository, refusal, until

#: Room for two models of the test, and for one: a model counts its files 3.5 times while it is loaded.
TWO, ONE = f"{5 * SIZE // MIB}MiB", f"{4 * SIZE // MIB}MiB"
BODY = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}


# ---------------------------------------------------------------------- one load


def test_many_callers_share_one_load(repository: Repository) -> None:
    repository.add("a")
    repository.probe.loading["a"] = threading.Event()

    async def scenario() -> None:
        asking = [asyncio.ensure_future(repository.infer("a", number)) for number in range(50)]
        await until(lambda: repository.probe.loads["a"])
        assert repository.mode.loads.states["a"].waiting == 50
        repository.probe.loading["a"].set()
        assert await asyncio.gather(*asking) == [number + 1 for number in range(50)]
        assert repository.probe.loads["a"] == 1
        assert repository.mode.loads.loaded == 1

    repository.run(scenario)


def test_a_failed_load_is_retried_only_after_a_pause(repository: Repository) -> None:
    repository.add("a")
    repository.probe.broken["a"] = "no weights here"
    repository.probe.loading["a"] = threading.Event()

    async def scenario() -> None:
        asking = [asyncio.ensure_future(refusal(repository.infer("a"))) for _ in range(100)]
        await until(lambda: repository.probe.loads["a"])
        repository.probe.loading["a"].set()
        for error in await asyncio.gather(*asking):
            assert isinstance(error, Unavailable)
            assert "model 'a' could not be loaded" in error.message
            assert "no weights here" in error.message
            assert error.retry_after_s is not None
            assert 29 < error.retry_after_s <= 30
        again = await refusal(repository.infer("a"))
        assert "the next attempt is in 30 s" in again.message
        assert repository.probe.loads["a"] == 1
        assert not await repository.server.is_model_ready("a")
        assert repository.server.ready
        (line,) = await repository.server.list_repository()
        assert "no weights here" in line.reason
        del repository.probe.broken["a"]
        await repository.server.load("a")  # a load by name waits for no pause
        assert await repository.infer("a") == 2
        assert repository.probe.loads["a"] == 2

    repository.run(scenario, pause=30)


def test_after_the_pause_the_next_request_tries_again(repository: Repository) -> None:
    repository.add("a")
    repository.probe.broken["a"] = "not yet"

    async def scenario() -> None:
        assert "not yet" in (await refusal(repository.infer("a"))).message
        del repository.probe.broken["a"]
        await asyncio.sleep(0.06)
        assert await repository.infer("a") == 2

    repository.run(scenario, pause=0.05)


def test_a_model_that_calls_another_one_loads_it(repository: Repository) -> None:
    repository.add("caller", "called")
    repository.probe.calls["caller"] = "called"

    async def scenario() -> None:
        assert await repository.infer("caller") == 3
        assert repository.resident == {"caller", "called"}
        repository.probe.calls["caller"] = "nope"
        assert "'nope' is not found" in (await refusal(repository.infer("caller"))).message

    repository.run(scenario)


def test_an_extension_and_a_program_load_the_models_they_use(repository: Repository) -> None:
    repository.add("a", "b")

    async def scenario() -> None:
        request = InferRequest("a", as_tensors({"x": np.array([1], np.float32)}))
        answers = [answer async for answer in repository.server.engine.responses(request)]
        assert [np.asarray(answer.outputs["y"]).tolist() for answer in answers] == [[2]]
        assert isinstance(await refusal(repository.infer("nope")), NotFound)
        assert "nope" not in repository.mode.loads.states

    repository.run(scenario)


# ---------------------------------------------------------------------- the budget


def test_the_least_recently_used_model_is_evicted(repository: Repository) -> None:
    repository.add("a", "b", "c")

    async def scenario() -> None:
        for name in ("a", "b", "a", "c"):
            assert await repository.infer(name) == 2
        assert repository.resident == {"a", "c"}
        assert repository.probe.unloads == ["b"]
        assert repository.mode.loads.budget.used("host") == 2 * SIZE + 2 * _code_bytes(repository)

    repository.run(scenario, memory=TWO)


def _code_bytes(repository: Repository) -> int:
    return (repository.folder / "a/1/model.py").stat().st_size


def test_a_model_above_the_budget_is_refused_at_once(repository: Repository) -> None:
    repository.add("a", "b")
    repository.add("large", size=6 * SIZE)
    repository.add_ensemble("both", "a", "b", "large")

    async def scenario() -> None:
        assert await repository.infer("a") == 2
        for name in ("large", "both"):
            error = await refusal(repository.infer(name))
            assert "all models together may use 320 MiB (--on-demand-memory)" in error.message
            assert "384 MiB" in error.message
        assert "large: 384 MiB" in error.message
        assert repository.resident == {"a"}
        assert repository.probe.unloads == []

    repository.run(scenario, memory=TWO)


def test_a_request_in_flight_keeps_its_model(repository: Repository) -> None:
    repository.add("a", "b")
    repository.probe.executing["a"] = threading.Event()

    async def scenario() -> None:
        busy = asyncio.ensure_future(repository.infer("a"))
        await until(lambda: "a" in repository.resident)
        waits = asyncio.ensure_future(repository.infer("b"))
        await asyncio.sleep(0.1)
        assert "a" in repository.mode.loads.open  # and takes more requests
        assert repository.resident == {"a"}
        assert repository.probe.unloads == []
        repository.probe.executing["a"].set()
        assert (await busy, await waits) == (2, 2)
        assert repository.resident == {"b"}

    repository.run(scenario, memory=ONE, patience=30)


def test_a_request_whose_body_is_still_being_read_keeps_its_model(repository: Repository) -> None:
    repository.add("a")

    async def scenario() -> None:
        await repository.server.load("a")
        caller = Caller("http")
        watch = repository.mode.admit(caller, Operation.INFER, "a")
        assert isinstance(watch, Watch)
        caller.watch(watch)
        repository.mode.loads.evict(repository.mode.loads.states["a"], "the test wants it")
        await asyncio.sleep(0.1)
        assert repository.resident == {"a"}
        caller.end()
        await until(lambda: not repository.resident)

    repository.run(scenario)


def test_callers_wait_bounded_for_room(repository: Repository) -> None:
    repository.add("a", "b")
    repository.probe.executing["a"] = threading.Event()

    async def scenario() -> None:
        await repository.server.load("a")
        busy = asyncio.ensure_future(repository.infer("a"))
        await until(lambda: repository.mode.loads.states["a"].in_flight)
        first = asyncio.ensure_future(refusal(repository.infer("b")))
        await until(lambda: repository.mode.loads.states.get("b") and repository.mode.loads.states["b"].waiting)
        full = await refusal(repository.infer("b"))
        assert "1 requests wait for models, which is the limit (--on-demand-max-waiting)" in full.message
        late = await first
        assert "has waited 1 s for room in the memory of models (--on-demand-wait)" in late.message
        for error in (full, late):
            assert isinstance(error, Unavailable)
            assert error.retry_after_s == 1
        await until(lambda: repository.mode.loads.states["b"].loading is None)  # nobody waits for it any more
        assert repository.mode.loads.states["b"].failed is None
        repository.probe.executing["a"].set()
        assert await busy == 2

    repository.run(scenario, memory=ONE, wait=1, max_waiting=1, patience=10)


def test_a_busy_model_is_evicted_after_the_patience(repository: Repository) -> None:
    repository.add("a", "b")
    over = threading.Event()

    async def ask() -> int:
        count = 0
        while not over.is_set():
            assert await repository.infer("a") == 2
            count += 1
        return count

    async def scenario() -> None:
        asking = [asyncio.ensure_future(ask()) for _ in range(4)]
        await until(lambda: "a" in repository.resident)
        assert await repository.infer("b") == 2
        over.set()
        assert min(await asyncio.gather(*asking)) > 0

    repository.run(scenario, memory=ONE, patience=0.05)


def test_an_ensemble_is_loaded_with_its_steps_and_evicted_before_them(repository: Repository) -> None:
    repository.add("a", "b", "c")
    repository.add_ensemble("both", "a", "b")

    async def scenario() -> None:
        assert await repository.infer("both") == 3
        assert repository.resident == {"a", "b", "both"}
        assert await repository.infer("c") == 2
        assert "both" not in repository.resident
        assert len(repository.resident) == 2
        assert await repository.infer("both") == 3

    repository.run(scenario, memory=TWO)


def test_pinned_models_are_loaded_at_start_and_stay(repository: Repository) -> None:
    repository.add("a", "b", "c")
    repository.add("d", config='parameters { key: "control.pinned" value { string_value: "true" } }')

    async def scenario() -> None:
        assert repository.resident == {"a"}
        for name in ("b", "c", "b"):
            await repository.infer(name)
        assert repository.resident == {"a", "b"}
        await repository.infer("d")
        assert repository.resident == {"a", "d"}
        assert repository.probe.loads["a"] == 1

    repository.run(scenario, memory=TWO, pinned="a")


def test_an_idle_model_is_unloaded_when_its_keep_alive_is_over(repository: Repository) -> None:
    repository.add("a")
    repository.add("b", config='parameters { key: "control.keep_alive_seconds" value { string_value: "0" } }')

    async def scenario() -> None:
        await asyncio.gather(repository.infer("a"), repository.infer("b"))
        repository.mode.loads.unload_idle()
        assert repository.resident == {"a", "b"}
        for state in repository.mode.loads.states.values():
            state.used_ns -= 61_000_000_000
        repository.mode.loads.unload_idle()
        await until(lambda: repository.resident == {"b"})

    repository.run(scenario, keep_alive=60)


def test_keep_alive_spares_pinned_models_and_steps_of_loaded_ensembles(repository: Repository) -> None:
    repository.add("pinned", "step")
    repository.add_ensemble("both", "step")
    ensemble = repository.folder / "both/config.pbtxt"
    longer = 'parameters { key: "control.keep_alive_seconds" value { string_value: "0" } }'
    ensemble.write_text(ensemble.read_text() + longer)

    async def scenario() -> None:
        await repository.infer("both")
        for state in repository.mode.loads.states.values():
            state.used_ns -= 61_000_000_000
        repository.mode.loads.unload_idle()
        assert set(repository.mode.loads.open) == {"pinned", "step", "both"}

    repository.run(scenario, keep_alive=60, pinned="pinned")


def test_a_model_is_charged_the_memory_in_its_config(repository: Repository) -> None:
    repository.add("a", config='parameters { key: "control.memory" value { string_value: "150MiB" } }')
    repository.add("b")
    repository.add("wrong", config='parameters { key: "control.memory" value { string_value: "much" } }')
    repository.add("unknown", config='parameters { key: "control.pined" value { string_value: "true" } }')

    async def scenario() -> None:
        await repository.infer("a")
        assert repository.mode.loads.budget.used("host") == 150 * MIB
        await repository.infer("b")
        assert repository.resident == {"b"}
        assert "parameter 'control.memory' is 'much'" in (await refusal(repository.infer("wrong"))).message
        assert "unknown parameter 'control.pined'; known: " in (await refusal(repository.infer("unknown"))).message

    repository.run(scenario, memory=TWO)


def test_a_storm_of_callers_stays_within_the_budget_and_loads_nothing_twice(repository: Repository) -> None:
    names = [f"m{number}" for number in range(6)]
    repository.add(*names)
    used: list[int] = []

    async def scenario() -> None:
        budget, changed = repository.mode.loads.budget, repository.mode.loads.changed

        def note() -> None:
            used.append(budget.used("host"))
            changed()

        repository.mode.loads.changed = note  # type: ignore[method-assign]

        async def client(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(3):
                assert await repository.infer(draw.choice(names)) == 2

        await asyncio.gather(*(client(seed) for seed in range(20)))
        assert max(used) <= budget.limits["host"]
        assert repository.mode.loads.failures == 0
        assert repository.mode.loads.evictions > 0

    repository.run(scenario, memory=f"{7 * SIZE // MIB}MiB")


# ---------------------------------------------------------------------- callers that leave


def test_callers_that_disconnect_do_not_count(repository: Repository) -> None:
    repository.add("a", "b")
    repository.probe.executing["a"] = threading.Event()

    async def scenario() -> None:
        busy = asyncio.ensure_future(repository.infer("a"))
        await until(lambda: "a" in repository.resident)
        asking = [asyncio.ensure_future(repository.infer("b")) for _ in range(20)]
        await until(lambda: repository.mode.loads.states.get("b") and repository.mode.loads.states["b"].waiting == 20)
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)
        assert repository.mode.loads.states["b"].waiting == 0
        repository.probe.executing["a"].set()
        assert await busy == 2
        await until(lambda: repository.mode.loads.states["b"].loading is None)
        assert repository.probe.loads["b"] == 0
        assert repository.resident == {"a"}

    repository.run(scenario, memory=ONE)


def test_a_stopping_server_refuses_waiting_requests(repository: Repository) -> None:
    repository.add("a", "b")
    repository.probe.executing["a"] = threading.Event()
    waiting: list[asyncio.Future[HeadraceError]] = []

    async def scenario() -> None:
        busy = asyncio.ensure_future(repository.infer("a"))
        await until(lambda: "a" in repository.resident)
        waiting.append(asyncio.ensure_future(refusal(repository.infer("b"))))
        await until(lambda: repository.mode.loads.states.get("b"))
        repository.mode.stop()
        assert (await waiting[0]).message == "Server exiting"
        repository.probe.executing["a"].set()
        await busy

    repository.run(scenario, memory=ONE)


# ---------------------------------------------------------------------- over the wire


def test_stock_clients_use_every_model_of_one_server(repository: Repository) -> None:
    repository.add("a", "b")
    repository.probe.broken["b"] = "no weights here"

    def ask() -> None:
        http = http_client.InferenceServerClient(f"127.0.0.1:{repository.port('http')}")
        rpc = grpc_client.InferenceServerClient(f"127.0.0.1:{repository.port('grpc')}")
        with http, rpc:
            for client in (http, rpc):
                assert client.is_server_ready()
                assert client.is_model_ready("a")
                assert not client.is_model_ready("nope")
            assert repository.probe.loads["a"] == 0
            assert [(each["name"], each["reason"]) for each in http.get_model_repository_index()] == [
                ("a", "loaded on demand"),
                ("b", "loaded on demand"),
            ]
            assert http.get_model_metadata("a")["inputs"][0]["name"] == "x"  # loads it
            assert rpc.get_model_config("a").config.name == "a"
            for client, kind in ((http, http_client), (rpc, grpc_client)):
                tensor = kind.InferInput("x", [1], "FP32")
                tensor.set_data_from_numpy(np.array([1], np.float32))
                assert client.infer("a", [tensor]).as_numpy("y").tolist() == [2]
            (line, _) = http.get_model_repository_index()
            assert line == {"name": "a", "version": "1", "state": "READY", "memory_bytes": line["memory_bytes"]}
            assert line["memory_bytes"] >= SIZE
            http.unload_model("a")
            http.load_model("a")
            assert repository.probe.loads["a"] == 2

    def see_refusals() -> None:
        base = f"http://127.0.0.1:{repository.port('http')}"
        page = httpx.get(f"http://127.0.0.1:{repository.port('metrics')}/metrics").text
        assert "headrace_on_demand_loads_total 2.0" in page or "headrace_on_demand_loads_total 2" in page
        assert 'headrace_model_memory_bytes{model="a",version="1"}' in page
        assert httpx.get(f"{base}/v2/models/a/explain").json()["memory_bytes"] >= SIZE
        refused = httpx.post(f"{base}/v2/models/b/infer", json=BODY)
        assert refused.status_code == 503
        assert 25 < int(refused.headers["Retry-After"]) <= 30
        with grpc.insecure_channel(f"127.0.0.1:{repository.port('grpc')}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(service_pb2.ModelInferRequest(model_name="b"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        trailers = {each.key: str(each.value) for each in caught.value.trailing_metadata()}
        assert 25_000 < int(trailers["grpc-retry-pushback-ms"]) <= 30_000
        sent = httpx.post(f"{base}/v2/repository/models/a/load", json={"parameters": {"config": "{}"}})
        assert "a load with parameters is not allowed in model control mode 'on-demand'" in sent.json()["error"]

    async def scenario() -> None:
        await asyncio.to_thread(ask)
        await asyncio.to_thread(see_refusals)

    repository.run(scenario, ports=True, pause=30)


# ---------------------------------------------------------------------- the kit


class TestOnDemand(InterceptorConformance):
    plugin, interceptor = "headrace_on_demand", "on-demand"

    def options(self) -> Mapping[str, Any]:
        return {"model_control_mode": "on-demand", "plugin_options": [OnDemandOptions()]}

    def refusals(self) -> Sequence[RefusedOperation]:
        return ()
