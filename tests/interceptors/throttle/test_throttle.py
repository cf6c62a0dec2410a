"""The quota of each caller, by the kit, by arithmetic and over real sockets."""

from __future__ import annotations

import math
import queue
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient import grpc as grpc_client

from headrace import Caller, ExtensionOperation, Operation, ResourceExhausted, ServerOptions, Watch
from headrace_testing import InterceptorConformance, RefusedOperation
from headrace_throttle import Throttle, ThrottleOptions

CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
BODY = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}


class TestConcurrent(InterceptorConformance):
    plugin, interceptor = "headrace_throttle", "throttle"

    def options(self) -> Mapping[str, Any]:
        return {"plugin_options": [ThrottleOptions(concurrent=3)]}

    def refusals(self) -> Sequence[RefusedOperation]:
        return [RefusedOperation(ResourceExhausted, after=3)]


class TestRate(InterceptorConformance):
    plugin, interceptor = "headrace_throttle", "throttle"

    def options(self) -> Mapping[str, Any]:
        return {"plugin_options": [ThrottleOptions(rate=0.001, burst=60)]}

    def refusals(self) -> Sequence[RefusedOperation]:
        return [RefusedOperation(ResourceExhausted, after=60)]


class Throttled:
    """The interceptor with a clock that stands still until a test turns it."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 1000.0
        self.made = Throttle(ServerOptions(plugin_options=[ThrottleOptions(**options)]), lambda: self.now_s)

    def ask(self, peer: str = "192.0.2.1", principal: str = "", count: int = 1) -> list[Caller]:
        """Ask ``count`` inferences, each of which must be admitted."""
        callers = []
        for _ in range(count):
            callers.append(Caller("http", peer, principal=principal))
            watch = self.made.admit(callers[-1], Operation.INFER, "m")
            assert isinstance(watch, Watch)
            callers[-1].watch(watch)
        return callers

    def refused(self, peer: str = "192.0.2.1") -> ResourceExhausted:
        with pytest.raises(ResourceExhausted) as raised:
            self.ask(peer)
        return raised.value


@pytest.mark.parametrize(("options", "at_once"), [({"rate": 4}, 4), ({"rate": 0.5}, 1), ({"rate": 2, "burst": 7}, 7)])
def test_so_many_come_at_once_and_then_the_rate_of_them(options: dict[str, Any], at_once: int) -> None:
    throttled, rate = Throttled(**options), options["rate"]
    throttled.ask(count=at_once)
    throttled.refused()
    for _ in range(3):
        throttled.now_s += 0.9 / rate
        throttled.refused()
        throttled.now_s += 0.1001 / rate
        throttled.ask()
    throttled.now_s += 1e6
    throttled.ask(count=at_once)
    throttled.refused()


@pytest.mark.parametrize(("rate", "seconds"), [(4, 1), (0.5, 2), (0.1, 10), (0.03, 34)])
def test_a_refusal_says_after_how_many_seconds_the_next_is_admitted(rate: float, seconds: int) -> None:
    throttled = Throttled(rate=rate, burst=1)
    throttled.ask()
    refusal = throttled.refused()
    assert refusal.retry_after_s is not None
    assert math.ceil(refusal.retry_after_s) == seconds
    throttled.now_s += seconds
    throttled.ask()


def test_what_is_refused_costs_nothing_of_the_quota() -> None:
    throttled = Throttled(rate=1, burst=1)
    throttled.ask()
    for _ in range(10):
        throttled.refused()
    throttled.now_s += 1.001
    throttled.ask()


def test_an_inference_counts_until_it_is_over() -> None:
    throttled = Throttled(concurrent=2)
    first, second = throttled.ask(count=2)
    assert throttled.refused().message == "the address '192.0.2.1' has 2 inferences in flight, which is the limit"
    first.end()
    first.end()
    (third,) = throttled.ask()
    throttled.refused()
    second.end()
    third.end()
    throttled.ask(count=2)


def test_an_inference_refused_for_its_concurrency_takes_no_token() -> None:
    throttled = Throttled(rate=1, burst=3, concurrent=1)
    (caller,) = throttled.ask()
    throttled.refused()
    caller.end()
    (caller,) = throttled.ask()
    caller.end()
    throttled.ask()


def test_callers_have_quotas_of_their_own_and_a_principal_has_one_wherever_it_comes_from() -> None:
    throttled = Throttled(concurrent=1)
    throttled.ask("192.0.2.1")
    throttled.ask("192.0.2.2")
    throttled.ask("192.0.2.1", "alice")
    throttled.ask("192.0.2.9", "192.0.2.1")  # a principal that is called like an address
    with pytest.raises(ResourceExhausted, match="principal 'alice'"):
        throttled.ask("192.0.2.3", "alice")


@pytest.mark.parametrize(
    ("operation", "transport", "is_counted"),
    [
        (Operation.INFER, "http", True),
        (Operation.INFER, "lines", True),
        (Operation.GENERATE, "http", True),
        (ExtensionOperation("chat"), "http", True),
        (ExtensionOperation("own", "metadata"), "http", False),
        (Operation.OPEN_STREAM, "grpc", False),
        (Operation.LIVE, "http", False),
        (Operation.LOAD, "http", False),
        (Operation.METRICS, "metrics", False),
        (Operation.INFER, "program", False),
        (Operation.INFER, "model", False),
    ],
)
def test_only_inferences_from_outside_count(operation: Any, transport: str, is_counted: bool) -> None:
    made = Throttled(concurrent=1).made
    assert isinstance(made.admit(Caller(transport, "192.0.2.1"), operation, ""), Watch) is is_counted


def test_a_request_on_a_stream_counts_and_one_that_belongs_to_another_does_not() -> None:
    made = Throttled(concurrent=9).made
    for operation, is_counted in ((Operation.OPEN_STREAM, True), (ExtensionOperation("chat"), False)):
        outer = Caller("grpc", "192.0.2.1")
        outer.operation = operation
        assert isinstance(made.admit(outer.for_another_operation(), Operation.INFER, "m"), Watch) is is_counted


def test_callers_whose_quota_is_whole_are_forgotten_and_no_others() -> None:
    throttled = Throttled(rate=1, burst=2)
    for number in range(1000):
        throttled.now_s += 0.1
        for caller in throttled.ask(f"peer {number}"):
            caller.end()
    assert len(throttled.made.quotas) <= 12  # those of the last second, and the one that asks
    (busy,) = throttled.ask("busy")
    throttled.now_s += 1e6
    for number in range(1000):
        throttled.ask(f"other {number}")
    assert ("address", "busy") in throttled.made.quotas
    busy.end()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rate": -1}, "--throttle-rate is -1; the least is 0"),
        ({"rate": float("nan")}, "--throttle-rate is nan; it is a finite number"),
        ({"rate": float("inf")}, "--throttle-rate is inf; it is a finite number"),
        ({"rate": 1, "burst": -1}, "--throttle-burst is -1; the least is 0"),
        ({"concurrent": -3}, "--throttle-concurrent is -3; the least is 0"),
        ({"burst": 3}, "--throttle-burst needs --throttle-rate"),
    ],
)
def test_flags_that_cannot_be_right_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        ThrottleOptions(**given)


def test_without_a_flag_the_server_has_no_interceptor() -> None:
    assert not Throttle(ServerOptions(plugin_options=[ThrottleOptions()])).enabled


def test_over_real_sockets_the_second_inference_is_refused_with_the_time_to_wait(
    write_model: Any, headrace_server: Any
) -> None:
    write_model(CONFIG, name="m")
    server = headrace_server(plugin_options=[ThrottleOptions(rate=0.05)])
    url = f"http://127.0.0.1:{server.options.http_port}"
    assert httpx.post(f"{url}/v2/models/m/infer", json=BODY).status_code == 200
    refused = httpx.post(f"{url}/v2/models/no_such_model/infer", content=b"{")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "20")
    assert refused.json() == {"error": "the address '127.0.0.1' may ask 0.05 inferences per second"}
    assert httpx.get(f"{url}/v2/health/ready").status_code == 200
    server.infer("m", {"x": np.ones((1, 1), np.float32)})  # the program's own


def test_each_request_on_a_grpc_stream_counts(write_model: Any, headrace_server: Any) -> None:
    write_model(CONFIG, name="m")
    server = headrace_server(plugin_options=[ThrottleOptions(rate=0.001, burst=2)])
    answers: queue.Queue[str] = queue.Queue()
    tensor = grpc_client.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.put(str(error)))
        for _ in range(3):
            client.async_stream_infer("m", [tensor])
        found = sorted(answers.get(timeout=60) for _ in range(3))
        client.stop_stream()
    assert found == ["None", "None", "the address '127.0.0.1' may ask 0.001 inferences per second"]
