"""``torch.compile``: its options, the time of compiling, the directory of its code, and missing requirements."""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import ConfigError, LoadError
from headrace_torch import Parameters, torch_compile
from headrace_torch.parameters import parse_compile_options
from headrace_torch.torch_compile import CompiledInstance

KEY = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
CONFIG = """max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [4] }
output { name: "y" data_type: TYPE_FP32 dims: [4] }"""
TANH = """
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2 + 1
"""


def rows(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(count).normal(size=(count, 4)).astype(np.float32)


# What a config may say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fullgraph", "is no JSON: .*: 'fullgraph'"),
        ("[]", "expected a JSON object with fullgraph, dynamic, backend, mode, options, disable"),
        ('{"model": "x"}', "'model' is not an optional parameter for 'torch.compile'"),
        ('{"fulgraph": true}', "has 'fulgraph', which torch.compile does not take; known: fullgraph, dynamic"),
        ('{"fullgraph": 1}', "has 'fullgraph': 1, expected true or false"),
        ('{"mode": 3}', "has 'mode': 3, expected text or null"),
        ('{"options": []}', r"has 'options': \[\], expected an object or null"),
        ('{"mode": "default", "options": {}}', "has 'mode' and 'options', of which torch.compile takes one"),
        ('{"options": {"cpp.cxx": "/tmp/evil"}}', "option 'cpp.cxx', which may name files or commands"),
        ('{"options": {"cpp.cxx": [null, "evil"]}}', "option 'cpp.cxx', which may name files or commands"),
        ('{"options": {"trace.enabled": true}}', "option 'trace.enabled', which may name files or commands"),
    ],
)
def test_wrong_options_are_refused_before_the_load(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter '{KEY}' .*{problem}"):
        Parameters(torch_compile=text)


def test_all_arguments_of_torch_compile_are_valid() -> None:
    options = {
        "fullgraph": True,
        "dynamic": None,
        "backend": "eager",
        "options": {"max_autotune": True},
        "disable": False,
    }
    assert parse_compile_options(json.dumps(options), trust=False) == options
    assert parse_compile_options('{"options": {"cpp.cxx": "clang++"}}', trust=True)
    assert parse_compile_options("{}", trust=False) == {}
    assert parse_compile_options(" ", trust=False) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"backend": "nobodys"}', f"parameter '{KEY}' has backend 'nobodys', known here: .*eager.*inductor"),
        ('{"mode": "fastest"}', f"parameter '{KEY}': Unrecognized mode=fastest"),
        ('{"options": {"no_such_option": 1}}', f"parameter '{KEY}': Unexpected optimization option no_such_option"),
    ],
)
def test_unknown_backends_and_modes_are_refused(modules: Any, text: str, problem: str) -> None:
    with pytest.raises(LoadError, match=problem):
        modules.load(TANH, CONFIG, torch_compile=text)


# When it compiles ----------------------------------------------------------------------------------------------


def graphs() -> int:
    """Return the number of graphs that PyTorch has compiled since its counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.fixture(autouse=True)
def from_zero() -> None:
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("options", ["", '{"disable": true}'])
def test_nothing_is_compiled_by_default(modules: Any, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile, "_compile", None)  # it would ask for a compiler
    instance = modules.load(TANH, CONFIG, torch_compile=options)
    assert not isinstance(instance, CompiledInstance)
    instance.execute({"x": rows(1)})
    assert graphs() == 0


def test_no_batch_is_left_to_compile_when_the_model_is_ready(modules: Any) -> None:
    instance = modules.load(TANH, CONFIG, torch_compile='{"backend": "eager", "fullgraph": true}')
    instance.warm_up()
    compiled = graphs()
    assert compiled > 0
    for count in range(1, 9):
        np.testing.assert_allclose(
            instance.execute({"x": rows(count)})["y"], np.tanh(rows(count)) * 2 + 1, rtol=1e-5, atol=1e-6
        )
    assert graphs() == compiled


def test_static_batch_sizes_are_compiled_separately(modules: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = '{"backend": "eager", "fullgraph": true, "dynamic": false}'
    instance = modules.load(TANH, CONFIG, torch_compile=options)
    instance.warm_up()
    assert graphs() == 8
    for count in range(1, 9):
        instance.execute({"x": rows(count)})
    assert graphs() == 8
    with caplog.at_level(logging.WARNING, "headrace.pytorch"):
        modules.load(TANH, CONFIG.replace("size: 8", "size: 9"), torch_compile=options).warm_up()
    assert "each number of rows is compiled for itself, and the first 8 that come, only, so the first" in caplog.text


def test_modules_with_an_inherited_forward_have_their_own_variants(modules: Any) -> None:
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this PyTorch cannot tell them apart")
    code = """
    class Net(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Tanh())
    """
    options = '{"backend": "eager", "fullgraph": true}'
    for instance in [modules.load(code, CONFIG, torch_compile=options) for _ in range(6)]:
        before = graphs()
        instance.warm_up()
        assert graphs() > before
        for count in range(1, 9):
            np.testing.assert_allclose(instance.execute({"x": rows(count)})["y"], np.tanh(rows(count)), rtol=1e-5)


def test_a_warning_names_dims_that_are_compiled_later(modules: Any, caplog: pytest.LogCaptureFixture) -> None:
    instance = modules.load(TANH, CONFIG.replace("[4]", "[-1]"), torch_compile='{"backend": "eager"}')
    with caplog.at_level(logging.WARNING, "headrace.pytorch"):
        instance.warm_up()
    assert "model 'm': the dims of input 'x' vary, so the first requests wait" in caplog.text
    assert graphs() == 0
    np.testing.assert_allclose(instance.execute({"x": rows(3)})["y"], np.tanh(rows(3)) * 2 + 1, rtol=1e-5, atol=1e-6)
    assert graphs() == 1


def test_a_break_in_the_graph_is_an_error_of_the_load_where_it_must_be_whole(modules: Any) -> None:
    code = TANH.replace("return", "print('now')\n        return")
    instance = modules.load(code, CONFIG, torch_compile='{"backend": "eager", "fullgraph": true}')
    with pytest.raises(LoadError, match=r"model 'm': torch\.compile fails: .*builtin.*print"):
        instance.warm_up()


def test_dims_that_forward_cannot_take_are_an_error_of_the_load(modules: Any) -> None:
    instance = modules.load(
        TANH.replace("tanh(x)", "tanh(x @ torch.ones(5, 4))"), CONFIG, torch_compile='{"backend": "eager"}'
    )
    with pytest.raises(LoadError, match=r"model 'm': torch\.compile fails: .*fake tensors"):
        instance.warm_up()


def test_a_model_that_fails_for_zeros_is_served(modules: Any, caplog: pytest.LogCaptureFixture) -> None:
    code = TANH.replace("return", "if not x.any(): raise ValueError('nothing there')\n        return")
    instance = modules.load(code, CONFIG, torch_compile='{"backend": "eager"}')
    with caplog.at_level(logging.WARNING, "headrace.pytorch"):
        instance.warm_up()
    assert (
        "fails for zeros, with which torch.compile is tried: PyTorch execute failure: ValueError: nothing there"
        in caplog.text
    )
    np.testing.assert_allclose(instance.execute({"x": rows(3)})["y"], np.tanh(rows(3)) * 2 + 1, rtol=1e-5, atol=1e-6)


# PyTorch's own compiler ----------------------------------------------------------------------------------------


def test_compiled_code_is_right_and_in_the_cache(modules: Any) -> None:
    folder = modules.write("from parts import Net", parts=TANH)
    before = sorted(folder.parent.rglob("*"))
    instance = modules.load(None, CONFIG, torch_compile="{}", num_threads=1)
    instance.warm_up()
    for count in (1, 2, 5):
        np.testing.assert_allclose(
            instance.execute({"x": rows(count)})["y"], np.tanh(rows(count)) * 2 + 1, rtol=1e-5, atol=1e-6
        )
    cache = Path(os.environ["HEADRACE_CACHE"], "torchinductor")
    assert cache.stat().st_mode & 0o777 == 0o700
    assert list(cache.rglob("*.so"))
    assert sorted(folder.parent.rglob("*")) == before


_ALONE = """
import os
import sys
from pathlib import Path
from google.protobuf import text_format
from headrace import LoadError, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_torch import Parameters, PyTorch
config = text_format.Parse(sys.argv[2], ModelConfig())
for os.environ["HEADRACE_CACHE"] in sys.argv[3:]:
    try:
        PyTorch({}).load(Model("m", 1, Path(sys.argv[1]), config, Parameters(torch_compile="{}"), instance_name="m_0"))
    except LoadError as error:
        print(error.message)
"""


@pytest.mark.parametrize(
    ("path", "caches", "problems"),
    [
        ("/nowhere", ["CACHE"], ["model 'm': torch.compile needs a C++ compiler, and there is none: install g++"]),
        (
            os.environ["PATH"],
            ["/proc/nowhere", "OPEN"],
            ["no compiled code can be kept in '/proc/nowhere", "must belong to the server's user only (mode 700)"],
        ),
    ],
    ids=["compiler", "caches"],
)
def test_missing_requirements_are_named(
    modules: Any, tmp_path: Path, path: str, caches: list[str], problems: list[str]
) -> None:
    """In another process: PyTorch searches for a compiler once."""
    (tmp_path / "open" / "torchinductor").mkdir(parents=True)
    (tmp_path / "open" / "torchinductor").chmod(0o777)
    places = {"CACHE": os.environ["HEADRACE_CACHE"], "OPEN": str(tmp_path / "open")}
    arguments = [places.get(each, each) for each in caches]
    known = {key: value for key, value in os.environ.items() if key not in ("CXX", "TORCHINDUCTOR_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, modules.write(TANH), modules.CONFIG + CONFIG, *arguments],
        capture_output=True, text=True, timeout=120, env=known | {"PATH": path}, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert [problem in line for problem, line in zip(problems, lines, strict=True)] == [True] * len(problems), done
