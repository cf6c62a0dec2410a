"""Ensembles on a real server, over every protocol, compared with their models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import Queue
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from headrace import (
    AnyOperation,
    Caller,
    HeadraceError,
    InferRequest,
    Interceptor,
    Server,
    Ticket,
    Unavailable,
    builtins,
    hookimpl,
)
from headrace_testing.serving import WAYS, on_loop

from .conftest import Write, both, ensemble, identity, step

ROW = np.array([[1, 2]], np.float32)


@pytest.mark.parametrize("over", WAYS)
def test_two_models_answer_as_one(
    over: str, write: Write, headrace_server: Callable[..., Server], infer: Callable[..., dict[str, Any]]
) -> None:
    write("one", identity())
    write("two", identity("c", "d"))
    write("e", ensemble([step("two", "c=mid", "d=y"), step("one", "a=x", "b=mid")]))
    server = headrace_server()
    np.testing.assert_array_equal(np.asarray(infer(server, "e", {"x": ROW}, over=over)["y"]), ROW)
    answer = server.infer("e", {"x": ROW})
    assert (answer.model_name, answer.model_version) == ("e", "1")
    assert [server.served(name)[0].snapshot().success.count for name in ("one", "two", "e")] == [2, 2, 2]


def test_a_step_refuses_a_wrong_shape_after_a_valid_one(write: Write, run: Callable[..., Server]) -> None:
    write("one", identity(dims="-1"))
    write("three", identity("c", "d", dims="3"))
    write("e", ensemble([step("one", "a=x", "b=mid"), step("three", "c=mid", "d=y")], dims="-1"))
    server = run()
    for rows in (1, 2, 1):
        row = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(server.infer("e", {"x": row}).outputs["y"]), row)
        with pytest.raises(HeadraceError, match=r"unexpected shape for input 'c' for model 'three'"):
            server.infer("e", {"x": np.ones((rows, 4), np.float32)})


def test_requests_of_a_step_that_differ_in_shape_are_not_in_one_batch(write: Write, run: Callable[..., Server]) -> None:
    write("one", identity(dims="-1") + "dynamic_batching { max_queue_delay_microseconds: 200000 }")
    write("e", ensemble([step("one", "a=x", "b=y")], dims="-1"))
    server = run()
    rows = [np.full((1, width), width, np.float32) for width in (2, 3, 2, 3, 4)]
    for _ in range(2):

        async def ask() -> list[Any]:
            return await asyncio.gather(*(server.infer_async("e", {"x": row}) for row in rows))

        for row, answer in zip(rows, on_loop(server, ask()), strict=True):
            np.testing.assert_array_equal(np.asarray(answer.outputs["y"]), row)


RESHAPED = (
    'platform: "ensemble" max_batch_size: {batch} '
    'input {{ name: "x" data_type: TYPE_FP32 dims: [{dims}] reshape {{ shape: [{shape}] }} }} '
    'output {{ name: "y" data_type: TYPE_FP32 dims: [{dims}] reshape {{ shape: [{shape}] }} }} '
    "ensemble_scheduling {{ {step} }}"
)


@pytest.mark.parametrize(
    ("batch", "dims", "shape", "step_batch", "step_dims", "given"),
    [
        (0, "2, 2", "4", 0, "4", (2, 2)),
        (4, "2, 2", "4", 4, "4", (3, 2, 2)),
        (0, "2, 2", "4", 4, "4", (2, 2)),
        (4, "2, 2", "4", 0, "4", (1, 2, 2)),
        (0, "-1, 2", "-1, 1, 2", 0, "-1, 1, 2", (3, 2)),
        (4, "1", "", 0, "-1", (4, 1)),
    ],
)
def test_the_reshape_of_an_ensemble_is_applied_and_undone(
    batch: int,
    dims: str,
    shape: str,
    step_batch: int,
    step_dims: str,
    given: tuple[int, ...],
    write: Write,
    headrace_server: Callable[..., Server],
    infer: Callable[..., dict[str, Any]],
) -> None:
    """As real Triton 2.51 answers the same configs."""
    write("one", identity(batch=step_batch, dims=step_dims))
    write("e", RESHAPED.format(batch=batch, dims=dims, shape=shape, step=step("one", "a=x", "b=y")))
    values = np.arange(np.prod(given), dtype=np.float32).reshape(given)
    answer = np.asarray(infer(headrace_server(), "e", {"x": values})["y"])
    assert answer.shape == given
    np.testing.assert_array_equal(answer, values)


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_output_that_does_not_fit_the_reshape_is_an_error(
    decoupled: bool, write: Write, headrace_server: Callable[..., Server]
) -> None:
    """The first sentence is that of Triton 2.51."""
    policy = "model_transaction_policy { decoupled: true }" if decoupled else ""
    write("one", identity(batch=0, dims="-1") + policy)
    write(
        "e",
        'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: -1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: [2, 2] reshape { shape: 4 } } '
        f"ensemble_scheduling {{ {step('one', 'a=x', 'b=y')} }}",
    )
    port = headrace_server().options.grpc_port
    answers: Queue[Any] = Queue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as connection:
        connection.start_stream(lambda result, error: answers.put((result, error)))
        for size in (3, 4):
            given = grpcclient.InferInput("x", [size], "FP32")
            given.set_data_from_numpy(np.ones(size, np.float32))
            connection.async_stream_infer("e", [given])
            result, error = answers.get(timeout=30)
            if size == 4:
                np.testing.assert_array_equal(result.as_numpy("y"), np.ones((2, 2), np.float32))
            else:
                assert "output tensor shape does not match size of output for 'y': [3] does not fit [2, 2]" in str(
                    error
                )


SUMS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            given = [pb_utils.get_input_tensor_by_name(request, name) for name in ("a", "START", "ID")]
            x, start, of = (each.as_numpy() for each in given)
            key = int(of.flat[0])
            self.sums[key] = x if start.flat[0] else self.sums[key] + x
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("b", self.sums[key])]))
        return responses
"""
SEQUENCES = """
parameters { key: "isolation" value { string_value: "thread" } }
sequence_batching {
    oldest { max_candidate_sequences: 4 }
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
    control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""


def test_sequences_reach_the_stateful_steps(write: Write, headrace_server: Callable[..., Server]) -> None:
    """As real Triton 2.51 answers the same models."""
    write("one", identity())
    write("sums", f'backend: "python" max_batch_size: 8 {both("a", "b")}{SEQUENCES}', files={"1/model.py": SUMS})
    write("inner", ensemble([step("one", "a=x", "b=m"), step("sums", "a=m", "b=y")]))
    write("e", ensemble([step("inner", "x=x", "y=m"), step("one", "a=m", "b=y")]))
    server = headrace_server()

    def ask(client: Any, connection: Any, value: float, sequence: int, flags: str) -> list[float]:
        given = client.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.full((1, 2), value, np.float32))
        answer = connection.infer(
            "e", [given], sequence_id=sequence, sequence_start="S" in flags, sequence_end="E" in flags
        )
        found: list[float] = answer.as_numpy("y").tolist()[0]
        return found

    for client, port in ((httpclient, server.options.http_port), (grpcclient, server.options.grpc_port)):
        with client.InferenceServerClient(f"127.0.0.1:{port}") as connection:
            sums = {7: 0.0, 9: 0.0}
            for number, (sequence, flags) in enumerate([(7, "S"), (9, "S"), (7, ""), (9, ""), (9, "E"), (7, "E")]):
                sums[sequence] += number
                assert ask(client, connection, number, sequence, flags) == [sums[sequence]] * 2
            with pytest.raises(InferenceServerException) as refusal:
                ask(client, connection, 1, 7, "")
            assert refusal.value.message() == (
                "in ensemble 'e', in ensemble 'inner', inference request for sequence 7 to model 'sums' must specify "
                "the START flag on the first request of the sequence"
            )
    scheduler: Any = server.served("sums")[0].model_queue.scheduler
    assert (scheduler.active, scheduler.backlogged) == (0, 0)


LABELS = "cat\n\ndog\n"


def labelled(file: str, config: str) -> str:
    return config.replace("output { ", f'output {{ label_filename: "{file}" ')


def classes(server: Server, model: str, output: str, count: int) -> list[list[bytes]]:
    """The classes of ``output`` for `ROW` over HTTP, in JSON and in binary, and over gRPC, which are the same."""
    found = []
    for client, port, how in (
        (httpclient, server.options.http_port, {"binary_data": True}),
        (httpclient, server.options.http_port, {"binary_data": False}),
        (grpcclient, server.options.grpc_port, {}),
    ):
        given = client.InferInput("x", [1, 3], "FP32")
        given.set_data_from_numpy(np.array([[5, 9, 7]], np.float32))
        wanted = client.InferRequestedOutput(output, class_count=count, **how)
        with client.InferenceServerClient(f"127.0.0.1:{port}") as connection:
            shown = connection.infer(model, [given], outputs=[wanted]).as_numpy(output)
        found.append([[each if isinstance(each, bytes) else each.encode() for each in row] for row in shown])
    assert found[0] == found[1] == found[2]
    return found[0]


def test_classes_have_the_labels_of_the_ensemble_or_of_the_producing_model(
    write: Write, headrace_server: Callable[..., Server]
) -> None:
    """As real Triton 2.51 answers the same models."""
    steps = [step("one", "a=x", "b=m"), step("two", "a=m", "b=y")]
    write("one", labelled("l.txt", identity(dims="3")), files={"l.txt": "first\nsecond\nthird\n"})
    write("two", labelled("l.txt", identity(dims="3")), files={"l.txt": LABELS})
    write("plain", identity(dims="3"))
    write("e", ensemble(steps, outputs="m y", dims="3"))
    write("own", labelled("own.txt", ensemble(steps, dims="3")), files={"own.txt": "a\nb\nc\n"})
    write("bare", ensemble([steps[0], step("plain", "a=m", "b=y")], dims="3"))
    write("nested", ensemble([step("e", "x=x", "y=y m=other")], outputs="y other", dims="3"))
    server = headrace_server(model_control_mode="explicit", load_model=("*",))
    assert classes(server, "e", "y", 2) == [[b"9.000000:1", b"7.000000:2:dog"]]  # the second label is empty
    assert classes(server, "e", "m", 1) == [[b"9.000000:1:second"]]
    assert classes(server, "own", "y", 5) == [[b"9.000000:1:b", b"7.000000:2:c", b"5.000000:0:a"]]
    assert classes(server, "bare", "y", 1) == [[b"9.000000:1"]]
    assert classes(server, "nested", "y", 3) == [[b"9.000000:1", b"7.000000:2:dog", b"5.000000:0:cat"]]
    (server.served("two")[0].model.path.parent / "l.txt").write_text("new\nnewer\nnewest\n")
    before = server.served("nested")[0]
    on_loop(server, server.load("two"))
    on_loop(server, server._lifecycle.background.settle())
    assert server.served("nested")[0] is not before
    assert classes(server, "nested", "y", 1) == [[b"9.000000:1:newer"]]


COPIES = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.002)
        found = [pb_utils.get_input_tensor_by_name(request, "a").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("b", each)]) for each in found]
"""
COUNTS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, given = request.get_response_sender(), pb_utils.get_input_tensor_by_name(request, "a").as_numpy()
            for number in range(int(given[0, 0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("b", given + number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def streamed(server: Server, model: str, row: Any) -> list[list[float]]:
    """Return the responses of ``model`` on a stream, up to the one that is marked as the last."""
    heard: Queue[tuple[Any, Any]] = Queue()
    given = grpcclient.InferInput("x", list(row.shape), "FP32")
    given.set_data_from_numpy(row)
    found = []
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as client:
        client.start_stream(lambda result, error: heard.put((result, error)))
        client.async_stream_infer(model, [given], enable_empty_final_response=True)
        is_last = False
        while not is_last:
            result, error = heard.get(timeout=90)
            assert error is None
            response = result.get_response()
            is_last = response.parameters["triton_final_response"].bool_param
            found += [result.as_numpy("y").tolist()[0]] if response.outputs else []
        client.stop_stream()
    return found


def test_a_decoupled_model_in_an_ensemble_may_send_any_number_of_responses(
    write: Write, headrace_server: Callable[..., Server]
) -> None:
    decoupled = 'backend: "python" model_transaction_policy { decoupled: true } max_batch_size: 8 '
    write("counts", decoupled + both("a", "b"), files={"1/model.py": COUNTS})
    write("one", identity())
    write("inner", ensemble([step("counts", "a=x", "b=m"), step("one", "a=m", "b=y")]))
    write("e", ensemble([step("inner", "x=x", "y=m"), step("one", "a=m", "b=y")]))
    server = headrace_server()
    assert streamed(server, "e", np.array([[200, 0]], np.float32)) == [[200 + n, n] for n in range(200)]
    assert streamed(server, "e", np.array([[0, 0]], np.float32)) == []
    with pytest.raises(HeadraceError, match="decoupled"):
        server.infer("e", {"x": ROW})
    for name in ("e", "inner", "counts", "one"):
        assert server.served(name)[0].model_queue.in_flight == 0


def test_an_error_of_a_step_keeps_text_and_code_and_names_the_ensembles(
    write: Write, run: Callable[..., Server]
) -> None:
    write("one", identity())
    write("wide", identity(dims="3"))
    write("inner", ensemble([step("one", "a=x", "b=m"), step("wide", "a=m", "b=y")], dims="-1").replace("[2]", "[-1]"))
    write("one", identity(dims="-1"))
    write("e", ensemble([step("inner", "x=x", "y=y")], dims="-1"))
    server = run()
    with pytest.raises(HeadraceError) as refusal:
        server.infer("e", {"x": ROW})
    assert refusal.value.message.startswith(
        "in ensemble 'e', in ensemble 'inner', [request id: <id_unknown>] unexpected shape for input 'a' for model "
        "'wide'. "
        "Expected [-1,3], got [1,2]."
    )
    counts = [server.served(name)[0].snapshot() for name in ("e", "inner", "one")]
    assert [(each.success.count, each.fail.count) for each in counts] == [(0, 1), (0, 1), (1, 0)]
    assert [(each.other_failures.count, each.backend_failures.count) for each in counts] == [(1, 0), (1, 0), (0, 0)]
    assert counts[0].other_failures.ns >= counts[1].other_failures.ns > 0


def test_the_sequence_of_a_request_is_in_the_answer_over_both_protocols(
    write: Write, headrace_server: Callable[..., Server]
) -> None:
    write("one", identity())
    write("e", ensemble([step("one", "a=x", "b=y")]))
    server = headrace_server()
    with (
        httpclient.InferenceServerClient(f"127.0.0.1:{server.options.http_port}") as http,
        grpcclient.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as grpc,
    ):
        for number in (5, 2**63 - 1, 2**64 - 1):
            given = httpclient.InferInput("x", list(ROW.shape), "FP32")
            given.set_data_from_numpy(ROW)
            answer = http.infer("e", [given], sequence_id=number, sequence_start=True)
            flags = {"sequence_id": number, "sequence_start": True, "sequence_end": False}
            assert answer.get_response()["parameters"] == flags
            signed = number if number < 2**63 else number - 2**64
            x = grpcclient.InferInput("x", list(ROW.shape), "FP32")
            x.set_data_from_numpy(ROW)
            parameters = grpc.infer("e", [x], sequence_id=signed, sequence_end=True).get_response().parameters
            assert parameters["sequence_id"].int64_param == signed
            assert parameters["sequence_end"].bool_param


def test_statistics_count_a_request_of_an_ensemble_as_one_execution(write: Write, run: Callable[..., Server]) -> None:
    """As Triton counts it."""
    write("one", identity())
    write("e", ensemble([step("one", "a=x", "b=m"), step("one", "a=m", "b=y")]))
    server = run()
    for _ in range(3):
        server.infer("e", {"x": np.ones((2, 2), np.float32)})
    executions = server.served("e")[0].snapshot().executions
    assert (executions.success.count, executions.inference_count, executions.execution_count) == (3, 6, 3)
    assert executions.queue.ns < executions.compute_infer.ns
    assert server.served("one")[0].snapshot().executions.inference_count == 12


def test_the_times_of_an_ensemble_are_the_sums_of_its_steps_without_waits(
    write: Write, run: Callable[..., Server]
) -> None:
    """As real Triton 2.51 counts them. The oracle is the statistics of the steps."""
    python = f'backend: "python" {identity().removeprefix("backend: " + chr(34) + "identity" + chr(34))}'
    write(
        "one", python + 'parameters { key: "isolation" value { string_value: "thread" } }', files={"1/model.py": COPIES}
    )
    write("two", python, files={"1/model.py": COPIES})
    write("three", identity())
    write("inner", ensemble([step("one", "a=x", "b=m"), step("two", "a=m", "b=y")]))
    write("e", ensemble([step("inner", "x=x", "y=u"), step("three", "a=x", "b=v")], outputs="u v"))
    server = run()

    async def scenario() -> None:
        await asyncio.gather(*(server.infer_async("e", {"x": np.ones((2, 2), np.float32)}) for _ in range(8)))

    on_loop(server, scenario())
    found = {name: server.served(name)[0].snapshot().executions for name in ("one", "two", "three", "inner", "e")}
    for name, steps in (("inner", ("one", "two")), ("e", ("one", "two", "three"))):
        for span in ("compute_input", "compute_infer", "compute_output"):
            total, parts = getattr(found[name], span), [getattr(found[each], span) for each in steps]
            assert (total.count, total.ns) == (8, sum(part.ns for part in parts)), (name, span)
        assert found[name].batches[2].compute_infer.ns == found[name].compute_infer.ns
        assert found[name].success.ns > found[name].compute_infer.ns, "they waited for each other"
        assert found[name].queue.ns < found[name].success.ns // 2, "what its steps waited is not its own"


def test_cancelled_callers_are_answered_once_at_any_time(write: Write, run: Callable[..., Server]) -> None:
    write("one", identity())
    write("slow", identity() + 'parameters { key: "execute_delay_ms" value { string_value: "1" } }')
    steps = [
        step("one", "a=x", "b=m"),
        step("slow", "a=x", "b=n"),
        step("one", "a=m", "b=y"),
        step("one", "a=n", "b=z"),
    ]
    write("e", ensemble(steps, outputs="y z"))
    server = run()
    random = Random(0)

    async def scenario() -> None:
        ends = []
        tickets = []
        for _ in range(2000):
            ticket = Ticket(InferRequest("e", {"x": ROW}), lambda answer, final: ends.append((answer, final)))
            server.submit(ticket)
            tickets.append(ticket)
            if random.random() < 0.2:
                await asyncio.sleep(0)
            random.choice(tickets[-20:]).cancel()
        while len(ends) < len(tickets):
            await asyncio.sleep(0)
        assert len(ends) == len(tickets)
        assert all(final for _, final in ends)
        while server.served("slow")[0].model_queue.in_flight or server.served("one")[0].model_queue.in_flight:
            await asyncio.sleep(0)

    on_loop(server, scenario())
    snapshot = server.served("e")[0].snapshot()
    assert snapshot.success.count + snapshot.cancelled.count == 2000
    assert snapshot.cancelled.count > 500
    model_queue = server.served("e")[0].model_queue
    assert (model_queue.in_flight, vars(model_queue.scheduler)["_under_way"]) == (0, {})


ASKS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.Tensor("x", pb_utils.get_input_tensor_by_name(request, "a").as_numpy())
            response = pb_utils.InferenceRequest(model_name="e", requested_output_names=["y"], inputs=[x]).exec()
            if response.has_error():
                answers.append(pb_utils.InferenceResponse(error=response.error()))
            else:
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("b", x.as_numpy())]))
        return answers
"""


def test_an_ensemble_in_a_cycle_is_refused_with_the_path(write: Write, run: Callable[..., Server]) -> None:
    write("asks", 'backend: "python" max_batch_size: 8 ' + both("a", "b"), files={"1/model.py": ASKS})
    write("e", ensemble([step("asks", "a=x", "b=y")]))
    server = run()
    with pytest.raises(HeadraceError, match="every instance of model 'asks' waits") as refusal:
        server.infer("e", {"x": ROW})
    assert refusal.value.message.startswith("in ensemble 'e', ")
    assert [server.served(name)[0].model_queue.in_flight for name in ("e", "asks")] == [0, 0]


class Seen(Interceptor):
    """Records operations, and refuses those of the model ``closed``."""

    name = "seen"
    seen: ClassVar[list[tuple[str, str, str]]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        if caller.transport == "program":
            caller.principal = "alice"
        self.seen.append((caller.transport, caller.principal, model))
        if model == "closed":
            raise Unavailable("closed")


def test_every_step_passes_the_interceptors(
    write: Write, run: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "register_interceptors", hookimpl(lambda: [Seen]), raising=False)
    Seen.seen.clear()
    write("one", identity())
    write("closed", identity())
    write("inner", ensemble([step("one", "a=x", "b=y")]))
    write("e", ensemble([step("one", "a=x", "b=m"), step("inner", "x=m", "y=n"), step("closed", "a=n", "b=y")]))
    server = run()
    with pytest.raises(HeadraceError, match="in ensemble 'e', closed"):
        server.infer("e", {"x": ROW})
    names = ["one", "inner", "one", "closed"]
    assert Seen.seen == [("program", "alice", "e"), *(("model", "alice", name) for name in names)]
