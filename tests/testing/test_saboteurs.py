"""One broken backend per check. That check must fail.

A saboteur is the sound backend of ``conftest.py`` with one piece of its source replaced. For checks of core, it is a
changed piece of core.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace import Cancelled, Unavailable
from headrace.messages.ticket import Ticket
from headrace.schedulers.dynamic import QueuePolicy
from headrace.schedulers.model_queue import ModelQueue
from headrace_testing import BackendConformance, Example

#: The exceptions of a check that fails: a failed assertion, or the backend's own error.
FAILURES = (Exception, pytest.fail.Exception)

EXECUTE = '        x = inputs["x"]\n        return {"y": (x * self.scale).astype(x.dtype)}'
INIT = "        self.model, self.scale = model, scale"


@dataclass(frozen=True)
class Saboteur:
    """``old`` in the sound source is replaced by ``new``. Then ``check`` must fail, with ``because`` in its message."""

    check: str
    old: str
    new: str
    because: str
    arguments: dict[str, Any] = field(default_factory=dict)


def executing(check: str, line: str, because: str, result: str = "", **arguments: Any) -> Saboteur:
    """Return a saboteur whose ``execute`` runs ``line`` first, and returns ``result`` if it is not empty."""
    answer = result or "(x * self.scale).astype(x.dtype)"
    return Saboteur(
        check, EXECUTE, f'        x = inputs["x"]\n        {line}\n        return {{"y": {answer}}}', because, arguments
    )


SABOTEURS = {
    "imports the engine at the top": Saboteur(
        "test_importing_the_plugin_imports_no_engine",
        "import os, threading", "import os, threading, heavy_engine", "imports heavy_engine",
    ),
    "cannot be imported": Saboteur(
        "test_importing_the_plugin_imports_no_engine",
        "import os, threading", "import nonesuch", "No module named 'nonesuch'",
    ),
    "has another instance class than it declares": Saboteur(
        "test_instances_are_of_the_declared_classes",
        "    instance_classes = (Instance,)", "    instance_classes = (RequestInstance,)",
        "a Scaler, which is none of RequestInstance",
    ),
    "raises the engine's own error": Saboteur(
        "test_a_damaged_model_file_is_a_load_error_naming_the_file",
        'raise LoadError(f"{path}: {error}") from error', "raise", "gives UnicodeDecodeError",
    ),
    "does not name the file": Saboteur(
        "test_a_damaged_model_file_is_a_load_error_naming_the_file",
        'LoadError(f"{path}: {error}")', 'LoadError("it is broken")', "does not name 'scale.txt'",
    ),
    "reads a damaged file": Saboteur(
        "test_a_damaged_model_file_is_a_load_error_naming_the_file",
        'raise LoadError(f"{path}: {error}") from error', "scale = 1.0", "gives None",
    ),
    "is wrong": executing("test_answers_equal_the_examples", "x = x + 1", "output 'y'"),
    "casts silently": executing(
        "test_answers_equal_the_examples", "", "output 'y' is FP64", "(x * self.scale).astype('float64')"
    ),
    "lets the batch size leak": executing(
        "test_each_row_alone_equals_the_row_in_the_batch", "x = x + len(x)", "row 0 alone"
    ),
    "fails on zero rows": executing("test_zero_rows_give_zero_rows", "x[0]", "`zero_rows = False` in"),
    "reuses its output buffer": Saboteur(
        "test_an_answer_is_unchanged_by_the_next_call",
        EXECUTE,
        '        x = inputs["x"]\n'
        '        self.buffer = getattr(self, "buffer", np.empty_like(x))\n'
        '        return {"y": np.multiply(x, self.scale, out=self.buffer)}',
        "an answer after the next call",
    ),
    "frees its output on close": Saboteur(
        "test_an_answer_is_unchanged_by_the_next_call",
        EXECUTE,
        '        self.kept = getattr(self, "kept", []) + [inputs["x"] * self.scale]\n'
        '        return {"y": self.kept[-1]}\n\n'
        "    def close(self) -> None:\n        for each in self.kept:\n            each[:] = 0",
        "an answer after close",
    ),
    "writes to its input": executing("test_inputs_are_not_written_to", "x *= self.scale", "wrote to input 'x'", "x"),
    "wants aligned inputs": executing(
        "test_inputs_may_be_views_on_a_received_buffer", "assert x.flags.aligned", "AssertionError"
    ),
    "wants writable inputs": executing(
        "test_inputs_may_be_views_on_a_received_buffer", "x.setflags(write=True)", "WRITEABLE"
    ),
    "is bound to its loader's thread": Saboteur(
        "test_runs_on_a_thread_other_than_the_loaders",
        f"{INIT}\n\n    def execute(self, inputs: Tensors) -> Tensors:\n",
        f"{INIT}\n        self.thread = threading.get_ident()\n\n"
        "    def execute(self, inputs: Tensors) -> Tensors:\n"
        "        if threading.get_ident() != self.thread:\n"
        '            raise BackendError("wrong thread")\n',
        "wrong thread",
    ),
    "fails on an event loop": executing(
        "test_runs_alternately_on_the_loop_and_on_its_thread",
        'import asyncio; assert asyncio._get_running_loop() is None, "a loop"', "a loop",
    ),
    "differs between instances": Saboteur(
        "test_two_instances_agree", INIT, INIT + " + int(model.instance_name[-1])", "the second instance"
    ),
    "shares state between instances": Saboteur(
        "test_two_instances_agree",
        EXECUTE,
        '        Scaler.calls = getattr(Scaler, "calls", 0) + 1\n'
        '        return {"y": inputs["x"] * self.scale + Scaler.calls // 3}',
        "the first instance, after the second ran",
    ),
    "claims a type that it casts": executing(
        "test_every_claimed_type_is_served", "", "FP32, but the config says FP16", "x * self.scale", kind="FP16"
    ),
    "confuses a scalar with a vector": executing(
        "test_every_claimed_type_is_served", "", "output 'y'", "np.atleast_2d(x * self.scale).T.sum(0)", kind="SCALAR"
    ),
    "loosens its config": Saboteur(
        "test_a_wrong_shape_or_dtype_is_refused_before_execute",
        "    def load(self",
        "    def complete_config(self, model: Model) -> None:\n"
        "        model.config.input[0].dims[:] = model.config.output[0].dims[:] = [-1]\n\n    def load(self",
        "",
    ),
    "stays broken after a failure": Saboteur(
        "test_after_an_exception_the_next_request_succeeds",
        EXECUTE,
        '        self.broken = getattr(self, "broken", False) or "x" not in inputs\n'
        '        if self.broken:\n            raise BackendError("poisoned")\n'
        '        return {"y": inputs["x"] * self.scale}',
        "poisoned",
    ),
    "skips cancelled requests": Saboteur(
        "test_a_request_cancelled_during_execution_leaves_the_others_answered",
        "class Scaler(Instance):\n    any_thread = True\n\n"
        f"    def __init__(self, model: Model, scale: np.float32) -> None:\n{INIT}\n\n"
        f"    def execute(self, inputs: Tensors) -> Tensors:\n{EXECUTE}",
        f"class Scaler(RequestInstance):\n    def __init__(self, model: Model, scale: np.float32) -> None:\n{INIT}\n\n"
        "    def execute_requests(self, requests):\n"
        '        return [InferResponse({"y": request.inputs["x"] * self.scale})\n'
        "                for request in requests if not request.cancelled]",
        "answers for 3 requests",
        {"position": 1},
    ),
    "mixes concurrent calls": Saboteur(
        "test_concurrent_calls_do_not_mix",
        f"    any_thread = True\n\n    def __init__(self, model: Model, scale: np.float32) -> None:\n{INIT}\n\n"
        f"    def execute(self, inputs: Tensors) -> Tensors:\n{EXECUTE}",
        f"    concurrency = 4\n\n    def __init__(self, model: Model, scale: np.float32) -> None:\n{INIT}\n\n"
        "    def execute(self, inputs: Tensors) -> Tensors:\n"
        '        self.x = inputs["x"]\n        threading.Event().wait(0.002)\n'
        '        return {"y": self.x * self.scale}',
        "in concurrent calls",
    ),
    "reads device tensors but stacks none": Saboteur(
        "test_tensors_on_a_device_are_read_like_arrays",
        "    any_thread = True", "    any_thread = True\n    takes_device_tensors = True", "StackedTensors",
    ),
    "leaks memory": Saboteur(
        "test_fifty_reloads_keep_memory_files_and_threads_flat",
        INIT, INIT + "\n        UNDO.append(np.ones(1 << 18).sum)", "MiB of memory",
    ),
    "leaks files": Saboteur(
        "test_fifty_reloads_keep_memory_files_and_threads_flat",
        INIT,
        INIT + "\n        file = os.open(os.devnull, os.O_RDONLY)\n        UNDO.append(lambda: os.close(file))",
        "files open",
    ),
    "leaks threads": Saboteur(
        "test_fifty_reloads_keep_memory_files_and_threads_flat",
        INIT,
        INIT + "\n        timer = threading.Timer(30, int)\n        timer.start()\n        UNDO.append(timer.cancel)",
        "threads running",
    ),
    "answers views on a message differently": executing(
        "test_the_answer_is_the_same_over", "x = x if x.flags.writeable else x + 1", "over http-binary",
        over="http-binary",
    ),
    "answers views on a gRPC message differently": executing(
        "test_the_answer_is_the_same_over", "x = x if x.flags.writeable else x + 1", "over grpc", over="grpc"
    ),
}  # fmt: skip


@pytest.fixture
def run(
    conformance: BackendConformance, example: Example, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., None]:
    """Return a function that runs one check by name, with its fixtures."""

    def call(check: str, **arguments: Any) -> None:
        method = getattr(conformance, check)
        fixtures = {"example": example, "tmp_path_factory": tmp_path_factory} | arguments
        method(**{name: fixtures[name] for name in inspect.signature(method).parameters})

    return call


@pytest.mark.parametrize("saboteur", SABOTEURS.values(), ids=SABOTEURS.keys())
def test_the_check_fails(
    saboteur: Saboteur, sound: str, install: Callable[..., None], run: Callable[..., None]
) -> None:
    assert sound.count(saboteur.old) == 1, "the sabotage does not apply"
    install(sound.replace(saboteur.old, saboteur.new))
    with pytest.raises(FAILURES) as caught:
        run(saboteur.check, **saboteur.arguments)
    assert saboteur.because in f"{caught.type.__name__}: {caught.value}"


def test_a_plugin_without_an_entry_point_is_caught(
    sound: str, install: Callable[..., None], run: Callable[..., None]
) -> None:
    install(sound, entry_points="")
    with pytest.raises(AssertionError, match=r"no installed distribution brings backend 'toy'.*toy = \"headrace_toy\""):
        run("test_a_server_finds_the_plugin")


def test_a_parser_that_accepts_any_parameter_is_caught(
    sound: str, install: Callable[..., None], run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(sound)
    monkeypatch.setattr("headrace.config.parameters.unknown", lambda *_: [])
    with pytest.raises(AssertionError, match="the parameter 'no_such_parameter' is accepted"):
        run("test_an_unknown_parameter_is_refused")


@pytest.mark.parametrize(
    ("check", "position"),
    [
        ("test_cancelling_a_waiting_request_leaves_the_others_answered", 1),
        ("test_cancelling_a_request_of_a_full_batch_leaves_the_others_answered", 2),
    ],
)
def test_a_scheduler_that_cancels_other_requests_is_caught(
    sound: str,
    install: Callable[..., None],
    run: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    position: int,
) -> None:
    deliver = ModelQueue.deliver

    def cancel_all(self: ModelQueue, ticket: Ticket) -> None:
        for other in self.queue:
            self._answer_waiting(other, Cancelled("another request was cancelled"), self.statistics.cancelled)

    def deliver_none(self: ModelQueue, tickets: Sequence[Ticket], answers: Sequence[Any]) -> None:
        if any(ticket.cancelled for ticket in tickets):
            answers = [Unavailable("another request was cancelled")] * len(tickets)
        deliver(self, tickets, answers)

    install(sound)
    monkeypatch.setattr(ModelQueue, "_cancel", cancel_all)
    monkeypatch.setattr(ModelQueue, "deliver", deliver_none)
    with pytest.raises(AssertionError, match="failed with the cancelled one"):
        run(check, position=position)


def test_a_scheduler_without_deadlines_is_caught(
    sound: str, install: Callable[..., None], run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(sound)
    monkeypatch.setattr(QueuePolicy, "from_config", classmethod(lambda cls, policy: cls()))
    with pytest.raises(AssertionError, match="a request past its deadline gets None"):
        run("test_a_passed_deadline_is_never_executed")


def test_every_check_has_a_saboteur() -> None:
    caught = {saboteur.check for saboteur in SABOTEURS.values()} | {
        "test_a_server_finds_the_plugin",
        "test_an_unknown_parameter_is_refused",
        "test_cancelling_a_waiting_request_leaves_the_others_answered",
        "test_cancelling_a_request_of_a_full_batch_leaves_the_others_answered",
        "test_a_passed_deadline_is_never_executed",
    }
    not_built = {"test_version_2_replaces_1_under_load"}
    checks = {name for name in dir(BackendConformance) if name.startswith("test_")}
    assert checks - not_built == caught
