from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace import BackendError, BytesTensor, ConfigError, InvalidArgument, LoadError
from headrace_torch import Parameters

X = 'input { name: "%s" data_type: TYPE_FP32 dims: [-1] } '
Y = 'output { name: "%s" data_type: TYPE_FP32 dims: [-1] } '
A, B = np.array([1, 2, 3], np.float32), np.array([10, 20, 30], np.float32)


class Difference(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a - b, b


class OfDictionary(torch.nn.Module):
    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"difference": x["a"] - x["b"]}


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


class OptionalScale(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return x if scale is None else x * scale


class RunningSum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sum: torch.Tensor
        self.register_buffer("sum", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum.add_(x)
        return self.sum


class Gradient(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        found = torch.autograd.grad([(x * x).sum()], [x])[0]
        assert found is not None
        return found


@pytest.mark.parametrize(
    ("first", "second"), [("a", "b"), ("left__0", "right__1"), ("x", "y")], ids=["arguments", "indexed", "ordered"]
)
def test_inputs_follow_each_convention(scripts: Any, first: str, second: str) -> None:
    instance = scripts.load(Difference(), X % first + X % second + Y % "d__0")
    np.testing.assert_array_equal(instance.execute({first: A, second: B})["d__0"], A - B)


def test_names_take_precedence_over_the_order_of_the_config(scripts: Any) -> None:
    for first, second in (("b", "a"), ("right__1", "left__0")):
        instance = scripts.load(Difference(), X % first + X % second + Y % "b__1" + Y % "d__0")
        found = instance.execute({first: B, second: A})
        np.testing.assert_array_equal(found["d__0"], A - B)
        np.testing.assert_array_equal(found["b__1"], B)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (("INPUTA", "INPUT__1"), ("OUTPUTA", "OUTPUT__1")),
        (("a", "INPUTB"), ("OUTPUTA", "OUTPUT__1")),
        (("a", "INPUT__1"), ("OUTPUT0", "OUTPUT__1")),
        (("x__0", "y"), ("d__0", "e")),
        (("a", "b"), ("OUTPUT", "OUTPUT__0")),
    ],
)
def test_mixed_conventions_use_the_order_of_the_config(
    scripts: Any, caplog: pytest.LogCaptureFixture, inputs: tuple[str, str], outputs: tuple[str, str]
) -> None:
    """The cases of Triton's own test of names, qa/L0_libtorch_io_names."""
    config = "".join(X % name for name in inputs) + "".join(Y % name for name in outputs)
    instance = scripts.load(Difference(), config)
    found = instance.execute(dict(zip(inputs, (A, B), strict=True)))
    np.testing.assert_array_equal(found[outputs[0]], A - B)
    np.testing.assert_array_equal(found[outputs[1]], B)
    assert "Falling back to enforcing strict ordering from model configuration" in caplog.text


def test_names_that_follow_no_convention_are_no_reason_to_warn(scripts: Any, caplog: pytest.LogCaptureFixture) -> None:
    scripts.load(Difference(), X % "p" + X % "q" + Y % "d" + Y % "e")
    assert "strict ordering" not in caplog.text


class NoStrings(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> list[str]:
        found: list[str] = []
        if x[0] > 0:
            found.append("above")
        return found


def test_a_list_of_strings_may_be_empty(scripts: Any) -> None:
    output = 'output { name: "y" data_type: TYPE_STRING dims: [-1] } '
    instance = scripts.load(NoStrings(), X % "x" + output, warm_up=False)
    for sign, expected in ((1, ["above"]), (-1, [])):
        found = instance.execute({"x": np.full(3, sign, np.float32)})["y"]
        assert found.tolist() == expected
        assert found.shape == (len(expected),)


@pytest.mark.parametrize("names", [("a",), ("x__0", "y__2"), ("a", "b", "c")])
def test_other_arguments_than_forwards_are_refused(scripts: Any, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"model provides 2: forward\(a, b\)"):
        scripts.load(Difference(), "".join(X % name for name in names) + Y % "d")


def test_a_position_cannot_be_taken_twice(scripts: Any) -> None:
    with pytest.raises(ConfigError, match="has index 0, as another input has"):
        scripts.load(Difference(), X % "x__0" + X % "y__0" + Y % "d")


def test_dictionaries_are_mapped_by_their_keys(scripts: Any) -> None:
    instance = scripts.load(OfDictionary(), X % "b" + X % "a" + Y % "difference")
    np.testing.assert_array_equal(instance.execute({"a": A, "b": B})["difference"], A - B)
    with pytest.raises(BackendError, match="no output 'sum'; the model gives difference"):
        scripts.load(OfDictionary(), X % "b" + X % "a" + Y % "sum").execute({"a": A, "b": B})


def test_inputs_are_not_written_to(scripts: Any) -> None:
    instance = scripts.load(InPlace(), X % "x" + Y % "y")
    for may_write in (False, True):  # the caller's own array, where it asks in Python
        array = A.copy()
        array.flags.writeable = may_write
        np.testing.assert_array_equal(instance.execute({"x": array})["y"], A + 1)
        np.testing.assert_array_equal(array, A)


def test_an_optional_argument_may_be_missing(scripts: Any) -> None:
    scale = 'input { name: "scale" data_type: TYPE_FP32 dims: [-1] optional: true } '
    instance = scripts.load(OptionalScale(), X % "x" + scale + Y % "y")
    np.testing.assert_array_equal(instance.execute({"x": A})["y"], A)
    np.testing.assert_array_equal(instance.execute({"x": A, "scale": B})["y"], A * B)


def test_gradients_are_there_without_inference_mode_only(scripts: Any) -> None:
    found = scripts.load(Gradient(), X % "x" + Y % "y", inference_mode=False).execute({"x": A})
    np.testing.assert_array_equal(found["y"], 2 * A)
    with pytest.raises(BackendError, match="PyTorch execute failure"):
        scripts.load(None, X % "x" + Y % "y").execute({"x": A})


def test_mixed_precision_is_that_of_pytorch(scripts: Any) -> None:
    module = torch.nn.Linear(64, 64).eval()
    config = X % "x" + 'output { name: "y" data_type: TYPE_BF16 dims: [-1, 64] }'
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    found = scripts.load(module, config, autocast="bfloat16")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module(torch.from_numpy(x)).float().numpy()
    y = found.execute({"x": x})["y"]
    assert y.dtype.name == "bfloat16"
    np.testing.assert_allclose(np.asarray(y).astype(np.float32), expected)


def test_a_failure_has_the_error_and_the_next_call_succeeds(scripts: Any) -> None:
    instance = scripts.load(Difference(), X % "a" + X % "b" + Y % "d")
    with pytest.raises(BackendError, match="PyTorch execute failure: The size of tensor"):
        instance.execute({"a": A, "b": B[:2]})
    np.testing.assert_array_equal(instance.execute({"a": A, "b": B})["d"], A - B)


def test_invalid_utf8_is_an_invalid_argument(scripts: Any) -> None:
    class Strings(torch.nn.Module):
        def forward(self, x: list[str]) -> list[str]:
            return x

    config = (
        'input { name: "x" data_type: TYPE_STRING dims: [-1] } output { name: "y" data_type: TYPE_STRING dims: [-1] }'
    )
    instance = scripts.load(Strings(), config)
    assert list(instance.execute({"x": BytesTensor.from_items([b"a", b"b"], (2,))})["y"]) == ["a", "b"]
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        instance.execute({"x": BytesTensor.from_items([b"\xff"], (1,))})
    with pytest.raises(InvalidArgument, match="1 dimensional List of String"):
        instance.execute({"x": BytesTensor.from_items([b"a", b"b"], (1, 2))})


def test_a_config_without_inputs_or_outputs_is_refused_in_tritons_words(scripts: Any) -> None:
    with pytest.raises(ConfigError, match="must contain at least one input, none were specified"):
        scripts.load(Difference(), Y % "d")
    with pytest.raises(ConfigError, match="must contain at least one output, none were specified"):
        scripts.load(None, X % "a")


def test_parameters_are_judged() -> None:
    with pytest.raises(ConfigError, match="'AUTOCAST' is 'float8', expected bfloat16 or float16"):
        Parameters(autocast="float8")
    with pytest.raises(ConfigError, match="'INTRA_OP_THREAD_COUNT' is -1"):
        Parameters(intra_op_thread_count=-1)


def test_threads_within_an_operator_are_configured(scripts: Any) -> None:
    scripts.load(Difference(), X % "a" + X % "b" + Y % "d", intra_op_thread_count=3)
    assert torch.get_num_threads() == 3


def test_the_error_names_a_missing_gpu(scripts: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(LoadError, match=r"GPU 0, but PyTorch .* finds 0 GPUs"):
        scripts.load(Difference(), X % "a" + X % "b" + Y % "d", device="gpu")


def test_a_script_that_chooses_its_device_gets_cpu_inputs(scripts: Any) -> None:
    instance = scripts.load(Difference(), X % "a" + X % "b" + Y % "d", device="model")
    np.testing.assert_array_equal(instance.execute({"a": A, "b": B})["d"], A - B)


def test_an_answer_that_the_model_keeps_writing_to_is_that_of_its_call(scripts: Any) -> None:
    instance = scripts.load(RunningSum(), X % "x" + Y % "y")
    first = instance.execute({"x": A})["y"]
    np.testing.assert_array_equal(instance.execute({"x": A})["y"], 2 * A)
    np.testing.assert_array_equal(first, A)
