"""Many clients at once: their rows, their waits and their cancellations (docs/spec/behaviours.md sections 2.6 and
6)."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace
    from tests.protocol.conftest import HeldExecution

    Hold = Callable[[Any, str], HeldExecution]

ROW = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}


def asked(model: str, **parameters: Any) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1, 4])
    return pb.ModelInferRequest(
        model_name=model, inputs=[tensor], raw_input_contents=[bytes(16)],
        parameters={name: pb.InferParameter(int64_param=value) for name, value in parameters.items()},
    )  # fmt: skip


@given(requests=st.lists(st.tuples(st.sampled_from(["http", "grpc"]), st.integers(0, 16)), min_size=1, max_size=24))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_interleaving_gives_each_caller_its_own_rows(
    connect: Callable[..., Any], server: Headrace, requests: list[tuple[str, int]]
) -> None:
    """All requests are under way at once, and the server batches them as they arrive."""
    callers = {name: connect(name, server) for name in ("http", "grpc")}
    answered: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    sent: list[Any] = []
    over_http: list[tuple[int, Any]] = []
    for number, (protocol, rows) in enumerate(requests):
        client = callers[protocol]
        sent.append(np.arange(2 * rows, dtype=np.int64).reshape(rows, 2) + 1000 * number)
        tensor = [client.input("IN", sent[-1], "INT64")]
        if protocol == "http":
            over_http.append((number, client.async_infer("rows", tensor, request_id=str(number))))
        else:
            client.async_infer("rows", tensor, lambda result, error, n=number: answered.put((n, result, error)),
                               request_id=str(number))  # fmt: skip
    answers = {number: request.get_result() for number, request in over_http}
    for _ in range(len(requests) - len(over_http)):
        number, result, error = answered.get(timeout=30)
        assert error is None
        answers[number] = result
    for number, rows in enumerate(sent):
        np.testing.assert_array_equal(answers[number].as_numpy("OUT"), rows)
        response = answers[number].get_response()
        assert (response["id"] if isinstance(response, dict) else response.id) == str(number)


def infer_http(server: Headrace, model: str) -> np.ndarray[Any, Any]:
    """One request over a client of its own: a blocking client belongs to one thread."""
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        tensor = tritonclient.http.InferInput("IN", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
        answer: np.ndarray[Any, Any] = client.infer(model, [tensor]).as_numpy("OUT")
        return answer


def test_a_cancelled_call_does_not_affect_the_rest_of_the_batch(server: Headrace, stub: Any, hold: Hold) -> None:
    execution = hold(stub, "slow")
    calls = [stub.ModelInfer.future(asked("slow")) for _ in range(3)]
    server.wait_until_pending("slow", 3)
    calls[1].cancel()
    server.wait_until_pending("slow", 2)
    execution.release()
    for call in (calls[0], calls[2]):
        assert len(call.result(30).raw_output_contents[0]) == 16
    server.wait_until_pending("slow", 0)


def test_a_cancelled_call_gets_no_answer_while_it_runs(server: Headrace, stub: Any, hold: Hold) -> None:
    execution = hold(stub, "slow")
    execution.running.cancel()
    execution.gate.open()
    assert stub.ModelInfer(asked("slow")).model_name == "slow"


def test_a_call_past_its_deadline_ends_and_is_removed_from_the_queue(server: Headrace, stub: Any, hold: Hold) -> None:
    execution = hold(stub, "slow")
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(asked("slow"), timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.wait_until_pending("slow", 0)
    execution.release()


def test_closing_a_stream_cancels_its_requests_only(server: Headrace, stub: Any, hold: Hold) -> None:
    execution = hold(stub, "slow")
    stream = stub.ModelStreamInfer(iter([asked("slow"), asked("slow")]))
    other = stub.ModelInfer.future(asked("slow"))
    server.wait_until_pending("slow", 3)
    stream.cancel()
    server.wait_until_pending("slow", 1)
    execution.release()
    assert other.result(30).model_name == "slow"


def send_and_keep(server: Headrace, model: str) -> socket.socket:
    """A connection over which a request has been sent."""
    content = json.dumps({"inputs": [ROW]}).encode()
    caller = socket.create_connection(("127.0.0.1", server.http), timeout=30)
    caller.sendall(b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
        model.encode(), len(content), content))  # fmt: skip
    return caller


def test_a_disconnect_does_not_affect_the_rest_of_the_batch(http_server: Headrace, hold: Hold) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{http_server.grpc}") as channel, ThreadPoolExecutor(1) as pool:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        cancelled = http_server.metric("nv_inference_request_failure", "slow", reason="CANCELED")
        execution = hold(stub, "slow")
        with send_and_keep(http_server, "slow"):
            http_server.wait_until_pending("slow", 1)
            neighbour = pool.submit(infer_http, http_server, "slow")
            http_server.wait_until_pending("slow", 2)
        http_server.wait_until_pending("slow", 1)
        execution.release()
        np.testing.assert_array_equal(neighbour.result(30), np.ones((1, 4), np.float32))
        assert http_server.metric("nv_inference_request_failure", "slow", reason="CANCELED") == cancelled + 1


def test_clients_that_disconnect_at_once_are_cancelled(http_server: Headrace, hold: Hold) -> None:
    """The end of their stream arrives with their request, before anything has begun for it."""
    with grpc.insecure_channel(f"127.0.0.1:{http_server.grpc}") as channel:
        cancelled = http_server.metric("nv_inference_request_failure", "slow", reason="CANCELED")
        execution = hold(service_pb2_grpc.GRPCInferenceServiceStub(channel), "slow")
        for _ in range(5):
            send_and_keep(http_server, "slow").close()
        http_server.wait_until_metric("nv_inference_request_failure", "slow", cancelled + 5, reason="CANCELED")
        http_server.wait_until_pending("slow", 0)
        execution.release()


def test_a_request_that_waits_too_long_is_refused(stub: Any, hold: Hold) -> None:
    execution = hold(stub, "queue")
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(asked("queue", timeout=1000))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "Request timeout expired"
    execution.release()  # at its deadline, not when the instance was free


def test_a_full_queue_refuses_at_once(server: Headrace, stub: Any, hold: Hold, connect: Callable[..., Any]) -> None:
    execution = hold(stub, "queue")
    calls = [stub.ModelInfer.future(asked("queue")) for _ in range(2)]
    server.wait_until_pending("queue", 2)
    with pytest.raises(InferenceServerException) as caught:
        connect("http", server).echo("queue", np.ones((1, 4), np.float32), "FP32", request_id="4th")
    assert caught.value.status() == "503"
    assert caught.value.message() == "[request id: 4th] Exceeds maximum queue size"
    execution.release()
    assert all(call.result(30).model_name == "queue" for call in calls)


def test_the_lower_priority_number_is_served_first(server: Headrace, stub: Any, hold: Hold) -> None:
    done: queue.Queue[str] = queue.Queue()
    execution, calls = hold(stub, "queue"), []
    for name, priority in (("late", 2), ("early", 1)):
        calls.append(stub.ModelInfer.future(asked("queue", priority=priority)))
        calls[-1].add_done_callback(lambda _, name=name: done.put(name))
        server.wait_until_pending("queue", len(calls))
    execution.release()
    assert [done.get(timeout=30) for _ in calls] == ["early", "late"]


def test_requests_that_wait_are_batched(server: Headrace, stub: Any, hold: Hold) -> None:
    """Four rows wait while one runs: one more execution does for all."""
    before = server.metric("nv_inference_exec_count", "slow")
    execution = hold(stub, "slow")
    calls = [stub.ModelInfer.future(asked("slow")) for _ in range(4)]
    server.wait_until_pending("slow", 4)
    execution.release()
    assert all(call.result(30).model_name == "slow" for call in calls)
    assert server.metric("nv_inference_exec_count", "slow") == before + 2


def test_a_stream_keeps_the_order_of_its_requests(server: Headrace, stub: Any, hold: Hold) -> None:
    """The first one waits for the instance, and the requests of a quick model wait behind it."""
    execution = hold(stub, "slow")
    requests = [asked("slow"), asked("batched"), asked("batched")]
    for number, request in enumerate(requests):
        request.id = str(number)
    success = "nv_inference_request_success"
    before = server.metric(success, "batched")
    call = stub.ModelStreamInfer(iter(requests), timeout=30)
    server.wait_until_metric(success, "batched", before + 2)
    execution.release()
    assert [answer.infer_response.id for answer in call] == ["0", "1", "2"]


def test_an_error_ends_a_stream_that_asked_for_it_once_it_is_queued(stub: Any, hold: Hold) -> None:
    execution = hold(stub, "queue")
    unknown, late, lost = asked("nosuch"), asked("queue", timeout=1000), asked("batched")
    call = stub.ModelStreamInfer(iter([unknown, late, lost]), metadata=[("triton_grpc_error", "true")], timeout=30)
    assert next(call).error_message == "Request for unknown model: 'nosuch' is not found"
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "Request timeout expired")
    execution.release()


def test_without_that_wish_the_error_is_an_answer_with_a_final_flag(stub: Any, hold: Hold) -> None:
    execution = hold(stub, "queue")
    call = stub.ModelStreamInfer(iter([asked("queue", timeout=1000), asked("batched")]), timeout=30)
    late, other = list(call)
    assert late.error_message == "Request timeout expired"
    assert late.infer_response.model_name == "queue"
    assert late.infer_response.parameters["triton_final_response"].bool_param is True
    assert other.infer_response.model_name == "batched"
    execution.release()


def test_a_full_queue_refuses_on_a_stream_without_a_final_flag_and_ends_no_stream(
    server: Headrace, stub: Any, hold: Hold
) -> None:
    """The request was never queued."""
    execution = hold(stub, "queue")
    calls = [stub.ModelInfer.future(asked("queue")) for _ in range(2)]
    server.wait_until_pending("queue", 2)
    for metadata in ((), (("triton_grpc_error", "true"),)):
        stream = stub.ModelStreamInfer(iter([asked("queue"), asked("batched")]), metadata=metadata, timeout=30)
        refused, other = list(stream)
        assert refused.error_message.endswith("Exceeds maximum queue size")
        assert "triton_final_response" not in refused.infer_response.parameters
        assert other.infer_response.model_name == "batched"
    execution.release()
    assert all(call.result(30).model_name == "queue" for call in calls)


def test_a_call_past_its_client_timeout_ends_with_deadline_exceeded(server: Headrace, stub: Any, hold: Hold) -> None:
    """A timeout of the stock client is a disconnect to the server."""
    execution, x = hold(stub, "slow"), np.ones((1, 4), np.float32)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        tensor = tritonclient.grpc.InferInput("IN", [1, 4], "FP32")
        tensor.set_data_from_numpy(x)
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("slow", [tensor], client_timeout=0.05)
    server.wait_until_pending("slow", 0)
    execution.release()


def test_a_model_with_an_unhealthy_instance_is_not_ready(server: Headrace, gates: Any, stub: Any) -> None:
    sick = gates["slow"].path / "sick"
    sick.touch()
    try:
        status, text = server.get("/v2/models/slow/ready")
        assert (status, json.loads(text)) == (400, {"error": "Model version not ready"})
        assert server.get("/v2/health/ready") == (400, b"")
        assert server.get("/v2/health/live") == (200, b"")
        assert server.get("/v2/models/batched/ready")[0] == 200
    finally:
        sick.unlink()
    assert server.get("/v2/health/ready")[0] == 200


def test_liveness_is_answered_while_every_instance_is_busy(server: Headrace, stub: Any, hold: Hold) -> None:
    executions = [hold(stub, model) for model in ("slow", "queue")]
    assert server.get("/v2/health/live")[0] == 200
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert stub.ModelInfer(asked("batched")).model_name == "batched"
    for each in executions:
        each.release()


def test_repeated_request_is_answered_from_the_cache_to_every_client(client: Any) -> None:
    """The first of them may execute. The second never does."""
    name = f"asked by {client.name}"
    x = np.array([[1, 2, 3, 4.5]], np.float32)
    words = np.array([name, "übel", ""], np.object_)

    def numbers() -> tuple[int, int, int]:
        document = client.metadata(client.get_inference_statistics("cached"))["model_stats"][0]
        hit = document["inference_stats"]["cache_hit"]
        assert int(document["inference_stats"]["success"]["count"]) >= int(document["inference_count"])
        return int(document["inference_count"]), int(hit["count"]), int(hit["ns"])

    client.echo("cached", x, "FP32", request_id="first")
    executed, hits, hit_ns = numbers()
    answer = client.echo("cached", x, "FP32", request_id="second")
    np.testing.assert_array_equal(answer.as_numpy("OUT"), x)
    response = answer.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "second"
    after = numbers()
    assert after[:2] == (executed, hits + 1)
    assert after[2] > hit_ns
    client.echo("cached", x, "FP32", parameters={"bypass_response_cache": True})
    assert numbers()[:2] == (executed + 1, hits + 1)
    for _ in range(2):
        cached = client.echo("cached_strings", words, "BYTES").as_numpy("OUT")
        assert [each.decode() for each in cached] == list(words)


HEADER = "Request-Timeout-Ms"


def test_a_request_over_http_waits_no_longer_than_its_header_says(
    http_server: Headrace, hold: Hold, send: Callable[..., Any]
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{http_server.grpc}") as channel, ThreadPoolExecutor(1) as pool:
        execution = hold(service_pb2_grpc.GRPCInferenceServiceStub(channel), "slow")
        patient = pool.submit(send, http_server, "POST", "/v2/models/slow/infer", {"inputs": [ROW]}, {HEADER: "60000"})
        http_server.wait_until_pending("slow", 1)
        answer = send(http_server, "POST", "/v2/models/slow/infer", {"inputs": [ROW]}, {HEADER: "30"})
        assert (answer.status, answer.error) == (503, "Request timeout expired")
        http_server.wait_until_pending("slow", 1)  # that of the other
        execution.release()
        assert patient.result(30).status == 200


def test_a_large_request_over_http_waits_no_longer_either(
    http_server: Headrace, hold: Hold, send: Callable[..., Any]
) -> None:
    large = {"inputs": [ROW], "parameters": {"filler": "x" * 200_000}}
    with grpc.insecure_channel(f"127.0.0.1:{http_server.grpc}") as channel:
        execution = hold(service_pb2_grpc.GRPCInferenceServiceStub(channel), "slow")
        answer = send(http_server, "POST", "/v2/models/slow/infer", large, {HEADER: "50"})
        assert (answer.status, answer.error) == (503, "Request timeout expired")
        http_server.wait_until_pending("slow", 0)
        execution.release()


@pytest.mark.parametrize(
    ("value", "status", "text"),
    [
        ("0", 503, "Request timeout expired"),
        ("", 400, "header 'Request-Timeout-Ms' is '', expected 1 to 10 digits"),
        ("-5", 400, "header 'Request-Timeout-Ms' is '-5', expected 1 to 10 digits"),
        ("1.5", 400, "header 'Request-Timeout-Ms' is '1.5', expected 1 to 10 digits"),
        ("1" * 5000, 400, f"header 'Request-Timeout-Ms' is '{'1' * 40}', expected 1 to 10 digits"),
    ],
)
def test_a_time_that_is_none_is_refused_in_words(
    http_server: Headrace, send: Callable[..., Any], value: str, status: int, text: str
) -> None:
    answer = send(http_server, "POST", "/v2/models/batched/infer", {"inputs": [ROW]}, {HEADER: value})
    assert (answer.status, answer.error) == (status, text)
    assert send(http_server, "POST", "/v2/models/batched/infer", {"inputs": [ROW]}, {HEADER: "9" * 10}).status == 200


def test_client_that_disconnects_before_its_deadline_is_cancelled(http_server: Headrace, hold: Hold) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{http_server.grpc}") as channel:
        execution = hold(service_pb2_grpc.GRPCInferenceServiceStub(channel), "slow")
        content = json.dumps({"inputs": [ROW]}).encode()
        head = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nRequest-Timeout-Ms: 600000\r\n"
        head += b"Content-Length: %d\r\n\r\n"
        with socket.create_connection(("127.0.0.1", http_server.http), timeout=30) as caller:
            caller.sendall(head % len(content) + content)
            http_server.wait_until_pending("slow", 1)
        http_server.wait_until_pending("slow", 0)
        execution.release()
