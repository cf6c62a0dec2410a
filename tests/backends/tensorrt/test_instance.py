"""Executions with the recorded fake: the copies and waits. Arithmetic is the oracle."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from headrace import BackendError, InvalidArgument
from headrace_tensorrt import Parameters

GRAPHS = "optimization { cuda { graphs: true } }"


def arguments_of(calls: list[tuple[str, tuple[Any, ...]]], what: str) -> list[tuple[Any, ...]]:
    return [arguments for name, arguments in calls if name == what]


def test_answers_are_those_of_arithmetic(plans: Any, pair: Any) -> None:
    outputs = plans.serve(plans.add()).execute({"A": pair[0], "B": pair[1]})
    np.testing.assert_array_equal(outputs["S"], pair[0] + pair[1])
    np.testing.assert_array_equal(outputs["D"], pair[0] - pair[1])


def test_a_kept_answer_survives_the_next_execution(plans: Any, pair: Any) -> None:
    instance = plans.serve(plans.add())
    result = instance.execute({"A": pair[0], "B": pair[1]})["S"]
    instance.execute({"A": pair[1], "B": pair[1]})
    np.testing.assert_array_equal(result, pair[0] + pair[1])


def test_shapes_are_set_only_when_they_change(plans: Any, calls: Any) -> None:
    instance = plans.serve(plans.copy())
    calls.clear()
    for rows in (2, 2, 2, 3, 2):
        x = np.full((rows, 4), rows, np.float32)
        np.testing.assert_array_equal(instance.execute({"x": x})["y"], x)
    assert arguments_of(calls, "set_input_shape") == [("x", (2, 4)), ("x", (3, 4)), ("x", (2, 4))]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_one_copy_in_and_one_out_per_tensor(plans: Any, pair: Any, driver: Any, is_pinned: bool) -> None:
    enable = "true" if is_pinned else "false"
    instance = plans.serve(
        plans.add(),
        f"optimization {{ input_pinned_memory {{ enable: {enable} }} output_pinned_memory {{ enable: {enable} }} }}",
    )
    before = driver.copies_in, driver.copies_out, driver.pinned_count
    for _ in range(5):
        outputs = instance.execute({"A": pair[0], "B": pair[1]})
        np.testing.assert_array_equal(outputs["S"], pair[0] + pair[1])
    assert (driver.copies_in - before[0], driver.copies_out - before[1]) == (10, 10)
    assert driver.pinned_count - before[2] <= (4 if is_pinned else 0)  # reused when the responses are released


@pytest.mark.parametrize("columns", [1, 200_000])
def test_small_inputs_and_large_ones_arrive_whole(plans: Any, columns: int) -> None:
    x = np.random.default_rng(columns).normal(size=(3, columns)).astype(np.float32)
    np.testing.assert_array_equal(plans.serve(plans.copy(shape=(-1, columns))).execute({"x": x})["y"], x)


def test_inputs_may_have_any_layout(plans: Any) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::-1][:, :4]
    np.testing.assert_array_equal(plans.serve(plans.copy()).execute({"x": x})["y"], x)


def test_closing_frees_all_memory_of_the_gpu(plans: Any, pair: Any, driver: Any) -> None:
    before = driver.used_bytes(0), driver.live_objects
    instance = plans.serve(plans.add(), GRAPHS)
    assert driver.used_bytes(0) > before[0]
    result = instance.execute({"A": pair[0], "B": pair[1]})["S"]
    weights = weakref.ref(instance._engine)
    instance.close()
    gc.collect()
    assert weights() is None  # the pool of `serve` is freed, too
    assert (driver.used_bytes(0), driver.live_objects) == before
    np.testing.assert_array_equal(result, pair[0] + pair[1])


def test_a_model_is_warmed_up_on_zeros(plans: Any, step: Any) -> None:
    """Whatever lay in the memory of the GPU could be an index that is out of range."""
    path = plans.write({"x": ("FLOAT", (8,))}, {"found": ("INT32", (-1,))}, [step("nonzero", "x", "found")])
    assert plans.serve(path)._executions.growing["found"].shape == (0,)


# ---------------------------------------------------------------------------
# Profiles
# ---------------------------------------------------------------------------

TWO_PROFILES = [{"x": [[1, 4], [1, 4], [6, 4]]}, {"x": [[1, 4], [8, 4], [8, 4]]}]


def test_the_profile_whose_best_shapes_are_nearest_executes(plans: Any, calls: Any, driver: Any) -> None:
    path = plans.copy(profiles=TWO_PROFILES)
    instance = plans.serve(path, 'instance_group { kind: KIND_GPU profile: [ "0", "1" ] }')
    assert [profile for profile, _ in arguments_of(calls, "set_optimization_profile_async")] == [0, 1]
    for rows, chosen in ((1, 0), (4, 0), (5, 1), (8, 1)):
        x = np.full((rows, 4), rows, np.float32)
        np.testing.assert_array_equal(instance.execute({"x": x})["y"], x)
        assert instance._executions.find([(rows, 4)], {}).context is instance._executions.contexts[chosen]


def test_without_a_profile_the_first_executes(plans: Any) -> None:
    instance = plans.serve(plans.copy(profiles=TWO_PROFILES))
    with pytest.raises(InvalidArgument) as refusal:
        instance.execute({"x": np.zeros((7, 4), np.float32)})
    assert refusal.value.message == (
        "request specifies invalid shape for input 'x' for m_0_0. Error details: model expected the shape of dimension "
        "0 to be between 1 and 6 but received 7"
    )


def test_an_instance_serves_on_after_a_refused_shape(plans: Any) -> None:
    instance = plans.serve(plans.copy())
    with pytest.raises(InvalidArgument, match="invalid shape for input 'x'"):
        instance.execute({"x": np.zeros((9, 4), np.float32)})
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(instance.execute({"x": x})["y"], x)


def test_the_strategy_is_that_of_the_parameters(plans: Any, calls: Any) -> None:
    plans.serve(plans.copy(), parameters=Parameters(execution_context_allocation_strategy="ON_PROFILE_CHANGE"))
    assert arguments_of(calls, "create_execution_context") == [("ON_PROFILE_CHANGE",)]


# ---------------------------------------------------------------------------
# Captured executions
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "captured"),
    [
        (GRAPHS, {1, 2, 3, 4, 6, 8}),
        (f"{GRAPHS} dynamic_batching {{ preferred_batch_size: [ 5 ] }}", {1, 5, 8}),
        ("optimization { cuda { graphs: true graph_spec { batch_size: 7 } } }", {7}),
        ("", set()),
    ],
)
def test_a_graph_runs_for_its_rows_only(plans: Any, driver: Any, calls: Any, config: str, captured: set[int]) -> None:
    instance = plans.serve(plans.copy(), config)
    for rows in range(1, 9):
        launches = driver.graph_launches
        calls.clear()
        x = np.full((rows, 4), rows, np.float32)
        np.testing.assert_array_equal(instance.execute({"x": x})["y"], x)
        was_captured = rows in captured
        assert driver.graph_launches - launches == was_captured, rows
        assert len(arguments_of(calls, "execute_async_v3")) == (not was_captured)


def test_batches_down_to_the_lower_bound_run_the_graph_of_more_rows(plans: Any, driver: Any) -> None:
    spec = "graph_spec { batch_size: 6 graph_lower_bound { batch_size: 3 } }"
    instance = plans.serve(plans.copy(), f"optimization {{ cuda {{ graphs: true {spec} }} }}")
    for rows, launched in ((2, 0), (3, 1), (5, 1), (6, 1), (7, 0)):
        before = driver.graph_launches
        x = np.full((rows, 4), rows, np.float32)
        answer = instance.execute({"x": x})["y"]
        assert answer.shape == (rows, 4)
        np.testing.assert_array_equal(answer, x)
        assert driver.graph_launches - before == launched, rows


def test_without_a_batch_axis_nothing_is_left_over(plans: Any, driver: Any) -> None:
    io = 'name: "{}" data_type: TYPE_FP32 dims: [ -1, 4 ]'
    config = f"{GRAPHS} input {{ {io.format('x')} }} output {{ {io.format('y')} }}"
    instance = plans.serve(plans.copy(), config)
    for rows, launched in ((3, 0), (4, 1), (5, 0)):
        before = driver.graph_launches
        x = np.full((rows, 4), rows, np.float32)
        np.testing.assert_array_equal(instance.execute({"x": x})["y"], x)
        assert driver.graph_launches - before == launched, rows


def test_captured_and_other_executions_may_alternate(plans: Any) -> None:
    instance = plans.serve(plans.copy(), "optimization { cuda { graphs: true graph_spec { batch_size: 4 } } }")
    for rows in (4, 2, 4, 3, 4, 2, 4):
        x = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        np.testing.assert_array_equal(instance.execute({"x": x})["y"], x)


# ---------------------------------------------------------------------------
# Shape tensors, and outputs whose size is known only during the execution
# ---------------------------------------------------------------------------


def broadcast(plans: Any, step: Any, element: str = "INT32") -> Any:
    """``y`` f32[rows, a, b] has ``x`` f32[rows, 1, 1] everywhere; ``s`` is [rows, a, b]."""
    profile = {"x": [[1, 1, 1], [2, 1, 1], [4, 1, 1]], "s": [[3]] * 3, "s.values": [[1, 1, 1], [2, 2, 2], [4, 3, 5]]}
    return plans.write(
        {"x": ("FLOAT", (-1, 1, 1)), "s": (element, (3,))},
        {"y": ("FLOAT", (-1, -1, -1)), "z": (element, (3,))},
        [step("broadcast", ["x", "s"], "y"), step("shape", "y", "z")],
        [profile],
        tensors={"s": {"is_shape": True}, "z": {"is_shape": True}},
    )


@pytest.mark.parametrize(("element", "dtype"), [("INT32", np.int32), ("INT64", np.int64)])
def test_the_batch_size_precedes_shape_values(plans: Any, step: Any, element: str, dtype: type[np.generic]) -> None:
    instance = plans.serve(broadcast(plans, step, element))
    for rows, values in ((2, [3, 5]), (2, [1, 2]), (4, [3, 5]), (2, [3, 5])):
        x = np.arange(rows, dtype=np.float32).reshape(rows, 1, 1)
        outputs = instance.execute({"x": x, "s": np.array(values, dtype)})
        np.testing.assert_array_equal(outputs["y"], np.broadcast_to(x, (rows, *values)))
        assert outputs["z"].tolist() == values  # of [rows, a, b], which begins with the batch, too
        assert outputs["z"].dtype == dtype


def test_values_outside_of_the_profile_are_refused(plans: Any, step: Any) -> None:
    instance = plans.serve(broadcast(plans, step))
    with pytest.raises(InvalidArgument) as refusal:
        instance.execute({"x": np.zeros((2, 1, 1), np.float32), "s": np.array([4, 1], np.int32)})
    assert "for input 's'" in refusal.value.message
    assert "The shape value at index 1 is expected to be in range from 1 to 3, Got: 4" in refusal.value.message


def test_an_output_may_be_as_large_as_its_data_say(plans: Any, step: Any, calls: Any) -> None:
    path = plans.write(
        {"x": ("FLOAT", (6,))}, {"found": ("INT32", (-1,))}, [step("nonzero", "x", "found")], []
    )  # fmt: skip
    instance = plans.serve(path)
    assert arguments_of(calls, "set_output_allocator") == [("found",)]
    for x in ([0, 1, 0, 0, 5, 6], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]):
        found = instance.execute({"x": np.array(x, np.float32)})["found"]
        assert found.tolist() == np.flatnonzero(np.array(x)).tolist()


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


def test_a_failed_execution_has_the_error_of_tensorrt_and_the_next_succeeds(plans: Any, driver: Any) -> None:
    instance = plans.serve(plans.copy())
    engine = instance._engine._engine
    engine.plan["fails"] = True
    x = np.ones((2, 4), np.float32)
    with pytest.raises(BackendError, match=r"TensorRT cannot execute: .*Cuda Runtime \(simulated failure\)"):
        instance.execute({"x": x})
    assert driver.begun == 0  # copies of inputs that were released
    del engine.plan["fails"]
    np.testing.assert_array_equal(instance.execute({"x": x})["y"], x)


def test_no_memory_fails_one_execution(plans: Any, step: Any, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plans.write(
        {"x": ("FLOAT", (64,))}, {"found": ("INT32", (-1,))}, [step("nonzero", "x", "found")], []
    )  # fmt: skip
    instance = plans.serve(path)
    monkeypatch.setenv("STANDIN_MEMORY_BYTES", str(driver.used_bytes(0)))
    with pytest.raises(BackendError, match=r"GPU 0: cuMemAlloc_v2 failed: out of memory.*for \d+ bytes"):
        instance.execute({"x": np.ones(64, np.float32)})
    monkeypatch.delenv("STANDIN_MEMORY_BYTES")
    assert instance.is_ready()
    assert instance.execute({"x": np.ones(64, np.float32)})["found"].tolist() == list(range(64))


def test_a_load_without_memory_is_refused(plans: Any, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = driver.used_bytes(0), driver.live_objects
    monkeypatch.setenv("STANDIN_MEMORY_BYTES", str(before[0] + 600))
    with pytest.raises(BackendError, match="out of memory"):
        plans.serve(plans.add())
    assert (driver.used_bytes(0), driver.live_objects) == before


def test_an_error_that_cuda_does_not_recover_from_takes_the_model_out_of_readiness(plans: Any, driver: Any) -> None:
    instance = plans.serve(plans.copy())
    assert instance.is_ready()
    x = np.ones((2, 4), np.float32)
    driver.break_next_wait(700)
    try:
        with pytest.raises(BackendError, match="illegal memory access"):
            instance.execute({"x": x})
        with pytest.raises(BackendError, match="illegal memory access"):
            instance.execute({"x": x})
        with pytest.raises(BackendError, match="GPU 0: cuEventSynchronize failed"):
            instance.is_ready()
    finally:
        driver.mend()
        instance._device.failure = ""
