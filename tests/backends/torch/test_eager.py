"""Modules in a ``model.py``: the choice of the class, arguments, devices, and errors."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format

from headrace import BackendError, BytesTensor, ConfigError, LoadError, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_torch import Parameters, PyTorch

X = 'input { name: "%s" data_type: TYPE_FP32 dims: [-1] } '
Y = 'output { name: "%s" data_type: TYPE_FP32 dims: [-1] } '
A, B = np.array([1, 2, 3], np.float32), np.array([10, 20, 30], np.float32)

DOUBLE = """
class Net(torch.nn.Module):
    def forward(self, x):
        return 2 * x
"""
DIFFERENCE = """
class Net(torch.nn.Module):
    def forward(self, a, b):
        return a - b, b
"""


def private() -> set[str]:
    """Return the modules of loaded models, perhaps with those of other tests."""
    return {name for name in sys.modules if name.startswith("_headrace_model_")}


def forward(arguments: str, result: str) -> str:
    return f"class Net(torch.nn.Module):\n    def forward({arguments}):\n        return {result}\n"


# Which class ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        DOUBLE,
        "from torch.nn import Linear, Module\n" + DOUBLE,
        "class Block(torch.nn.Module):\n    def __init__(self, width): super().__init__()\n" + DOUBLE,
        "class Base(torch.nn.Module):\n    pass\n" + DOUBLE.replace("torch.nn.Module", "Base"),
        "class A(torch.nn.Module):\n    pass\n" + DOUBLE.replace("Net", "Model"),
        DOUBLE + "Alias = Net\n",
    ],
    ids=["alone", "imports", "with parts", "with a base", "named Model", "alias"],
)
def test_the_class_that_is_meant_is_served(modules: Any, code: str) -> None:
    np.testing.assert_array_equal(modules.load(code, X % "x" + Y % "y").execute({"x": A})["y"], 2 * A)


def test_an_imported_class_is_served(modules: Any) -> None:
    modules.write("from net import Net\nfrom torch.nn import ReLU", net=DOUBLE)
    np.testing.assert_array_equal(modules.load(None, X % "x" + Y % "y").execute({"x": A})["y"], 2 * A)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            DOUBLE + DOUBLE.replace("Net", "Other"),
            "has 2 classes that could be served, 'Net', 'Other': call one of them",
        ),
        ("from torch.nn import ReLU", "has no class that extends torch.nn.Module"),
        (
            "class Net(torch.nn.Module):\n    def __init__(self, width): super().__init__()",
            r"has no class that can be made without arguments, only 'Net\(width\)'",
        ),
    ],
)
def test_the_error_for_a_file_without_one_class_lists_its_classes(modules: Any, code: str, problem: str) -> None:
    with pytest.raises(LoadError, match=rf"failed to load model 'm': '.*model\.py' {problem}"):
        modules.load(code, X % "x" + Y % "y")


# Which file ----------------------------------------------------------------------------------------------------


def test_another_file_may_be_named(modules: Any) -> None:
    modules.write("raise AssertionError", net=DOUBLE)
    instance = modules.load(None, 'default_model_filename: "net.py"' + X % "x" + Y % "y")
    np.testing.assert_array_equal(instance.execute({"x": A})["y"], 2 * A)


@pytest.mark.parametrize("named", ["../../other.py", "/etc/passwd.py"])
def test_no_file_outside_of_the_model_is_run(modules: Any, named: str) -> None:
    modules.write(DOUBLE)
    (modules.root / "other.py").write_text("raise SystemExit")
    with pytest.raises(LoadError, match="outside the model directory"):
        modules.load(None, f'default_model_filename: "{named}"' + X % "x" + Y % "y")


def test_a_missing_file_is_named(modules: Any) -> None:
    with pytest.raises(LoadError, match=r"no file '.*/1/model\.py' for model 'm' version 1"):
        modules.load(None, X % "x" + Y % "y")


def test_another_runtime_is_refused(modules: Any) -> None:
    modules.write(DOUBLE)
    modules.CONFIG = 'runtime: "other.py"'
    with pytest.raises(LoadError, match=r"runtime is 'other\.py', but backend 'pytorch' has only 'model\.py'"):
        modules.load(None, X % "x" + Y % "y")


def test_without_code_the_runtime_serves_torchscript_as_triton_does(modules: Any, scripts: Any) -> None:
    scripts.save(torch.nn.ReLU())
    found = modules.load(None, X % "x" + Y % "y").execute({"x": -A})["y"]
    np.testing.assert_array_equal(found, 0 * A)


def test_code_beside_torchscript_runs_only_with_runtime_in_the_config(modules: Any, scripts: Any) -> None:
    modules.write("raise AssertionError")
    np.testing.assert_array_equal(scripts.load(torch.nn.ReLU(), X % "x" + Y % "y").execute({"x": -A})["y"], 0 * A)


# Which arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"), [("a", "b"), ("left__0", "right__1"), ("x", "y")], ids=["arguments", "indexed", "ordered"]
)
def test_inputs_follow_each_convention(modules: Any, first: str, second: str) -> None:
    instance = modules.load(DIFFERENCE, X % first + X % second + Y % "d__0" + Y % "b__1")
    found = instance.execute({first: A, second: B})
    np.testing.assert_array_equal(found["d__0"], A - B)
    np.testing.assert_array_equal(found["b__1"], B)


def test_names_take_precedence_over_the_order_of_the_config(modules: Any) -> None:
    instance = modules.load(DIFFERENCE, X % "b" + X % "a" + Y % "d")
    np.testing.assert_array_equal(instance.execute({"a": A, "b": B})["d"], A - B)


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ("self, *tensors", "tensors[0] - tensors[1]"),
        ("self, a, *rest", "a - rest[0]"),
        ("self, **named", "named['a'] - named['b']"),
        ("self, a, **named", "a - named['b']"),
        ("self, *, b, a", "a - b"),
        ("self, a, unused=None, b=None", "a - b"),
        ("self, named: dict[str, torch.Tensor]", "named['a'] - named['b']"),
        ("self, named: 'dict[str, torch.Tensor]'", "{'d': named['a'] - named['b']}"),
        ("self, named: 'Dict[str, Nowhere]'", "[named['a'] - named['b']]"),
    ],
)
def test_forward_may_take_its_arguments_in_any_way(modules: Any, arguments: str, result: str) -> None:
    instance = modules.load(forward(arguments, result), X % "a" + X % "b" + Y % "d")
    np.testing.assert_array_equal(instance.execute({"a": A, "b": B})["d"], A - B)


def test_an_optional_input_may_be_missing(modules: Any) -> None:
    scale = 'input { name: "scale" data_type: TYPE_FP32 dims: [-1] optional: true } '
    instance = modules.load(
        forward("self, x, shift=0, scale=None", "x if scale is None else x * scale"), X % "x" + scale + Y % "y"
    )
    np.testing.assert_array_equal(instance.execute({"x": A})["y"], A)
    np.testing.assert_array_equal(instance.execute({"x": A, "scale": B})["y"], A * B)


@pytest.mark.parametrize("names", [("a",), ("x__0", "y__2"), ("a", "b", "c")])
def test_other_arguments_than_forwards_are_refused(modules: Any, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"model provides 2: forward\(a, b\)"):
        modules.load(DIFFERENCE, "".join(X % name for name in names) + Y % "d")


def test_a_second_dictionary_is_refused_in_tritons_words(modules: Any) -> None:
    code = forward("self, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]", "a")
    with pytest.raises(LoadError, match="Multiple inputs of kind DictType were detected"):
        modules.load(code, X % "a" + Y % "d")


def test_strings_pass(modules: Any) -> None:
    config = 'input { name: "x" data_type: TYPE_STRING dims: [-1] } ' + Y.replace("FP32", "STRING") % "y"
    instance = modules.load(forward("self, x: list[str]", "[text.upper() for text in x]"), config)
    assert list(instance.execute({"x": BytesTensor.from_items([b"a", "ü".encode()], (2,))})["y"]) == ["A", "Ü"]


# How it runs ---------------------------------------------------------------------------------------------------


def test_a_module_is_in_evaluation_and_records_nothing(modules: Any) -> None:
    code = forward(
        "self, x", "torch.tensor([self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()])"
    )
    config = X % "x" + Y % "y"
    assert list(modules.load(code, config).execute({"x": A})["y"]) == [False, False, True]
    assert list(modules.load(code, config, inference_mode=False).execute({"x": A})["y"]) == [False, True, False]


def test_inputs_are_not_written_to(modules: Any) -> None:
    instance = modules.load(forward("self, x", "x.add_(1)"), X % "x" + Y % "y")
    for may_write in (False, True):  # the caller's own array, where it asks in Python
        array = A.copy()
        array.flags.writeable = may_write
        np.testing.assert_array_equal(instance.execute({"x": array})["y"], A + 1)
        np.testing.assert_array_equal(array, A)


@pytest.mark.parametrize("made", ["self.register_buffer('sum', torch.zeros(3))", "self.sum = torch.zeros(3)"])
@pytest.mark.parametrize("result", ["self.sum", "self.sum[:]"])
def test_an_answer_that_the_model_keeps_writing_to_is_that_of_its_call(modules: Any, made: str, result: str) -> None:
    code = f"""
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            {made}

        def forward(self, x):
            self.sum += x
            return {result}
    """
    instance = modules.load(code, X % "x" + Y % "y")
    first = instance.execute({"x": A})["y"]
    np.testing.assert_array_equal(instance.execute({"x": A})["y"], 2 * A)
    np.testing.assert_array_equal(first, A)


def test_mixed_precision_is_that_of_pytorch(modules: Any) -> None:
    code = """
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)
            torch.nn.init.normal_(self.layer.weight, generator=torch.Generator().manual_seed(7))
            torch.nn.init.zeros_(self.layer.bias)

        def forward(self, x):
            return self.layer(x)
    """
    config = X % "x" + 'output { name: "y" data_type: TYPE_BF16 dims: [-1, 64] }'
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    y = modules.load(code, config, autocast="bfloat16").execute({"x": x})["y"]
    weight = torch.nn.init.normal_(torch.empty(64, 64), generator=torch.Generator().manual_seed(7))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = torch.nn.functional.linear(torch.from_numpy(x), weight)
    assert y.dtype.name == "bfloat16"
    np.testing.assert_array_equal(np.asarray(y).astype(np.float32), expected.float().numpy())


def test_threads_have_the_names_that_triton_gives_them(modules: Any) -> None:
    modules.load(DOUBLE, X % "x" + Y % "y", num_threads=3)
    assert torch.get_num_threads() == 3


def test_instances_share_a_module_only_if_configured(modules: Any) -> None:
    path, before = modules.write(forward("self, x", "torch.tensor([id(self)])")), private()
    config = text_format.Parse(modules.CONFIG + X % "x" + Y % "y", ModelConfig())
    for shared, names in ((True, 1), (False, 2)):
        backend = PyTorch({})
        model = Model("m", 1, path, config, Parameters(enable_weight_sharing=shared), instance_name="m_0")
        model = replace(model, shared=backend.share(model))
        instances = [backend.load(model) for _ in range(2)]
        assert len({int(np.asarray(each.execute({"x": A})["y"])[0]) for each in instances}) == names
        for each in instances:
            each.close()
        backend.unshare(model.shared)
        assert private() == before


def test_a_model_that_chooses_its_device_is_left_where_it_is(modules: Any) -> None:
    code = """
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.elsewhere = torch.nn.Linear(1, 1, device="meta")

        def forward(self, x):
            return torch.ones(2, device="cpu") * (x.device.type == "meta")
    """
    assert list(modules.load(code, X % "x" + Y % "y", device="model").execute({"x": A})["y"]) == [1, 1]
    with pytest.raises(LoadError, match="Cannot copy out of meta tensor"):
        modules.load(code, X % "x" + Y % "y")


# What goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def broken(:", r"SyntaxError: .*"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(model\.py, line 2, in <module>\)"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        (
            "class Net(torch.nn.Module):\n    def __init__(self):\n        raise ValueError('no weights today')",
            r"ValueError: no weights today \(model\.py, line 4, in __init__\)",
        ),
    ],
)
def test_the_error_of_code_has_its_line_and_the_code_is_removed(modules: Any, code: str, message: str) -> None:
    before = private()
    with pytest.raises(LoadError, match=rf"failed to load model 'm': '.*model\.py': {message}"):
        modules.load(code, X % "x" + Y % "y")
    assert private() == before


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("{}['key']", r"KeyError: 'key' \(model\.py, line 4, in forward\)"),
        ("exit(1)", "SystemExit: 1"),
        ("x @ x[:2]", "inconsistent tensor size"),
        ("3", "output 'y' is int, neither a tensor nor strings"),
        ("()", "expects output 0, the model gives 0 outputs"),
    ],
)
def test_a_failure_has_its_line_and_the_next_call_succeeds(modules: Any, result: str, message: str) -> None:
    code = forward("self, x", f"x if len(x) == 2 else {result}")
    instance = modules.load(code, X % "x" + Y % "y")
    with pytest.raises(BackendError, match=message):
        instance.execute({"x": A})
    np.testing.assert_array_equal(instance.execute({"x": A[:2]})["y"], A[:2])


def test_a_model_may_start_threads(modules: Any) -> None:
    code = """
    import threading

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stop = threading.Event()
            threading.Thread(target=self.stop.wait, name="the model's", daemon=True).start()

        def forward(self, x):
            self.stop.set()
            return x
    """
    instance = modules.load(code, X % "x" + Y % "y")
    started = next(thread for thread in threading.enumerate() if thread.name == "the model's")
    instance.execute({"x": A})
    started.join(5)
    assert not started.is_alive()


def test_closing_frees_the_modules(modules: Any) -> None:
    modules.write("from parts import Net", parts=DOUBLE)
    before = private()
    instance = modules.load(None, X % "x" + Y % "y")
    package = min(private() - before, key=len)
    kind = weakref.ref(sys.modules[f"{package}.parts"].Net)
    modules.close(instance)
    assert not [name for name in sys.modules if name.startswith(package)]
    del instance
    gc.collect()
    assert kind() is None
