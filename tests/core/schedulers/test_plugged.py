"""Schedulers of an installed plugin, with all that they may use: other models, no instances at all, batches with more
than requests, in threads and in processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace import Answer, BackendError, Cancelled, HeadraceError, InferRequest, InferResponse, Server, Ticket
from headrace_http import text_format
from headrace_testing.serving import WAYS, on_loop
from tests.core.conftest import inspect

#: Written as by a third party, with imports of `headrace` only.
PLUGIN = '''
from dataclasses import dataclass
from functools import partial
import os

import numpy as np

from headrace import Backend, BackendError, Batch, HeadraceError, InferRequest, InferResponse, Instance, Padding
from headrace import FullScheduler, Problem, PublishedMetric, RequestInstance, Scheduler, Spec, Ticket, dtypes, hookimpl
from headrace_http import text_format


class InTurn(Scheduler):
    """Every sequence's requests in the order in which they came, one by one."""

    name = "sequence_batching"

    def next(self, instance, now_ns):
        return self.context.waiting.head(1)


class Joined(Scheduler):
    """Asks every step at once, and joins what they answer: no instance of its own is needed."""

    name = "ensemble_scheduling"

    def __init__(self, context):
        super().__init__(context)
        self.asked = {}

    def submit(self, ticket):
        request = ticket.request
        steps = self.context.config.ensemble_scheduling.step
        asked = self.asked[ticket] = []
        outputs = {}
        for step in steps:
            inputs = {inner: request.inputs[outer] for inner, outer in step.input_map.items()}
            callers = (*request.callers, self.context.config.name)
            heard = partial(self.heard, ticket, step, outputs)
            asked.append(Ticket(InferRequest(step.model_name, inputs, callers=callers, caller=request), heard))
        for each in tuple(asked):
            self.context.call(each)
        return 0

    def heard(self, ticket, step, outputs, answer, final):
        if ticket not in self.asked:
            return
        if isinstance(answer, HeadraceError):
            self.context.answer(ticket, answer, True)
            return
        outputs.update({outer: answer.outputs[inner] for inner, outer in step.output_map.items()})
        if len(outputs) == len(self.context.outputs):
            self.context.answer(ticket, InferResponse(outputs, id=ticket.request.id), True)

    def next(self, instance, now_ns):
        raise AssertionError("there are no instances")

    def finished(self, tickets, answers, instance):
        for ticket in tickets:
            for asked in self.asked.pop(ticket, ()):
                asked.cancel()


class Forwards(FullScheduler):
    """Has another model answer, which the config names."""

    name = "forward"
    needs_instances = False
    metrics = (PublishedMetric("headrace_forward_forwarded_total", "Requests that were forwarded", "counter"),)
    forwarded = 0

    def measure(self):
        return {"headrace_forward_forwarded_total": self.forwarded / self.context.parameters.per}

    @dataclass(frozen=True, slots=True)
    class Parameters:
        to: str = "one"
        per: int = 1

    def submit(self, ticket):
        self.forwarded += 1
        request = ticket.request
        callers = (*request.callers, self.context.config.name)
        asked = InferRequest(self.context.parameters.to, {"a": request.inputs["x"]}, callers=callers, caller=request)
        self.context.call(Ticket(asked, partial(self.heard, ticket)))
        return 0

    def heard(self, ticket, answer, final):
        if isinstance(answer, InferResponse):
            answer = InferResponse({"y": answer.outputs["b"]}, id=ticket.request.id)
        self.context.answer(ticket, answer, final)

    def next(self, instance, now_ns):
        raise AssertionError("there are no instances")


@dataclass(frozen=True, slots=True)
class Parameters:
    pinned: bool = False


class Stateful(FullScheduler):
    """Gives each request what the last one of its id has left in ``state``, in batches padded to four rows."""

    name = "stateful"
    Parameters = Parameters

    def __init__(self, context):
        super().__init__(context)
        self.kept = {"state": Spec("state", dtypes.FP32, (1,))}
        self.state = {}

    def next(self, instance, now_ns):
        tickets = self.context.waiting.head(2)
        if not tickets:
            return ()
        zero = np.zeros((1, 1), np.float32)
        padding = [Padding(self.context.config.name, {"x": zero}) for _ in range(4 - len(tickets))]
        kept = [self.state.get(ticket.request.id, zero) for ticket in tickets]
        added = [{"state": state} for state in kept + [zero] * len(padding)]
        return Batch([*tickets, *padding], added, self.context.parameters.pinned)

    def finished(self, tickets, answers, instance):
        for ticket, answer in zip(tickets, answers, strict=True):
            if isinstance(answer, InferResponse) and not isinstance(ticket, Padding):
                self.state[ticket.request.id] = np.array(answer.outputs["state"])


class Ruled(FullScheduler):
    """Refuses metric tags, and the input of a config that is complete."""

    name = "ruled"

    def next(self, instance, now_ns):
        return self.context.waiting.head(1)

    @classmethod
    def check_config(cls, config, *, completed):
        for tag, value in config.metric_tags.items():
            yield Problem(f"metric_tags['{tag}']", f"no tags for {1 / int(value):g}")
        if completed:
            yield Problem("input[0].name", f"ruled: no input, it has {len(config.input)}")


class Sums(Backend):
    name = "sums"

    def load(self, model):
        return Sum()


class Sum(Instance):
    """Adds ``x`` to ``state``, and says which execution it was, of how many rows, in which process."""

    executions = 0

    def execute(self, inputs):
        self.executions += 1
        x = np.asarray(inputs["x"])
        if (x < 0).any():
            raise BackendError("negative")
        y = x + np.asarray(inputs.get("state", np.zeros_like(x)))
        what = np.tile(np.array([self.executions, len(x), os.getpid()], np.int64), (len(x), 1))
        return {"y": y, "state": y, "what": what}


class Asks(Backend):
    name = "asks"

    def load(self, model):
        return Asking(model)


class Asking(RequestInstance):
    """Has the ensemble answer, for whose answer it may be needed itself."""

    def __init__(self, model):
        self.model = model

    def execute_requests(self, requests):
        return [self.ask(request) for request in requests]

    def ask(self, request):
        inputs, callers = {name: request.inputs["a"] for name in "xy"}, (*request.callers, self.model.name)
        answer = self.model.services.ask(InferRequest("m", inputs, callers=callers, caller=request))
        return answer if isinstance(answer, HeadraceError) else InferResponse({"b": answer.outputs["u"]})


@hookimpl
def register_schedulers():
    return [InTurn, Joined, Forwards, Ruled, Stateful]


@hookimpl
def register_backends():
    return [Sums, Asks]
'''
IDENTITY = """backend: "identity" max_batch_size: 8
    input { name: "a" data_type: TYPE_FP32 dims: 2 } output { name: "b" data_type: TYPE_FP32 dims: 2 }"""
ENSEMBLE = """platform: "ensemble" max_batch_size: 8
    input [{ name: "x" data_type: TYPE_FP32 dims: 2 }, { name: "y" data_type: TYPE_FP32 dims: 2 }]
    output [{ name: "u" data_type: TYPE_FP32 dims: 2 }, { name: "v" data_type: TYPE_FP32 dims: 2 }]
    ensemble_scheduling { step [
        { model_name: "one" model_version: -1 input_map { key: "a" value: "x" } output_map { key: "b" value: "u" } },
        { model_name: "two" model_version: -1 input_map { key: "a" value: "y" } output_map { key: "b" value: "v" } }
    ] }"""
FORWARD = """max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 2 }
    parameters { key: "scheduler" value { string_value: "forward" } }"""
STATEFUL = """backend: "sums" max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: 1 }
    output [{ name: "y" data_type: TYPE_FP32 dims: 1 }, { name: "what" data_type: TYPE_INT64 dims: 3 }]
    parameters [{ key: "scheduler" value { string_value: "stateful" } },
        { key: "scheduler.pinned" value { string_value: "%s" } },
        { key: "isolation" value { string_value: "%s" } }]"""
ROW = np.array([[1, 2]], np.float32)

WriteModel = Callable[..., Path]
Serve = Callable[..., Server]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a distribution, for this process and for processes of models."""
    info = tmp_path / "site/headrace_plugged-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace]\nplugged = headrace_plugged\n")
    (info.parent / "headrace_plugged.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(info.parent))
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    monkeypatch.delitem(sys.modules, "headrace_plugged", raising=False)


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    def write(config: str, name: str) -> Path:
        folder = tmp_path / "models" / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config)
        return folder

    return write


def ask(server: Server, *requests: tuple[Any, dict[str, Any]], leaves: bool = False) -> list[Answer]:
    """Return the answers of the model ``m`` to inputs with further fields, which all arrive in one turn of the loop.

    Callers that are to disconnect do so at once.
    """

    async def scenario() -> list[Answer]:
        futures: list[asyncio.Future[Answer]] = [server.loop.create_future() for _ in requests]
        for future, (inputs, fields) in zip(futures, requests, strict=True):
            ticket = Ticket(InferRequest("m", inputs, **fields), partial(settle, future))
            server.submit(ticket)
            if leaves:
                ticket.cancel()
        return await asyncio.gather(*futures)

    def settle(future: asyncio.Future[Answer], answer: Answer, final: bool) -> None:
        future.set_result(answer)

    return on_loop(server, scenario())


def outputs_of(answer: Answer) -> dict[str, Any]:
    assert isinstance(answer, InferResponse), answer
    return {name: np.asarray(tensor).tolist() for name, tensor in answer.outputs.items()}


LENIENT: dict[str, Any] = {"strict_readiness": False, "exit_on_error": False}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (f"{IDENTITY} sequence_batching {{ }}", "pip install headrace-sequence"),
        (ENSEMBLE, "pip install headrace-ensemble"),
        (
            IDENTITY + 'parameters { key: "scheduler" value { string_value: "stateful" } }',
            "no plugin provides scheduler 'stateful'; installed: direct, dynamic_batching",
        ),
    ],
)
def test_a_scheduler_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    config: str, reason: str, write_model: WriteModel, tmp_path: Path
) -> None:
    write_model(config, "m")
    with Server(tmp_path / "models", plugins=(), **LENIENT) as server:
        assert reason in server.index()[0].reason


RULED = f'{IDENTITY} parameters {{ key: "scheduler" value {{ string_value: "ruled" }} }} '


@pytest.mark.parametrize(
    ("more", "problems"),
    [
        ("", ["ruled: no input, it has 1"]),
        ('metric_tags { key: "a" value: "2" }', ["no tags for 0.5", "ruled: no input, it has 1"]),
        (
            "response_cache { enable: true } model_transaction_policy { decoupled: true } "
            'metric_tags { key: "a" value: "2" } dynamic_batching { preferred_batch_size: 9 }',
            [
                "dynamic batching preferred size must be <= max batch size for m",
                "no tags for 0.5",
                "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable "
                "the response cache.",
                "ruled: no input, it has 1",
            ],
        ),
        (
            'metric_tags { key: "a" value: "0" }',
            ["scheduler 'ruled' failed on the config of 'm': ZeroDivisionError: division by zero"],
        ),
    ],
)
def test_a_scheduler_checks_its_part_of_a_config_and_the_first_problem_refuses_the_load(
    more: str, problems: list[str], plugin: None, write_model: WriteModel, tmp_path: Path
) -> None:
    write_model(RULED + more, "m")
    with Server(tmp_path / "models", plugins=("plugged",), **LENIENT) as server:
        (entry,) = server.index()
    assert (entry.state, entry.reason.partition(": ")[2]) == ("UNAVAILABLE", problems[0])
    found = inspect(tmp_path / "models", plugins=("plugged",))
    assert [problem.partition(": ")[2] for problem in found] == problems


def test_a_plugin_with_a_sequence_batcher_gets_its_models(
    plugin: None, write_model: WriteModel, tmp_path: Path
) -> None:
    write_model(f"{IDENTITY} sequence_batching {{ }}", "m")
    with Server(tmp_path / "models", plugins=("plugged",)) as server:
        (answer,) = ask(server, ({"a": ROW}, {"sequence_id": 1, "sequence_start": True}))
        assert type(server.served("m")[0].model_queue.scheduler).__name__ == "InTurn"
    assert outputs_of(answer) == {"b": [[1, 2]]}


def test_metrics_of_a_scheduler_last_as_long_as_its_model_and_a_failing_one_affects_no_other(
    plugin: None, write_model: WriteModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(IDENTITY, "one")
    write_model(f'{FORWARD} metric_tags {{ key: "team" value: "a" }}', "tagged")
    write_model(FORWARD, "m")
    write_model(f'{FORWARD} parameters {{ key: "scheduler.per" value {{ string_value: "0" }} }}', "broken")

    def published() -> dict[str, float]:
        text = text_format.text(server.engine.collect())
        assert 'nv_inference_count{model="broken",version="1"} 0' in text or "broken" not in text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        found = families.get("headrace_forward_forwarded")
        return {str(sample.labels): sample.value for sample in found.samples} if found else {}

    of_m = str({"model": "m", "version": "1"})
    of_tagged = str({"_team": "a", "model": "tagged", "version": "1"})
    with Server(tmp_path / "models", plugins=("plugged",), model_control_mode="explicit", load_model=("*",)) as server:
        assert published() == {of_m: 0, of_tagged: 0}
        ask(server, ({"x": ROW}, {}), ({"x": ROW}, {}))
        assert published() == {of_m: 2, of_tagged: 0}
        for name in ("tagged", "broken"):
            on_loop(server, server.unload(name))
        assert published() == {of_m: 2}
        on_loop(server, server.unload("m"))
        assert published() == {}
    lines = [each for each in caplog.records if "could not be read" in each.getMessage()]
    of_broken = {"model": "broken", "version": "1"}
    assert [line.getMessage() for line in lines] == [
        f"the metrics of 'forward' of {of_broken} could not be read and are left out of the page"
    ]


@pytest.mark.parametrize("over", WAYS)
def test_a_version_without_instances_joins_the_answers_of_other_models(
    over: str,
    plugin: None,
    headrace_repository: Path,
    headrace_server: Serve,
    infer: Callable[..., dict[str, Any]],
) -> None:
    for name, config in (("m", ENSEMBLE), ("one", IDENTITY), ("two", IDENTITY)):
        (headrace_repository / name / "1").mkdir(parents=True)
        (headrace_repository / name / "config.pbtxt").write_text(config)
    server = headrace_server(plugins=("plugged",))
    outputs = infer(server, "m", {"x": ROW, "y": 2 * ROW}, over=over)
    np.testing.assert_array_equal(np.asarray(outputs["u"]), ROW)
    np.testing.assert_array_equal(np.asarray(outputs["v"]), 2 * ROW)
    view, (served,) = server.resolve("m"), server.served("m")
    assert (view.platform, served.ready, list(served.executors)) == ("ensemble", True, [])
    assert (served.snapshot().success.count, served.model_queue.in_flight) == (1, 0)


@pytest.mark.parametrize("over", WAYS)
def test_a_model_whose_scheduler_runs_without_instances_needs_no_backend(
    over: str,
    plugin: None,
    headrace_repository: Path,
    headrace_server: Serve,
    infer: Callable[..., dict[str, Any]],
) -> None:
    for name, config in (("m", FORWARD), ("one", IDENTITY)):
        (headrace_repository / name / "1").mkdir(parents=True)
        (headrace_repository / name / "config.pbtxt").write_text(config)
    server = headrace_server()
    outputs = infer(server, "m", {"x": ROW}, over=over)
    np.testing.assert_array_equal(np.asarray(outputs["y"]), ROW)
    (served,) = server.served("m")
    assert (served.ready, list(served.executors), served.snapshot().success.count) == (True, [], 1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            FORWARD.replace('"forward"', '"stateful"'),
            "model 'm' has no backend, and its scheduler 'stateful' needs instances to run on: name a 'backend'",
        ),
        (
            FORWARD.replace('"forward"', '"forwards"'),
            "no plugin provides scheduler 'forwards'; did you mean 'forward'?",
        ),
        (
            FORWARD + "instance_group { count: 2 }",
            "instance_group should not be specified for model 'm', which has no backend",
        ),
        (FORWARD + 'platform: "nowhere"', "unexpected platform type 'nowhere' for m"),
        (
            FORWARD.partition("parameters")[0],
            "Invalid model name: Could not determine backend for model 'm' with no backend in model configuration.",
        ),
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_model_without_a_backend_is_refused_unless_its_scheduler_runs_without_instances(
    is_strict: bool,
    config: str,
    reason: str,
    plugin: None,
    write_model: WriteModel,
    tmp_path: Path,
) -> None:
    write_model(config, "m")
    with Server(tmp_path / "models", disable_auto_complete_config=is_strict, **LENIENT) as server:
        assert reason in server.index()[0].reason
    assert any(reason in problem for problem in inspect(tmp_path / "models", has_engines=False))


def test_an_inspection_finds_nothing_wrong_with_a_model_without_a_backend(
    plugin: None, write_model: WriteModel, tmp_path: Path
) -> None:
    write_model(FORWARD, "m")
    write_model(IDENTITY, "one")
    for has_engines in (True, False):
        assert inspect(tmp_path / "models", has_engines=has_engines) == []


def test_a_cancelled_ensemble_cancels_its_steps_and_a_failing_one_has_the_reason(
    plugin: None, write_model: WriteModel, tmp_path: Path
) -> None:
    for name, config in (("m", ENSEMBLE), ("one", IDENTITY), ("two", IDENTITY)):
        write_model(config, name)

    options: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",), "plugins": ("plugged",)}
    with Server(tmp_path / "models", **options) as server:
        (cancelled,) = ask(server, ({"x": ROW, "y": ROW}, {}), leaves=True)
        assert isinstance(cancelled, Cancelled)
        assert [server.served(name)[0].snapshot().cancelled.count for name in ("one", "two")] == [1, 1]
        on_loop(server, server.unload("two"))
        with pytest.raises(HeadraceError, match="Model 'two' is not ready"):
            server.infer("m", {"x": ROW, "y": ROW})


def test_a_deadlock_through_a_version_without_instances_is_refused(
    plugin: None, write_model: WriteModel, tmp_path: Path
) -> None:
    for name, config in (("m", ENSEMBLE), ("one", IDENTITY), ("two", IDENTITY.replace("identity", "asks"))):
        write_model(config, name)
    with Server(tmp_path / "models", plugins=("plugged",)) as server:
        (stuck,) = ask(server, ({"x": ROW, "y": ROW}, {}))
        assert isinstance(stuck, HeadraceError)
        assert "every instance of model 'two' waits, directly or through others, for this request" in stuck.message
        assert "'two' -> 'm' -> 'two'" in stuck.message
        assert [server.served(name)[0].model_queue.in_flight for name in ("m", "one", "two")] == [0, 0, 0]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_only_the_scheduler_gets_added_inputs_padding_and_kept_outputs(
    isolation: str, plugin: None, write_model: WriteModel, tmp_path: Path
) -> None:
    write_model(STATEFUL % ("true", isolation), "m")
    with Server(tmp_path / "models") as server:
        for total, wanted in ((1, ()), (2, ("y",)), (3, ("y", "what"))):
            (answer,) = ask(server, ({"x": ROW[:, :1]}, {"id": "a", "outputs": wanted}))
            outputs = outputs_of(answer)
            assert (sorted(outputs), outputs["y"]) == (sorted(wanted or ("y", "what")), [[total]])
        ((executions, rows, pid),) = outputs["what"]
        (other,) = ask(server, ({"x": ROW[:, :1]}, {"id": "b"}))
        assert outputs_of(other)["y"] == [[1]]
        snapshot = server.served("m")[0].snapshot()
    assert (executions, rows) == (3, 4)
    assert (pid != os.getpid()) is (isolation == "process")
    assert (snapshot.success.count, snapshot.executions.inference_count) == (4, 4)


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize(("pinned", "executions"), [("true", 2), ("false", 4)])
def test_neither_a_pinned_batch_that_fails_nor_padding_is_tried_one_by_one(
    pinned: str, executions: int, isolation: str, plugin: None, write_model: WriteModel, tmp_path: Path
) -> None:
    write_model(STATEFUL % (pinned, isolation), "m")
    with Server(tmp_path / "models") as server:
        bad, good = ask(server, *(({"x": np.full((1, 1), x, np.float32)}, {}) for x in (-1, 1)))
        (after,) = ask(server, ({"x": ROW[:, :1]}, {}))
    assert isinstance(bad, BackendError)
    assert isinstance(good, BackendError if pinned == "true" else InferResponse)
    assert outputs_of(after)["what"][0][0] == executions
