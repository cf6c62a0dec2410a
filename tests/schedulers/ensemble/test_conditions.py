"""Steps that run only if a tensor is true."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from headrace import ConfigError, HeadraceError, InferResponse
from headrace.errors import InvalidArgument
from headrace_testing.simulator import run_scenario

from .conftest import both, ensemble, step, tensors
from .simulator import EnsembleSimulator

ROW = np.array([[1.0]], np.float32)
ONE = f"max_batch_size: 8 {both('a', 'b', dims='1')}"
JOIN = f"max_batch_size: 8 {both('p? q?', 'r', dims='1')}"
DECIDES = f"max_batch_size: 8 {tensors('input', 'a', '1')}{tensors('output', 'flag', '1', 'BOOL')}"
MODELS = {"one": ONE, "other": ONE, "join": JOIN, "decides": DECIDES}


def when(step_name: str, condition: str) -> str:
    return f'parameters {{ key: "ensemble.when.{step_name}" value {{ string_value: "{condition}" }} }} '


#: The first step chooses one of two steps. A third one always runs, with the existing tensors.
EITHER = ensemble(
    [
        step("decides", "a=x", "flag=f"),
        step("one", "a=x", "b=u"),
        step("other", "a=x", "b=v"),
        step("join", "p=u q=v", "r=y"),
    ],
    outputs="u v y",
    dims="1",
    more=when("1", "f") + when("other", "!f"),
)


def flag(*rows: bool) -> dict[str, Any]:
    return {"flag": np.array([[each] for each in rows])}


@pytest.mark.parametrize(("says", "runs", "given", "written"), [(True, "one", "p", "u"), (False, "other", "q", "v")])
def test_a_step_runs_only_if_its_condition_holds_and_its_outputs_may_be_optional(
    says: bool, runs: str, given: str, written: str
) -> None:
    async def scenario() -> None:
        simulator = EnsembleSimulator(EITHER, MODELS)
        caller = simulator.send({"x": ROW})
        simulator.answer(simulator.call("decides"), flag(says))
        assert [call.request.model_name for call in simulator.calls] == [runs]
        simulator.answer(simulator.calls[0], {"b": 2 * ROW})
        assert [*simulator.calls[0].request.inputs] == [given]
        simulator.answer(simulator.calls[0], {"r": 3 * ROW})
        assert caller.outputs == [{written: [[2.0]], "y": [[3.0]]}]
        assert (caller.ends, simulator.model_queue.in_flight) == (1, 0)

    run_scenario(scenario)


def test_a_response_without_an_output_is_logged_as_by_triton(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "headrace.ensemble")

    async def scenario() -> None:
        simulator = EnsembleSimulator(EITHER, MODELS)
        caller = simulator.send({"x": ROW})
        simulator.answer(simulator.call("decides"), flag(True))
        simulator.answer(simulator.calls[0], {"b": ROW})
        simulator.answer(simulator.calls[0], {"r": ROW})
        assert [*caller.outputs[0]] == ["u", "y"]

    run_scenario(scenario)
    assert [text for text in caplog.messages if "Composing" in text] == [
        "Composing models did not output tensor v"  # as Triton 2.51 does from --log-verbose=1 on
    ]


def test_a_requested_output_of_a_skipped_step_is_an_error_with_the_reason() -> None:
    async def scenario() -> None:
        simulator = EnsembleSimulator(EITHER, MODELS)
        caller = simulator.send({"x": ROW}, ["u", "y"])
        simulator.answer(simulator.call("decides"), flag(False))
        while simulator.calls:
            simulator.answer(simulator.calls[0], {"b": ROW, "r": ROW})
        (error,) = caller.answers
        assert isinstance(error, InvalidArgument | HeadraceError)
        assert error.message == (
            "in ensemble 'e', [request id: <id_unknown>] output 'u' was not written: step 1 ('one') did not run, "
            "because "
            "its condition did not hold"
        )

    run_scenario(scenario)


def test_steps_after_a_skipped_step_are_skipped() -> None:
    count = 400

    async def scenario() -> None:
        names = ["x", *(f"t{n}" for n in range(count)), "y"]
        steps = [step("one", f"a={names[n]}", f"b={names[n + 1]}") for n in range(count + 1)]
        config = ensemble([*steps, step("decides", "a=x", "flag=f")], dims="1", more=when("0", "f"))
        simulator = EnsembleSimulator(config, MODELS)
        caller = simulator.send({"x": ROW})
        simulator.answer(simulator.call("decides"), flag(False))
        assert not simulator.calls
        (error,) = caller.answers
        assert isinstance(error, HeadraceError)
        assert "output 'y' was not written: step 0 ('one') did not run" in error.message

    run_scenario(scenario)


def test_rows_with_different_conditions_are_an_error_and_integers_count_as_booleans() -> None:
    async def scenario() -> None:
        simulator = EnsembleSimulator(EITHER, MODELS)
        caller = simulator.send({"x": np.ones((2, 1), np.float32)})
        simulator.answer(simulator.call("decides"), flag(True, False))
        (error,) = caller.answers
        assert isinstance(error, HeadraceError)
        assert error.message == "in ensemble 'e', the rows of the condition of step 1 ('one') differ"
        assert (caller.ends, simulator.model_queue.in_flight, len(simulator.calls)) == (1, 0, 0)

        whole = DECIDES.replace("BOOL", "INT32")
        simulator = EnsembleSimulator(EITHER, {**MODELS, "decides": whole})
        simulator.send({"x": ROW})
        simulator.answer(simulator.call("decides"), {"flag": np.array([[7]], np.int32)})
        assert [call.request.model_name for call in simulator.calls] == ["one"]

    run_scenario(scenario)


def test_an_input_may_be_the_condition_and_a_missing_one_is_false() -> None:
    async def scenario() -> None:
        config = ensemble([step("one", "a=x", "b=y"), step("one", "a=y", "b=z")], outputs="y z", dims="1")
        config += tensors("input", "f?", "1", "BOOL") + when("1", "f")
        simulator = EnsembleSimulator(config, MODELS)
        for more, count in (({}, 1), ({"f": np.array([[True]])}, 2)):
            simulator.requests.clear()
            caller = simulator.send({"x": ROW, **more})
            while simulator.calls:
                simulator.answer(simulator.calls[0], {"b": ROW})
            assert len(simulator.requests) == count
            (answer,) = caller.answers
            assert isinstance(answer, InferResponse)
            assert len(answer.outputs) == count

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            when("1", "nope"),
            "in ensemble e, parameter 'ensemble.when.1' is 'nope', but no input and no step gives an ensemble tensor "
            "'nope'; there are f, u, v, x, y",
        ),
        (
            when("1", "x"),
            "in ensemble e, step 1 runs when ensemble tensor x says so, which is TYPE_FP32 (the ensemble's input); "
            "expected "
            "TYPE_BOOL or an integer",
        ),
        (when("4", "f"), "'4' is no step; steps are numbered from 0 to 3"),
        (when("nobody", "f"), "'nobody' is no step; steps are numbered from 0 to 3"),
        (when("1", "f") + when("one", "f"), "in ensemble e, step 1 has two conditions"),
        (when("0", "f"), "in ensemble e, conditions of steps wait for each other"),
        (
            'parameters { key: "ensemble.wen.1" value { string_value: "f" } }',
            "unknown parameter 'ensemble.wen.1' of ensemble 'e'; known: ensemble.when.<step>",
        ),
    ],
)
def test_an_invalid_condition_is_refused(more: str, message: str) -> None:
    async def scenario() -> None:
        config = EITHER.partition("parameters")[0] + more
        with pytest.raises(ConfigError) as refusal:
            EnsembleSimulator(config, MODELS)
        assert message in refusal.value.message
        assert refusal.value.field.startswith("parameters")

    run_scenario(scenario)


def test_a_condition_that_is_no_scalar_is_refused() -> None:
    async def scenario() -> None:
        with pytest.raises(
            ConfigError, match=r"is no scalar: its shape is \[2\] \(output flag of step 0\); expected \[1\]"
        ):
            EnsembleSimulator(
                EITHER, {**MODELS, "decides": DECIDES.replace("dims: [1] }", "dims: [2] }").replace("[2]", "[1]", 1)}
            )

    run_scenario(scenario)
