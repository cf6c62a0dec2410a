"""The fixture ``python_model``: models under test in this process, without a server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from headrace.errors import LoadError
from headrace_python.testing import OpenModel


class TritonPythonModel:
    """A model in the module of its test."""

    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config.add_input({"name": "IN", "data_type": "TYPE_INT64", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_INT64", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        self.args = args
        self.factor = int(pb_utils_parameter(args, "factor"))

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            assert tensor is not None
            out = pb_utils.Tensor("OUT", tensor.as_numpy() * self.factor)
            responses.append(pb_utils.InferenceResponse([out]))
        return responses


def pb_utils_parameter(args: dict[str, str], key: str) -> str:
    return str(pb_utils.ModelConfig(args["model_config"]).as_dict()["parameters"][key]["string_value"])


def test_a_class_is_completed_initialized_and_executed(python_model: OpenModel) -> None:
    model = python_model(TritonPythonModel, parameters={"factor": "3"})
    assert model.infer({"IN": np.arange(3)})["OUT"].tolist() == [0, 3, 6]
    assert model.config["output"] == [{"name": "OUT", "data_type": "TYPE_INT64", "dims": [-1]}]
    assert model.model.args["model_name"] == "TritonPythonModel"


def test_requests_that_a_test_makes_are_one_batch(python_model: OpenModel) -> None:
    model = python_model(TritonPythonModel, parameters={"factor": "2"})
    tensors = [pb_utils.Tensor("IN", np.array([n])) for n in range(3)]
    requests = [pb_utils.InferenceRequest("", 0, [tensor], [], "") for tensor in tensors]
    assert [answer["OUT"].tolist() for (answer,) in model.execute(requests)] == [[0], [2], [4]]


class Closing:
    """A model whose `finalize` has a visible effect."""

    is_closed = False

    def finalize(self) -> None:
        self.is_closed = True


def test_a_finalized_model_can_still_be_read(python_model: OpenModel) -> None:
    model = python_model(Closing)
    assert not model.model.is_closed
    model.finalize()
    assert model.model.is_closed


@pytest.mark.parametrize("package", ["headrace_python", "triton_python_backend_utils"])
def test_packages_for_tests_are_marked_as_typed(package: str) -> None:
    assert (files(package) / "py.typed").is_file()


def test_an_exception_of_initialize_is_a_load_error(python_model: OpenModel) -> None:
    with pytest.raises(LoadError, match=r"^KeyError: 'factor'\n\nAt:\n  .*test_testing.py"):
        python_model(TritonPythonModel)


def test_an_output_that_breaks_the_config_is_an_error_as_on_the_server(python_model: OpenModel) -> None:
    output = [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}]
    model = python_model(TritonPythonModel, config={"output": output}, parameters={"factor": "2"}, auto_complete=False)
    response = model.infer({"IN": np.arange(3)})
    assert str(response.error) == "model 'TritonPythonModel': output 'OUT' is INT64, but the config says FP32"
    with pytest.raises(AssertionError, match="the model answered with an error: model 'TritonPythonModel': output"):
        response["OUT"]


@pytest.mark.parametrize("part", ["", "1", "1/model.py"])
def test_a_model_is_found_by_its_directory_its_version_or_its_file(
    python_model: OpenModel, write_model: Callable[..., Path], part: str
) -> None:
    code = """
    import helper
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([helper.X], np.float32))])]
    """
    model = python_model(write_model("m", code, helper="X = 5") / part)
    assert model.infer({"WHAT": np.array(["x"], object)})["OUT"].tolist() == [5]


def test_all_responses_of_a_decoupled_model_are_returned(
    python_model: OpenModel, write_model: Callable[..., Path]
) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for n in range(100):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([n], np.float32))]))
    """
    model = python_model(write_model("m", code, "model_transaction_policy { decoupled: true }"))
    assert [int(response["OUT"][0]) for response in model.stream({})] == list(range(100))
    with pytest.raises(TypeError, match="'m' is decoupled"):
        model.infer({})


BLS = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="other", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", np.arange(2))]
            )
            answer = inner.exec()
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
            else:
                value = pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value.astype(np.float32))]))
        return responses
"""


def refuse(inputs: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no")


def test_other_models_are_functions(python_model: OpenModel, write_model: Callable[..., Path]) -> None:
    path = write_model("bls", BLS)
    inputs = {"WHAT": np.array(["x"], object)}
    model = python_model(path, models={"other": lambda inputs: {"y": inputs["x"] + 1}})
    assert model.infer(inputs)["OUT"].tolist() == [1, 2]
    assert str(python_model(path, models={"other": refuse}).infer(inputs).error).startswith("ValueError: no\n\nAt:\n")
    assert "unknown model: 'other'" in str(python_model(path).infer(inputs).error)


def test_a_generator_is_a_decoupled_model(python_model: OpenModel, write_model: Callable[..., Path]) -> None:
    code = """
    class TritonPythonModel:
        async def execute(self, requests):
            inner = pb_utils.InferenceRequest(model_name="other", requested_output_names=["y"], inputs=[])
            total = 0
            for response in await inner.async_exec(decoupled=True):
                found = pb_utils.get_output_tensor_by_name(response, "y")
                total += 0 if found is None else int(found.as_numpy()[0])
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([total], np.float32))])]
    """

    def other(inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for n in range(5):
            yield {"y": np.array([n])}

    model = python_model(write_model("m", code), models={"other": other})
    assert model.infer({"WHAT": np.array(["x"], object)})["OUT"].tolist() == [10]


def test_metrics_and_the_log_can_be_read(
    python_model: OpenModel, write_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.family = pb_utils.MetricFamily("seen", "Seen", pb_utils.MetricFamily.COUNTER)
            self.metric = self.family.Metric(labels={"b": "2", "a": "1"})
        def execute(self, requests):
            self.metric.increment(2)
            pb_utils.Logger.log_warn("hello")
            return [pb_utils.InferenceResponse([])]
    """
    model = python_model(write_model("m", code))
    with caplog.at_level(logging.INFO, "headrace.python"):
        model.infer({})
    assert model.services.metrics["seen", (("a", "1"), ("b", "2"))].value == 2
    assert "hello" in caplog.text


def test_a_model_that_never_answers_is_a_timeout(python_model: OpenModel, write_model: Callable[..., Path]) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            self.senders = [request.get_response_sender() for request in requests]
    """
    model = python_model(write_model("m", code), timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"no last answer within 0.05 s"):
        model.infer({})


def test_is_ready_returns_the_result_of_the_model(python_model: OpenModel, write_model: Callable[..., Path]) -> None:
    code = """
    class TritonPythonModel:
        ready = True
        def execute(self, requests): pass
        async def is_ready(self): return self.ready
    """
    model = python_model(write_model("m", code))
    assert model.is_ready()
    model.model.ready = False
    assert not model.is_ready()
    model.model.ready = 1
    with pytest.raises(Exception, match=r"^is_ready\(\) must return a boolean value$"):
        model.is_ready()


def test_a_user_has_the_fixture_without_naming_it_and_models_are_finalized(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        dedent("""
        class Model:
            def execute(self, requests):
                return []
            def finalize(self):
                print("finalized")

        def test_it(python_model):
            model = python_model(Model)
            print("tested", model.infer({}).error)
        """)
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_"))}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environ,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout
    assert "InferenceResponse(s) size is:0" in run.stdout
    assert "finalized" in run.stdout
