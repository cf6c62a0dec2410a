"""The quota of each caller, by the kit, by arithmetic and over real sockets."""

from __future__ import annotations

import asyncio
import json
import math
import queue
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient import grpc as grpc_client

from headrace import Caller, ExtensionOperation, Operation, Outcome, ResourceExhausted, ServerOptions, Watch
from headrace_quotas import QuotaOptions, Quotas, use_table
from headrace_quotas.quota_file import QuotaBook
from headrace_testing import InterceptorConformance, RefusedOperation

CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
BODY = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}


OVER = Outcome(None, 0, 0)


def in_flight(quotas: Quotas) -> int:
    """Return all requests in flight. Three counters must agree."""
    counts = [
        sum(each.account.in_flight for each in quotas.table.tenants.values()),
        sum(each.in_flight for each in quotas.table.uses.values()),
        sum(each.in_flight + each.waiting for each in quotas.table.gates.values()),
    ]
    assert len(set(counts)) == 1, counts
    return counts[0]


class TestInFlight(InterceptorConformance):
    plugin, interceptor = "headrace_quotas", "quotas"

    def options(self) -> Mapping[str, Any]:
        return {"plugin_options": [QuotaOptions(in_flight=3)]}

    def refusals(self) -> Sequence[RefusedOperation]:
        return [RefusedOperation(ResourceExhausted, after=3)]


class TestRate(InterceptorConformance):
    plugin, interceptor = "headrace_quotas", "quotas"

    def options(self) -> Mapping[str, Any]:
        return {"plugin_options": [QuotaOptions(rate=0.001, burst=60)]}

    def refusals(self) -> Sequence[RefusedOperation]:
        return [RefusedOperation(ResourceExhausted, after=60)]


class Limited:
    """The interceptor with a manual clock."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 1000.0
        self.quotas = Quotas(ServerOptions(plugin_options=[QuotaOptions(**options)]), lambda: self.now_s)

    def ask(self, peer: str = "192.0.2.1", principal: str = "", count: int = 1) -> list[Caller]:
        """Ask ``count`` inferences, each of which must be admitted."""
        callers = []
        for _ in range(count):
            callers.append(Caller("http", peer, principal=principal))
            watch = self.quotas.admit(callers[-1], Operation.INFER, "m")
            assert isinstance(watch, Watch)
            callers[-1].watch(watch)
        return callers

    def refused(self, peer: str = "192.0.2.1") -> ResourceExhausted:
        with pytest.raises(ResourceExhausted) as raised:
            self.ask(peer)
        return raised.value


@pytest.mark.parametrize(("options", "at_once"), [({"rate": 4}, 4), ({"rate": 0.5}, 1), ({"rate": 2, "burst": 7}, 7)])
def test_a_burst_is_admitted_at_once_and_then_the_rate(options: dict[str, Any], at_once: int) -> None:
    limited, rate = Limited(**options), options["rate"]
    limited.ask(count=at_once)
    limited.refused()
    for _ in range(3):
        limited.now_s += 0.9 / rate
        limited.refused()
        limited.now_s += 0.1001 / rate
        limited.ask()
    limited.now_s += 1e6
    limited.ask(count=at_once)
    limited.refused()


@pytest.mark.parametrize(("rate", "seconds"), [(4, 1), (0.5, 2), (0.1, 10), (0.03, 34)])
def test_a_refusal_has_the_seconds_until_the_next_admission(rate: float, seconds: int) -> None:
    limited = Limited(rate=rate, burst=1)
    limited.ask()
    refusal = limited.refused()
    assert refusal.retry_after_s is not None
    assert math.ceil(refusal.retry_after_s) == seconds
    limited.now_s += seconds
    limited.ask()


def test_a_refusal_is_not_charged() -> None:
    limited = Limited(rate=1, burst=1)
    limited.ask()
    for _ in range(10):
        limited.refused()
    limited.now_s += 1.001
    limited.ask()


def test_an_inference_counts_until_it_ends() -> None:
    limited = Limited(in_flight=2)
    first, second = limited.ask(count=2)
    assert limited.refused().message == "the address '192.0.2.1' has 2 inferences in flight, which is the limit"
    first.end()
    first.end()
    (third,) = limited.ask()
    limited.refused()
    second.end()
    third.end()
    limited.ask(count=2)


def test_an_inference_refused_for_its_concurrency_takes_no_token() -> None:
    limited = Limited(rate=1, burst=3, in_flight=1)
    (caller,) = limited.ask()
    limited.refused()
    caller.end()
    (caller,) = limited.ask()
    caller.end()
    limited.ask()


def test_each_caller_has_its_own_quota_and_a_principal_one_from_any_address() -> None:
    limited = Limited(in_flight=1)
    limited.ask("192.0.2.1")
    limited.ask("192.0.2.2")
    limited.ask("192.0.2.1", "alice")
    limited.ask("192.0.2.9", "192.0.2.1")  # a principal that is called like an address
    with pytest.raises(ResourceExhausted, match="principal 'alice'"):
        limited.ask("192.0.2.3", "alice")


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
    quotas = Limited(in_flight=1).quotas
    assert isinstance(quotas.admit(Caller(transport, "192.0.2.1"), operation, ""), Watch) is is_counted


def test_a_request_on_a_stream_counts_and_a_nested_one_does_not() -> None:
    for operation, refused in ((Operation.OPEN_STREAM, True), (ExtensionOperation("chat"), False)):
        quotas = Limited(in_flight=1).quotas
        outer = Caller("grpc", "192.0.2.1")
        outer.operation = operation
        verdict = quotas.admit(outer, operation, "")
        assert isinstance(verdict, Watch) is not refused
        inner = quotas.admit(outer.for_another_operation(), Operation.INFER, "m")
        assert isinstance(inner, Watch)
        for watch in (inner, verdict):
            if isinstance(watch, Watch):
                watch.ended(OVER)
        assert in_flight(quotas) == 0


def test_only_callers_with_an_unused_quota_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use_table, "KEEP", 10)
    limited = Limited(rate=1, burst=2)
    for number in range(1000):
        limited.now_s += 0.1
        for caller in limited.ask(f"peer {number}"):
            caller.end()
    assert len(limited.quotas.table.uses) <= 14  # the ten that are kept, and some of the last second
    (busy,) = limited.ask("busy")
    limited.now_s += 1e6
    for number in range(1000):
        limited.ask(f"other {number}")
    assert (("busy",), "m") in limited.quotas.table.uses
    assert len(limited.quotas.table.tenants) == len(limited.quotas.table.uses)
    busy.end()


def test_a_flood_of_new_callers_is_bounded_although_none_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use_table, "KEEP", 10)
    monkeypatch.setattr(use_table, "MAX_USES", 50)
    limited = Limited(rate=0.001, burst=2)
    (busy,) = limited.ask("busy")
    for number in range(500):
        limited.ask(f"peer {number}")[0].end()
    assert len(limited.quotas.table.uses) <= 51
    assert limited.quotas.table.tenants.keys() == {key for key, _ in limited.quotas.table.uses}
    assert (("busy",), "m") in limited.quotas.table.uses
    busy.end()


@pytest.mark.parametrize(
    ("peer", "alike", "other"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::2", "2001:db8:1:3::1"),
        ("fe80::1%eth0", "fe80::2", "fe80:0:0:1::1"),
        ("::ffff:192.0.2.1", "192.0.2.1", "::ffff:192.0.2.2"),
    ],
)
def test_an_ipv6_network_is_one_caller(peer: str, alike: str, other: str) -> None:
    limited = Limited(in_flight=1)
    limited.ask(peer)
    limited.refused(alike)
    limited.ask(other)


# ---------------------------------------------------------------------- the quota file


class Filed(Limited):
    """The interceptor with a quota file."""

    def __init__(self, folder: Path, document: Any, workers: int = 0) -> None:
        self.now_s = 1000.0
        self.path = folder / "quotas.json"
        self.path.write_text(json.dumps(document))
        options = ServerOptions(plugin_options=[QuotaOptions(file=str(self.path))], workers=workers)
        self.quotas = Quotas(options, lambda: self.now_s)
        self.quotas._is_ticking = True  # there is no event loop

    def ask(  # type: ignore[override]
        self, principal: str = "alice", model: str = "m", size: int = 0, count: int = 1, peer: str = "192.0.2.1"
    ) -> list[Caller]:
        callers = []
        for _ in range(count):
            callers.append(Caller("http", peer, principal=principal, body_bytes=size))
            watch = self.quotas.admit(callers[-1], Operation.INFER, model)
            assert isinstance(watch, Watch)
            callers[-1].watch(watch)
        return callers

    def refuses(self, *arguments: Any, **more: Any) -> ResourceExhausted:
        with pytest.raises(ResourceExhausted) as raised:
            self.ask(*arguments, **more)
        return raised.value


def test_limits_come_from_the_name_then_a_pattern_then_the_defaults(tmp_path: Path) -> None:
    filed = Filed(
        tmp_path,
        {
            "defaults": {"in_flight": 1},
            "principals": {"team-*": {"in_flight": 3}, "team-a": {"in_flight": 2}, "*": {"in_flight": 4}},
            "anonymous": {"in_flight": 5},
        },
    )
    for principal, most in (("team-a", 2), ("team-b", 3), ("alice", 4), ("", 5)):
        filed.ask(principal, count=most)
        filed.refuses(principal)


def test_each_model_counts_alone_and_all_models_together(tmp_path: Path) -> None:
    filed = Filed(tmp_path, {"defaults": {"in_flight": 3, "models": {"llm*": {"in_flight": 1}}}})
    filed.ask(model="llm_a")
    refusal = filed.refuses(model="llm_a")
    assert refusal.message == "the principal 'alice' with model 'llm_a' has 1 inferences in flight, which is the limit"
    filed.ask(model="llm_b")
    (other,) = filed.ask(model="digits")
    refusal = filed.refuses(model="digits")
    assert refusal.message == "the principal 'alice' has 3 inferences in flight, which is the limit"
    other.end()
    filed.refuses(model="llm_b")
    filed.ask(model="digits")


def test_sent_bytes_are_charged_and_the_next_request_waits(tmp_path: Path) -> None:
    filed = Filed(tmp_path, {"defaults": {"input_bytes_per_second": 1000, "input_bytes_burst": 2000}})
    filed.ask(size=1999)
    filed.ask(size=3001)  # one byte was left, so that no request is too large for ever
    refusal = filed.refuses()
    assert refusal.message == "the principal 'alice' may send 1000 bytes per second"
    assert refusal.retry_after_s == pytest.approx(3.0)  # 5000 bytes used of 2000
    filed.now_s += 2.99
    filed.refuses()
    filed.now_s += 0.011
    filed.ask()


def test_a_refusal_by_one_limit_charges_no_other(tmp_path: Path) -> None:
    filed = Filed(
        tmp_path,
        {"defaults": {"requests_per_second": 1, "burst": 2, "models": {"one": {"in_flight": 1}}}},
    )
    filed.ask(model="one")
    for _ in range(5):
        filed.refuses(model="one")
    filed.ask(model="two")
    filed.refuses(model="two")


def test_workers_share_each_rate(tmp_path: Path) -> None:
    filed = Filed(tmp_path, {"defaults": {"requests_per_second": 4, "burst": 8, "in_flight": 5}}, workers=2)
    callers = filed.ask(count=3)  # the half of five, rounded up
    assert "in flight" in filed.refuses().message
    callers[0].end()
    filed.ask()  # the half of the burst of eight
    callers[1].end()
    assert filed.refuses().message == "the principal 'alice' may ask 2 inferences per second"


def test_a_changed_file_applies_to_known_callers_and_keeps_their_use(tmp_path: Path) -> None:
    filed = Filed(tmp_path, {"defaults": {"requests_per_second": 1, "burst": 10, "models": {"m": {"in_flight": 9}}}})
    callers = filed.ask(count=6)
    book = {"defaults": {"requests_per_second": 2, "burst": 8, "in_flight": 8, "models": {"m": {"in_flight": 7}}}}
    filed.path.write_text(json.dumps(book))
    asyncio.run(filed.quotas._follow(QuotaBook.read(filed.path)))
    filed.ask()  # of eight at once, six are used
    assert "with model 'm' has 7 inferences" in filed.refuses().message
    filed.ask(model="n")
    callers[0].end()
    assert "may ask 2 inferences per second" in filed.refuses(model="n").message
    for caller in callers:
        caller.end()


def test_a_caller_that_retries_gets_delayed_refusals() -> None:
    async def ask() -> tuple[int, float]:
        quotas = Quotas(ServerOptions(plugin_options=[QuotaOptions(rate=0.001, burst=1)]))
        loop, prompt, late = asyncio.get_running_loop(), 0, []
        began = loop.time()
        quotas.admit(Caller("http", "192.0.2.1"), Operation.INFER, "m")
        for _ in range(40):
            try:
                verdict = quotas.admit(Caller("http", "192.0.2.1"), Operation.INFER, "m")
                assert isinstance(verdict, asyncio.Future)
                late.append(verdict)
            except ResourceExhausted:
                prompt += 1
        late.pop().cancel()  # it has left
        with pytest.raises(ResourceExhausted, match="may ask"):
            await late[0]
        took_s = loop.time() - began
        quotas.admit(Caller("http", "192.0.2.2"), Operation.INFER, "m")
        with pytest.raises(ResourceExhausted):  # of others, at once
            quotas.admit(Caller("http", "192.0.2.2"), Operation.INFER, "m")
        for each in late:
            each.cancel()
        return prompt, took_s

    prompt, took_s = asyncio.run(ask())
    assert 20 <= prompt <= 22
    assert 0.02 < took_s < 20


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rate": -1}, "--quota-rate is -1; the least is 0"),
        ({"rate": float("nan")}, "--quota-rate is nan; it is a finite number"),
        ({"rate": float("inf")}, "--quota-rate is inf; it is a finite number"),
        ({"rate": 1, "burst": -1}, "--quota-burst is -1; the least is 0"),
        ({"in_flight": -3}, "--quota-in-flight is -3; the least is 0"),
        ({"burst": 3}, "--quota-burst needs --quota-rate"),
        ({"tenants": -1}, "--quota-tenants is -1; the least is 0"),
        (
            {"file": "x", "rate": 1},
            "--quota-file has the limits of all callers: --quota-rate, --quota-burst and --quota-in-flight cannot be "
            "set beside it",
        ),
    ],
)
def test_invalid_flags_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        QuotaOptions(**fields)


def test_without_a_flag_the_server_has_no_interceptor() -> None:
    assert not Quotas(ServerOptions(plugin_options=[QuotaOptions()])).enabled


def test_over_real_sockets_the_second_inference_is_refused_with_the_time_to_wait(
    write_model: Any, headrace_server: Any
) -> None:
    write_model(CONFIG, name="m")
    server = headrace_server(plugin_options=[QuotaOptions(rate=0.05)])
    url = f"http://127.0.0.1:{server.options.http_port}"
    assert httpx.post(f"{url}/v2/models/m/infer", json=BODY).status_code == 200
    refused = httpx.post(f"{url}/v2/models/no_such_model/infer", content=b"{")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "20")
    assert refused.json() == {"error": "the address '127.0.0.1' may ask 0.05 inferences per second"}
    assert httpx.get(f"{url}/v2/health/ready").status_code == 200
    server.infer("m", {"x": np.ones((1, 1), np.float32)})  # the program's own


def test_each_request_on_a_grpc_stream_counts(write_model: Any, headrace_server: Any) -> None:
    write_model(CONFIG, name="m")
    server = headrace_server(plugin_options=[QuotaOptions(rate=0.001, burst=2)])
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
