"""Warm-up requests as docs/spec/behaviours.md section 4.10 describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from headrace.backends.base import Instance, Tensors
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import HeadraceError, InternalError
from headrace.executors.instance import runner_for
from headrace.executors.output_schema import OutputSchema
from headrace.executors.warmup import WarmupSample, read_samples
from headrace.messages import dtypes
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor
from headrace.server import Server

SCHEMA = OutputSchema("m", "1", {"y": Spec("y", dtypes.FP32, (-1,))}, True)


def read(text: str, path: Path, max_batch_size: int = 8) -> list[WarmupSample]:
    config = text_format.Parse(f'name: "m" max_batch_size: {max_batch_size} {text}', ModelConfig())
    return read_samples(config, path)


def warmup(tensor: str, batch_size: int = 1, count: int = 0) -> str:
    inputs = f'inputs {{ key: "x" value {{ {tensor} }} }}'
    return f'model_warmup {{ name: "w" batch_size: {batch_size} count: {count} {inputs} }}'


class Recorder(Instance):
    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def execute(self, inputs: Tensors) -> Tensors:
        x = np.asarray(inputs["x"])
        self.seen.append(x.shape)
        if x.any():
            raise ValueError("not zero")
        return {"y": x}


def test_the_batch_size_is_a_number_of_requests_executed_together_count_times(tmp_path: Path) -> None:
    (sample,) = read(warmup("data_type: TYPE_FP32 dims: [3] zero_data: true", 4, 2), tmp_path)
    instance = Recorder()
    sample.run(runner_for(instance, SCHEMA))
    assert instance.seen == [(4, 3), (4, 3)]


def test_a_batch_size_of_zero_is_no_warm_up(tmp_path: Path) -> None:
    assert read(warmup("data_type: TYPE_FP32 dims: [3] zero_data: true", 0), tmp_path) == []


def test_a_failing_sample_is_named(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "ones").write_bytes(np.ones(3, np.float32).tobytes())
    (sample,) = read(warmup('data_type: TYPE_FP32 dims: [3] input_data_file: "ones"'), tmp_path)
    with pytest.raises(InternalError, match=r"^failed to run warmup sample 'w': .*not zero; $"):
        sample.run(runner_for(Recorder(), SCHEMA))


def tensor(text: str, path: Path, max_batch_size: int = 8) -> Any:
    ((ticket,),) = [sample.tickets for sample in read(warmup(text), path, max_batch_size)]
    return ticket.request.inputs["x"]


@pytest.mark.parametrize("dtype", [d for d in dtypes.ALL if d is not dtypes.BYTES], ids=str)
def test_random_data_is_of_the_declared_type_and_shape_and_finite(dtype: dtypes.DataType, tmp_path: Path) -> None:
    sample = tensor(f"data_type: {dtype.config_name} dims: [20, 500] random_data: true", tmp_path)
    assert (sample.dtype, sample.shape) == (dtype.numpy, (1, 20, 500))
    assert np.isfinite(sample.astype(np.float64)).all()


def test_a_model_without_batch_axis_gets_the_dims_as_they_are(tmp_path: Path) -> None:
    assert tensor("data_type: TYPE_INT8 dims: [2] zero_data: true", tmp_path, 0).shape == (2,)


@pytest.mark.parametrize("source", ["zero_data", "random_data"])
def test_generated_strings_are_empty(source: str, tmp_path: Path) -> None:
    sample = tensor(f"data_type: TYPE_STRING dims: [3] {source}: true", tmp_path)
    assert isinstance(sample, BytesTensor)
    assert (sample.shape, sample.items()) == ((1, 3), [b"", b"", b""])


def test_a_string_file_is_taken_in_wire_form(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "text").write_bytes(b"\x02\x00\x00\x00hi")
    assert tensor('data_type: TYPE_STRING dims: [1] input_data_file: "text"', tmp_path).items() == [b"hi"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'data_type: TYPE_FP32 dims: [2] input_data_file: "short"',
            "[request id: <id_unknown>] warmup setting expects 8 bytes, but the data provided from short"
            "only has 7 bytes",
        ),
        ('data_type: TYPE_FP32 dims: [2] input_data_file: "absent"', "absent"),
        ('data_type: TYPE_FP32 dims: [2] input_data_file: "../../escape"', "outside"),
    ],
)
def test_an_invalid_sample_is_refused_with_the_reason(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "short").write_bytes(b"1234567")
    with pytest.raises(HeadraceError) as refusal:
        read(warmup(text), tmp_path)
    assert message in refusal.value.message


def test_a_sample_that_does_not_fit_the_model_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    io = "name: 'x' data_type: TYPE_FP32 dims: 3"
    text = f"backend: 'identity' max_batch_size: 4 input {{ {io} }} output {{ {io} }}"
    sample = warmup("data_type: TYPE_FP32 dims: [3] zero_data: true").replace("'x'", "'xx'").replace('"x"', '"xx"')
    (tmp_path / "m" / "config.pbtxt").write_text(f"{text} {sample}")
    with pytest.raises(HeadraceError, match="failed to load all models"), Server(tmp_path):
        pass
    assert "failed to load 'm' version 1: Invalid argument: " in caplog.text
    assert (
        ": model_warmup: warmup sample 'w' of model 'm': expected 1 inputs but got 0 inputs "
        "for model 'm'. Got input(s) [], but missing required input(s) ['x']. Please provide all required input(s). "
        "No input of the model: 'xx'."
    ) in caplog.text
