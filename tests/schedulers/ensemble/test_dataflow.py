"""Requests through graphs of every shape, compared with a plain evaluation of the same graph."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Cancelled, HeadraceError, InferResponse, InternalError, Ticket, Unavailable
from headrace_testing.simulator import run_scenario

from .conftest import both, ensemble, identity, step
from .simulator import EnsembleSimulator


def model(inputs: str, outputs: str, more: str = "") -> str:
    return f"max_batch_size: 8 {both(inputs, outputs, dims='1')} {more}"


DECOUPLED = "model_transaction_policy { decoupled: true }"
ROW = np.array([[1.0]], np.float32)


@dataclass(frozen=True)
class Node:
    """A step that adds what it reads: output ``n`` is the sum of all, plus 10 * its number, plus n."""

    number: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"m{self.number}"

    def config(self) -> str:
        return model(
            " ".join(f"i{n}" for n in range(len(self.reads))), " ".join(f"o{n}" for n in range(len(self.writes)))
        )

    def step(self) -> str:
        reads = " ".join(f"i{n}={tensor}" for n, tensor in enumerate(self.reads))
        return step(self.name, reads, " ".join(f"o{n}={tensor}" for n, tensor in enumerate(self.writes)))

    def compute(self, given: list[Any]) -> dict[str, Any]:
        return {f"o{n}": sum(given) + np.float32(10 * self.number + n) for n in range(len(self.writes))}


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Node], list[str], list[str]]:
    """Steps in order of what they read, the inputs of the ensemble, and its outputs."""
    inputs = [f"x{n}" for n in range(draw(st.integers(1, 3)))]
    known, nodes = list(inputs), []
    for number in range(draw(st.integers(1, 8))):
        reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        writes = tuple(f"t{number}_{n}" for n in range(draw(st.integers(1, 2))))
        nodes.append(Node(number, tuple(reads), writes))
        known += writes
    read = {tensor for node in nodes for tensor in node.reads}
    written = [tensor for node in nodes for tensor in node.writes]
    outputs = [t for t in written if t not in read or draw(st.booleans())]
    return nodes, [name for name in inputs if name in read], outputs


def evaluate(nodes: list[Node], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor, one step after the other."""
    values = dict(given)
    for node in nodes:
        found = node.compute([values[tensor] for tensor in node.reads])
        values |= {tensor: found[f"o{n}"] for n, tensor in enumerate(node.writes)}
    return values


def simulator_of(nodes: list[Node], inputs: list[str], outputs: list[str], data: st.DataObject) -> EnsembleSimulator:
    shuffled = data.draw(st.permutations(nodes))
    config = ensemble([node.step() for node in shuffled], " ".join(inputs), " ".join(outputs), dims="1")
    return EnsembleSimulator(config, {node.name: node.config() for node in nodes})


def compute(simulator: EnsembleSimulator, nodes: list[Node], call: Any) -> dict[str, Any]:
    (node,) = (node for node in nodes if node.name == call.request.model_name)
    return node.compute([call.request.inputs[f"i{n}"] for n in range(len(node.reads))])


def needed(nodes: list[Node], outputs: list[str]) -> set[str]:
    """The steps without which ``outputs`` cannot be."""
    found, todo = set[str](), list(outputs)
    while todo:
        tensor = todo.pop()
        for node in nodes:
            if tensor in node.writes and node.name not in found:
                found.add(node.name)
                todo += node.reads
    return found


@settings(deadline=None, max_examples=150)
@given(graphs(), st.data())
def test_a_graph_equals_its_steps_one_by_one_and_runs_each_as_early_as_possible(
    graph: tuple[list[Node], list[str], list[str]], data: st.DataObject
) -> None:
    nodes, inputs, outputs = graph

    async def scenario() -> None:
        simulator = simulator_of(nodes, inputs, outputs, data)
        wanted = data.draw(st.lists(st.sampled_from(outputs), unique=True))
        given = {name: np.full((2, 1), data.draw(st.integers(0, 9)), np.float32) for name in inputs}
        expected = evaluate(nodes, given)
        caller = simulator.send(given, wanted)
        runs, done, there = needed(nodes, wanted or outputs), set[str](), set(inputs)
        while simulator.calls:
            ready = {n.name for n in nodes if n.name in runs - done and there.issuperset(n.reads)}
            assert {call.request.model_name for call in simulator.calls} == ready
            call = data.draw(st.sampled_from(simulator.calls))
            (node,) = (node for node in nodes if node.name == call.request.model_name)
            simulator.answer(call, compute(simulator, nodes, call))
            done.add(node.name)
            there.update(node.writes)
        assert done == runs
        assert caller.ends == 1
        assert caller.outputs == [{name: expected[name].tolist() for name in outputs if name in (wanted or outputs)}]
        assert simulator.model_queue.in_flight == 0

    run_scenario(scenario)


def end(simulator: EnsembleSimulator, nodes: list[Node], data: st.DataObject) -> None:
    """Answer every open call."""
    while simulator.calls:
        call = data.draw(st.sampled_from(simulator.calls))
        simulator.answer(call, Cancelled("gone") if call.cancelled else compute(simulator, nodes, call))


@settings(deadline=None, max_examples=100)
@given(graphs(), st.data())
def test_a_cancelled_request_is_answered_once_and_its_calls_are_cancelled(
    graph: tuple[list[Node], list[str], list[str]], data: st.DataObject
) -> None:
    nodes, inputs, outputs = graph

    async def scenario() -> None:
        simulator = simulator_of(nodes, inputs, outputs, data)
        caller = simulator.send(dict.fromkeys(inputs, ROW))
        for _ in range(data.draw(st.integers(0, len(nodes)))):
            if simulator.calls:
                call = data.draw(st.sampled_from(simulator.calls))
                simulator.answer(call, compute(simulator, nodes, call))
        has_ended, count = bool(caller.ends), len(simulator.requests)
        caller.ticket.cancel()
        assert caller.ends == 1
        assert isinstance(caller.answers[-1], InferResponse if has_ended else Cancelled)
        assert all(call.abandoned for call in simulator.calls)
        end(simulator, nodes, data)
        assert (len(simulator.requests), simulator.model_queue.in_flight, caller.ends) == (count, 0, 1)
        assert simulator.statistics.snapshot().cancelled.count == (not has_ended)

    run_scenario(scenario)


@settings(deadline=None, max_examples=100)
@given(graphs(), st.data())
def test_the_first_error_is_answered_once_after_the_last_step(
    graph: tuple[list[Node], list[str], list[str]], data: st.DataObject
) -> None:
    nodes, inputs, outputs = graph

    async def scenario() -> None:
        simulator = simulator_of(nodes, inputs, outputs, data)
        caller = simulator.send(dict.fromkeys(inputs, ROW))
        for _ in range(data.draw(st.integers(0, len(nodes) - 1))):
            if len(simulator.calls) > 1 or (simulator.calls and not caller.ends):
                call = data.draw(st.sampled_from(simulator.calls))
                if len(simulator.requests) < len(nodes) or len(simulator.calls) > 1:
                    simulator.answer(call, compute(simulator, nodes, call))
        if caller.ends:
            return
        count, failing = len(simulator.requests), data.draw(st.sampled_from(simulator.calls))
        simulator.answer(failing, InternalError("boom"))
        assert all(call.cancelled for call in simulator.calls)
        while simulator.calls:
            assert not caller.ends
            simulator.answer(data.draw(st.sampled_from(simulator.calls)), Unavailable("later"))
        (error,) = caller.answers
        assert isinstance(error, HeadraceError)
        assert (error.message, error.code) == ("in ensemble 'e', boom", InternalError.code)
        assert (len(simulator.requests), caller.ends, simulator.model_queue.in_flight) == (count, 1, 0)

    run_scenario(scenario)


def test_a_refused_step_is_an_error_of_the_ensemble() -> None:
    async def scenario() -> None:
        steps = [step("one", "a=x", "b=y"), step("one", "a=x", "b=z")]
        simulator = EnsembleSimulator(ensemble(steps, outputs="y z", dims="1"), {"one": model("a", "b")})
        simulator.refusal = Unavailable("Exceeds maximum queue size")
        caller = simulator.send({"x": ROW})
        (error,) = caller.answers
        assert isinstance(error, HeadraceError)
        assert (error.message, error.code) == ("in ensemble 'e', Exceeds maximum queue size", Unavailable.code)
        assert (caller.ends, simulator.model_queue.in_flight, simulator.refused) == (1, 0, 1), (
            "nothing is begun after the error"
        )

    run_scenario(scenario)


CHAIN = ensemble([step("one", "a=x", "b=m"), step("one", "a=m", "b=y")], dims="1")


def test_tensors_pass_between_steps_uncopied_and_are_freed_after_the_last_reader() -> None:
    async def scenario() -> None:
        steps = [step("one", "a=x", "b=m"), step("one", "a=m", "b=n"), step("one", "a=n", "b=y")]
        simulator = EnsembleSimulator(ensemble(steps, dims="1"), {"one": model("a", "b")})
        caller = simulator.send({"x": ROW})
        assert simulator.calls[0].request.inputs["a"] is ROW
        middle = np.array([[2.0]], np.float32)
        middle_reference = weakref.ref(middle)
        simulator.answer(simulator.calls[0], {"b": middle})
        assert simulator.calls[0].request.inputs["a"] is middle
        del middle
        simulator.requests.clear()
        simulator.answer(simulator.calls[0], {"b": 2 * ROW})
        assert middle_reference() is None, "the last step runs, and does not read it"
        last = np.array([[3.0]], np.float32)
        simulator.answer(simulator.calls[0], {"b": last})
        (answer,) = caller.answers
        assert isinstance(answer, InferResponse)
        assert answer.outputs["y"] is last

    run_scenario(scenario)


def test_request_fields_reach_every_step() -> None:
    async def scenario() -> None:
        simulator = EnsembleSimulator(CHAIN, {"one": model("a", "b")})
        fields: dict[str, Any] = {
            "id": "7", "parameters": {"p": 1}, "priority": 2, "timeout_us": 3, "sequence_id": "s", "sequence_end": True,
        }  # fmt: skip
        caller = simulator.send({"x": ROW}, **fields)
        while simulator.calls:
            simulator.answer(simulator.calls[0], {"b": ROW})
        for request in simulator.requests:
            assert {key: getattr(request, key) for key in fields} == fields
            assert (request.caller, request.callers) == (caller.ticket.request, ("e",))

    run_scenario(scenario)


def test_sequence_parameters_of_a_step_reach_later_steps_and_the_caller() -> None:
    async def scenario() -> None:
        steps = [step("one", "a=x", "b=m"), step("one", "a=m", "b=y"), step("one", "a=x", "b=z")]
        simulator = EnsembleSimulator(ensemble(steps, outputs="y z", dims="1"), {"one": model("a", "b")})
        caller = simulator.send({"x": ROW}, sequence_id=1)
        flags = {"sequence_id": 42, "sequence_start": True, "sequence_end": True}
        simulator.answer(simulator.calls[0], InferResponse({"b": ROW}, {**flags, "other": 1}))
        aside, behind = simulator.calls
        found = [(r.sequence_id, r.sequence_start, r.sequence_end) for r in (aside.request, behind.request)]
        assert found == [(1, False, False), (42, True, True)]
        simulator.answer(behind, InferResponse({"b": ROW}, {"sequence_id": 43}))
        simulator.answer(aside, {"b": ROW})
        (answer,) = caller.answers
        assert isinstance(answer, InferResponse)
        assert answer.parameters == {"sequence_id": 43, "sequence_start": False, "sequence_end": False}

    run_scenario(scenario)


def test_the_answer_has_the_sequence_of_the_request_if_any() -> None:
    async def scenario() -> None:
        simulator = EnsembleSimulator(CHAIN, {"one": model("a", "b")})
        for fields, expected in (
            ({"sequence_id": 5, "sequence_start": True, "sequence_end": True}, (5, True, True)),
            ({"sequence_id": "abc", "sequence_start": True}, ("abc", True, False)),
            ({}, None),
        ):
            caller = simulator.send({"x": ROW}, **fields)
            while simulator.calls:
                simulator.answer(simulator.calls[0], {"b": ROW})
            (answer,) = caller.answers
            assert isinstance(answer, InferResponse)
            names = ("sequence_id", "sequence_start", "sequence_end")
            assert answer.parameters == ({} if expected is None else dict(zip(names, expected, strict=True)))

    run_scenario(scenario)


def test_a_missing_optional_input_is_not_sent_to_the_step() -> None:
    async def scenario() -> None:
        config = ensemble([step("one", "a=x c=w", "b=y")], inputs="x w?", dims="1")
        simulator = EnsembleSimulator(config, {"one": model("a c?", "b")})
        simulator.send({"x": ROW})
        simulator.send({"x": ROW, "w": ROW})
        assert [sorted(call.request.inputs) for call in simulator.calls] == [["a"], ["a", "c"]]

    run_scenario(scenario)


def test_the_batch_axis_is_removed_for_a_model_without_one_and_restored() -> None:
    async def scenario() -> None:
        alone = "max_batch_size: 0 " + both("a", "b", dims="2")
        config = ensemble([step("alone", "a=x", "b=m"), step("one", "a=m", "b=y")])
        simulator = EnsembleSimulator(config, {"alone": alone, "one": identity()})
        row = np.array([[1, 2]], np.float32)
        caller = simulator.send({"x": row})
        first = simulator.calls[0].request.inputs["a"]
        assert isinstance(first, np.ndarray)
        assert first.shape == (2,)
        assert np.shares_memory(first, row)
        simulator.answer(simulator.calls[0], {"b": first})
        assert simulator.calls[0].request.inputs["a"].shape == (1, 2)
        simulator.answer(simulator.calls[0], {"b": row})
        assert caller.outputs == [{"y": [[1, 2]]}]

    run_scenario(scenario)


def test_no_response_or_several_where_one_is_expected_is_an_error() -> None:
    async def scenario() -> None:
        for number in (0, 2):
            simulator = EnsembleSimulator(CHAIN, {"one": model("a", "b")})
            caller = simulator.send({"x": ROW})
            for _ in range(number):
                simulator.answer(simulator.calls[0], {"b": ROW}, final=False)
            simulator.answer(simulator.calls[0], None)
            (error,) = caller.answers
            assert isinstance(error, HeadraceError)
            assert error.message == f"in ensemble 'e', expected a single response, got {number}"

    run_scenario(scenario)


def test_a_response_before_the_end_is_the_answer() -> None:
    async def scenario() -> None:
        simulator = EnsembleSimulator(ensemble([step("one", "a=x", "b=y")], dims="1"), {"one": model("a", "b")})
        caller = simulator.send({"x": ROW})
        simulator.answer(simulator.calls[0], {"b": ROW}, final=False)
        assert not caller.ends
        simulator.answer(simulator.calls[0], None)
        assert caller.outputs == [{"y": [[1.0]]}]

    run_scenario(scenario)


# ---------------------------------------------------------------------------
# Decoupled steps
# ---------------------------------------------------------------------------


SPLIT = ensemble(
    [
        step("many", "a=x", "b=m c=n"),
        step("add", "p=m q=n", "s=k"),
        step("many", "a=k", "b=u c=v"),
        step("add", "p=u q=v", "s=y"),
    ],
    dims="1",
)
MANY, ADD = model("a", "b c", DECOUPLED), model("p q", "s")


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_every_response_of_a_decoupled_step_runs_through_the_graph(data: st.DataObject) -> None:
    """Each of two decoupled steps multiplies the items. The sums equal those of a plain evaluation."""

    async def scenario() -> None:
        simulator = EnsembleSimulator(SPLIT, {"many": MANY, "add": ADD})
        assert simulator.config.model_transaction_policy.decoupled
        caller = simulator.send({"x": ROW})
        expected: list[float] = []
        counts: dict[Ticket, int] = {}  # not by id(), which a later call can have: then examples do not repeat
        responses = 0
        while simulator.calls:
            assert not caller.ends
            call = data.draw(st.sampled_from(simulator.calls))
            inputs = {name: float(np.asarray(x)[0, 0]) for name, x in call.request.inputs.items()}
            if call.request.model_name == "add":
                total = inputs["p"] + inputs["q"]
                simulator.answer(call, {"s": np.array([[total]], np.float32)})
                continue
            sent = counts.get(call, 0)
            is_last, has_response = data.draw(st.booleans()) or sent > 2, data.draw(st.booleans())
            counts[call] = sent + 1
            if has_response:
                responses += 1
                b, c = inputs["a"] + sent, inputs["a"] * 100
                if call.request.inputs["a"] is not ROW:  # the second one
                    expected.append(b + c)
                simulator.answer(call, {"b": np.array([[b]], np.float32), "c": np.array([[c]], np.float32)}, is_last)
            elif is_last:
                simulator.answer(call, None)
        assert caller.ends == 1
        assert sorted(each["y"][0][0] for each in caller.outputs) == sorted(expected)
        assert simulator.model_queue.in_flight == 0
        assert simulator.reads == responses, "every response that went its way lets its model go on"

    run_scenario(scenario)


def test_the_last_response_carries_the_end_if_nothing_else_runs() -> None:
    async def scenario() -> None:
        config = ensemble([step("many", "a=x", "b=m c=n"), step("add", "p=m q=n", "s=y")], dims="1")
        simulator = EnsembleSimulator(config, {"many": MANY, "add": ADD})
        caller = simulator.send({"x": ROW})
        many = simulator.calls[0]
        simulator.answer(many, {"b": ROW, "c": ROW}, final=False)
        simulator.answer(many, None)
        assert not caller.answers
        simulator.answer(simulator.calls[0], {"s": ROW})
        assert (len(caller.outputs), caller.ends) == (1, 1)

    run_scenario(scenario)


def test_an_error_in_one_response_ends_the_request_after_the_others() -> None:
    async def scenario() -> None:
        config = ensemble([step("many", "a=x", "b=m c=n"), step("add", "p=m q=n", "s=y")], dims="1")
        simulator = EnsembleSimulator(config, {"many": MANY, "add": ADD})
        caller = simulator.send({"x": ROW})
        many = simulator.calls[0]
        for _ in range(3):
            simulator.answer(many, {"b": ROW, "c": ROW}, final=False)
        adds = [call for call in simulator.calls if call is not many]
        simulator.answer(adds[0], {"s": ROW})
        simulator.answer(adds[1], InternalError("boom"))
        assert many.cancelled
        assert adds[2].cancelled
        simulator.answer(adds[2], Cancelled(""))
        assert len(caller.answers) == 1
        simulator.answer(many, {"b": ROW, "c": ROW}, final=False)
        simulator.answer(many, None)
        assert caller.ends == 1
        assert len(caller.outputs) == 1
        assert isinstance(caller.answers[-1], HeadraceError)
        assert len(simulator.requests) == 4, "nothing is begun after the error"

    run_scenario(scenario)


def test_a_step_has_a_limited_number_of_items_in_flight_and_the_rest_wait_in_order() -> None:
    async def scenario() -> None:
        steps = [step("many", "a=x", "b=m c=n"), step("add", "p=m q=n", "s=y")]
        config = ensemble(steps, dims="1").replace(
            "ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 2"
        )
        simulator = EnsembleSimulator(config, {"many": MANY, "add": ADD})
        caller = simulator.send({"x": ROW})
        many = simulator.calls[0]
        for number in range(5):
            simulator.answer(many, {"b": number * ROW, "c": ROW}, final=False)
        simulator.answer(many, None)
        seen: list[float] = []
        while simulator.calls:
            assert len(simulator.calls) <= 2
            assert simulator.reads == len(seen), "who is not through keeps the model from going on"
            call = simulator.calls[0]
            seen.append(float(np.asarray(call.request.inputs["p"])[0, 0]))
            simulator.answer(call, {"s": call.request.inputs["p"]})
        assert seen == [0, 1, 2, 3, 4]
        assert (len(caller.outputs), caller.ends, simulator.model_queue.in_flight) == (5, 1, 0)

    run_scenario(scenario)


def test_waiting_items_end_with_an_error_or_a_cancellation() -> None:
    async def scenario(leaves: bool) -> None:
        steps = [step("many", "a=x", "b=m c=n"), step("add", "p=m q=n", "s=y")]
        config = ensemble(steps, dims="1").replace(
            "ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 1"
        )
        simulator = EnsembleSimulator(config, {"many": MANY, "add": ADD})
        caller = simulator.send({"x": ROW})
        many = simulator.calls[0]
        for _ in range(3):
            simulator.answer(many, {"b": ROW, "c": ROW}, final=False)
        if leaves:
            caller.ticket.cancel()
        else:
            simulator.answer(simulator.call("add"), InternalError("boom"))
        while simulator.calls:
            simulator.answer(simulator.calls[0], Cancelled("") if simulator.calls[0] is not many else None)
        assert (caller.ends, simulator.model_queue.in_flight, len(simulator.requests)) == (1, 0, 2)

    run_scenario(lambda: scenario(True))
    run_scenario(lambda: scenario(False))
