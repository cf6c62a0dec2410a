"""Triton's switches that delay gRPC calls, as the stock client's time-outs find them on both hosts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from headrace import ConfigError
from headrace_test_switches.delays import Delays, variables_set
from headrace_testing import ExtensionConformance, ServedExtension

if TYPE_CHECKING:
    from tests.conftest import Headrace

CONFIG = """backend: "identity" max_batch_size: 8 dynamic_batching { }
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
OTHER = "TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC"
GRPC = "TRITONSERVER_DELAY_GRPC_"
HOSTS = ["grpc", "grpcio"]
Client = Any
Served = Callable[..., "tuple[Headrace, Client]"]


class TestKit(ExtensionConformance):
    plugin, extension = "headrace_test_switches", "test-switches"

    @pytest.fixture(autouse=True)
    def switched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(f"{GRPC}RESPONSE", "1")

    def ask(self, served: ServedExtension) -> None:
        began = time.monotonic()
        served.grpc("/inference.GRPCInferenceService/ServerLive", b"")
        assert time.monotonic() - began < 20


@pytest.fixture
def served(serve: Callable[..., Headrace], tmp_path: Path) -> Iterator[Served]:
    clients: list[Client] = []

    def start(host: str, *words: str, **environ: str) -> tuple[Headrace, Client]:
        (tmp_path / "m/1").mkdir(parents=True)
        (tmp_path / "m/config.pbtxt").write_text(CONFIG)
        server = serve(f"--model-repository={tmp_path}", f"--grpc-server={host}", *words, environ=environ)
        clients.append(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}"))
        return server, clients[0]

    yield start
    for client in clients:
        client.close()


def tensor() -> Any:
    return tritonclient.grpc.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))


@contextmanager
def too_late() -> Iterator[None]:
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        yield


@contextmanager
def takes(at_least_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert at_least_s <= time.monotonic() - began < at_least_s + 20


@pytest.mark.parametrize("host", HOSTS)
def test_other_operations_than_inference_are_delayed(served: Served, host: str) -> None:
    server, client = served(host, **{OTHER: "1"})
    assert [line for line in server.lines if f"{OTHER}=1 delays gRPC calls" in line and re.match("W", line)]
    calls: list[Callable[..., Any]] = [
        client.is_server_live, client.is_server_ready, client.get_server_metadata, client.get_model_repository_index,
        partial(client.is_model_ready, "m"), partial(client.get_model_metadata, "m"),
        partial(client.get_model_config, "m"), client.get_inference_statistics, client.get_log_settings,
    ]  # fmt: skip
    for call in calls:
        with too_late():
            call(client_timeout=0.2)
    with takes(1):
        assert client.get_server_metadata(client_timeout=20).name == "triton"
    began = time.monotonic()
    client.infer("m", [tensor()], client_timeout=20)
    assert time.monotonic() - began < 1, "an inference is not delayed"
    assert server.get("/v2")[0] == 200


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("names", [("RESPONSE",), ("PROCESS", "PROCESS_ENTRY")])
def test_inferences_are_delayed(served: Served, host: str, names: tuple[str, ...]) -> None:
    _, client = served(host, **{f"{GRPC}{name}": str(1000 // len(names)) for name in names})
    with too_late():
        client.infer("m", [tensor()], client_timeout=0.2)
    with takes(1):
        assert client.infer("m", [tensor()], client_timeout=20).as_numpy("y").tolist() == [[1]]
    assert client.is_server_live(client_timeout=0.9)
    executed = client.get_inference_statistics("m").model_stats[0].execution_count
    assert executed == (2 if names == ("RESPONSE",) else 1), "what was given up in time has not run"


@pytest.mark.parametrize("host", HOSTS)
def test_a_refusal_is_delayed(served: Served, host: str) -> None:
    _, client = served(host, **{f"{GRPC}PROCESS": "300"})
    with takes(0.3), pytest.raises(InferenceServerException, match="unknown model: 'none'"):
        client.infer("none", [tensor()], client_timeout=20)


@pytest.mark.parametrize("host", HOSTS)
def test_each_response_of_a_stream_is_delayed_and_so_is_its_end(
    served: Served, host: str, wait_until: Callable[..., None]
) -> None:
    _, client = served(host, **{f"{GRPC}RESPONSE": "300", f"{GRPC}COMPLETE": "700"})
    found: list[Any] = []
    with takes(3 * 0.3 + 0.7):
        client.start_stream(lambda result, error: found.append(error or result))
        for _ in range(3):
            client.async_stream_infer("m", [tensor()])
        wait_until(lambda: len(found) == 3, "three responses")
        client.stop_stream()
    assert [each.as_numpy("y").tolist() for each in found] == [[[1]]] * 3
    client.start_stream(lambda result, error: found.append(error or result), stream_timeout=0.1)
    client.async_stream_infer("m", [tensor()])
    wait_until(lambda: len(found) == 4, "the stream ends")
    assert "Deadline Exceeded" in str(found[3])


@pytest.mark.parametrize("host", HOSTS)
def test_a_cancellation_is_delayed(served: Served, host: str, wait_until: Callable[..., None]) -> None:
    """A cancelled waiting request still runs if the delay of the cancellation is longer."""
    server, client = served(
        host, **{f"{GRPC}NOTIFICATION": "30000", f"{GRPC}ENQUEUE": "30000", "TRITONSERVER_DELAY_SCHEDULER": "2"}
    )
    found: list[Any] = []
    call = client.async_infer("m", [tensor()], callback=lambda result, error: found.append(error or result))
    server.wait_until_pending("m", 1)
    call.cancel()
    wait_until(lambda: bool(found), "the client is told at once")
    assert "cancelled" in str(found[0]).lower()
    assert client.infer("m", [tensor()], client_timeout=20).as_numpy("y").tolist() == [[1]]
    assert client.get_inference_statistics("m").model_stats[0].inference_count == 2


def test_without_a_switch_nothing_is_wrapped_or_logged(served: Served) -> None:
    server, client = served("grpc", **{OTHER: "0", f"{GRPC}RESPONSE": ""})
    assert client.is_server_live()
    assert "delays gRPC calls" not in server.log


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "3600001", "9" * 5000, "٣"])
def test_an_invalid_delay_stops_the_start(value: str) -> None:
    with pytest.raises(ConfigError, match=f"{GRPC}RESPONSE is .* not a whole number from 0 to 3600000"):
        Delays.from_environ({f"{GRPC}RESPONSE": value})


def test_delays_are_in_seconds_whatever_the_unit_of_the_variable() -> None:
    environ = {OTHER: "2", f"{GRPC}PROCESS": "1", f"{GRPC}PROCESS_ENTRY": "2", f"{GRPC}COMPLETE": "0"}
    assert Delays.from_environ(environ) == Delays(other_response_s=2, request_s=0.003)
    assert variables_set(environ) == {OTHER: "2", f"{GRPC}PROCESS": "1", f"{GRPC}PROCESS_ENTRY": "2"}
