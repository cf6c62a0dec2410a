"""The calls of the backend to TensorRT fit the declarations of the real bindings, and so does the fake."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from headrace_tensorrt import tensorrt_api as api
from headrace_tensorrt.element_types import ELEMENT_TYPES

if TYPE_CHECKING:  # mypy holds the fake against the protocols
    import tests.backends.tensorrt.recorded_tensorrt as fake

    _module: api.TrtModule = fake
    _runtime: type[api.TrtRuntime] = fake.Runtime
    _engine: type[api.TrtCudaEngine] = fake.ICudaEngine
    _context: type[api.TrtExecutionContext] = fake.IExecutionContext
    _refitter: type[api.TrtRefitter] = fake.Refitter
    _registry: type[api.TrtPluginRegistry] = fake.IPluginRegistry

#: Our protocols, and the classes of TensorRT that they are cut out of.
DECLARED: dict[type, str] = {
    api.TrtRuntime: "Runtime",
    api.TrtCudaEngine: "ICudaEngine",
    api.TrtExecutionContext: "IExecutionContext",
    api.TrtRefitter: "Refitter",
    api.TrtPluginRegistry: "IPluginRegistry",
}
#: How the bindings write the types that we use.
SPELLINGS = {
    "int": {"int", "typing.SupportsInt"},
    "str": {"str"},
    "bool": {"bool"},
    "None": {"None"},
    "tuple[int, ...]": {"tuple"},
    "list[str]": {"list[str]"},
    "list[list[int]]": {"list[list[int]]"},
    "TrtDims": {"Dims"},
    "Sequence[TrtDims]": {"list[Dims]"},
    "TrtEnumerator": {
        "DataType", "TensorIOMode", "TensorLocation", "TensorFormat", "ExecutionContextAllocationStrategy",
    },
    "TrtCudaEngine | None": {"ICudaEngine"},
    "TrtExecutionContext | None": {"IExecutionContext"},
}  # fmt: skip


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the declarations of the classes of the bindings."""
    if importlib.util.find_spec("tensorrt_bindings") is None:
        pytest.skip("tensorrt-cu13-bindings is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler to import TensorRT's bindings with")
        pytest.skip("no C compiler to import TensorRT's bindings with")
    script = Path(__file__).with_name("bindings_signatures.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("empty")), compiler],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def members(protocol: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(protocol).items():
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            yield name, value


def signatures(doc: str, name: str) -> list[tuple[list[tuple[str, str]], str]]:
    """The overloads of a method by its docstring: names and types of its parameters, and the type of its result."""
    found = re.findall(rf"^(?:\d+\. )?{name}\(self: [\w.]+(?:, )?(.*)\) -> (.*)$", doc, re.MULTILINE)
    return [([_parameter(each) for each in _parts(text)], _bare(result)) for text, result in found]


def _parts(text: str) -> list[str]:
    return [each for each in re.split(r", (?=\w+: )", text) if each]


def _parameter(text: str) -> tuple[str, str]:
    name, _, kind = text.partition(": ")
    return name, _bare(kind.partition(" = ")[0])


def _bare(kind: str) -> str:
    return re.sub(r"(?:tensorrt_bindings\.tensorrt|nvinfer1)(?:\.|::)", "", kind.strip())


def fits(ours: inspect.Signature, theirs: tuple[Sequence[tuple[str, str]], str]) -> bool:
    """Return True if a call of ours fits a declaration: its name, its arguments and its result."""
    parameters = list(ours.parameters.values())[1:]
    declared, result = theirs
    if len(parameters) > len(declared) or not _same(ours.return_annotation, result):
        return False
    return all(
        (own.kind is own.POSITIONAL_ONLY or own.name == name) and _same(own.annotation, kind)
        for own, (name, kind) in zip(parameters, declared, strict=False)
    )


def _same(ours: str, theirs: str) -> bool:
    return ours == "Any" or theirs in SPELLINGS[ours]


@pytest.mark.parametrize("protocol", DECLARED, ids=lambda protocol: protocol.__name__)
def test_every_method_that_is_called_is_declared_as_it_is_called(protocol: type, bindings: dict[str, Any]) -> None:
    found = bindings["classes"][DECLARED[protocol]]
    checked = 0
    for name, value in members(protocol):
        if isinstance(value, property):
            doc, _ = found["properties"][name]
            assert doc, name
            assert value.fget is not None
            result = _bare(doc.strip().rpartition("-> ")[2])
            assert _same(inspect.signature(value.fget).return_annotation, result), (name, result)
        else:
            overloads = signatures(found["methods"][name], name)
            assert any(fits(inspect.signature(value), each) for each in overloads), (name, overloads)
        checked += 1
    for name in protocol.__annotations__:  # what can be set
        assert found["properties"][name][1], f"{name} cannot be set"
        checked += 1
    assert checked


def test_constructors_match_the_bindings(bindings: dict[str, Any]) -> None:
    def parameters(cls: str) -> list[list[str]]:
        doc = bindings["classes"][cls]["methods"]["__init__"]
        return [[name for name, _ in found] for found, _ in signatures(doc, "__init__")]

    assert ["logger"] in parameters("Runtime")
    assert ["engine", "logger"] in parameters("Refitter")
    assert ["a"] in parameters("Weights")
    assert [] in parameters("ILogger")
    assert [] in parameters("IOutputAllocator")
    assert "numpy.ndarray" in bindings["classes"]["Weights"]["methods"]["__init__"]
    assert bindings["dims"] == [1, 2, -1]


@pytest.mark.parametrize(
    ("cls", "methods"),
    [
        ("ILogger", ["log(self, severity, msg)"]),
        (
            "IOutputAllocator",
            [
                "reallocate_output(self, tensor_name, memory, size, alignment)",
                "reallocate_output_async(self, tensor_name, memory, size, alignment, stream)",
                "notify_shape(self, tensor_name, shape)",
            ],
        ),
    ],
)
def test_overrides_match_the_documented_classes(cls: str, methods: Sequence[str], bindings: dict[str, Any]) -> None:
    source = (Path(api.__file__).parent / "plan_engine.py").read_text()
    ours = [
        re.sub(r"(\w+): [^,)]+", r"\1", " ".join(text.split())) for text in re.findall(r"def (\w+\([^)]*\))", source)
    ]
    ours = [text.replace("( ", "(").replace(" )", ")") for text in ours]
    for method in methods:
        assert f"def {method}:" in bindings["classes"][cls]["doc"]
        assert method in ours


def test_functions_of_the_module_are_declared(bindings: dict[str, Any]) -> None:
    assert bindings["functions"]["init_libnvinfer_plugins"].startswith("init_libnvinfer_plugins(logger: ")
    assert ", namespace: str) -> bool" in bindings["functions"]["init_libnvinfer_plugins"]
    assert bindings["functions"]["get_plugin_registry"].startswith("get_plugin_registry() -> ")


def test_enumerations_have_the_names_that_are_compared(bindings: dict[str, Any]) -> None:
    names = bindings["enumerations"]
    assert ELEMENT_TYPES.keys() <= set(names["DataType"])
    assert set(names["DataType"]) - ELEMENT_TYPES.keys() == {"FP8", "INT4", "FP4", "E8M0"}  # a new type is to be mapped
    assert {"INPUT", "OUTPUT"} <= set(names["TensorIOMode"])
    assert {"DEVICE", "HOST"} == set(names["TensorLocation"])
    assert "LINEAR" in names["TensorFormat"]
    assert {"STATIC", "ON_PROFILE_CHANGE"} <= set(names["ExecutionContextAllocationStrategy"])


def test_the_fake_has_the_enumerators_of_the_bindings(bindings: dict[str, Any], recorded: ModuleType) -> None:
    for name, members in bindings["enumerations"].items():
        assert {each.name for each in getattr(recorded, name)} == set(members), name
