"""``headrace check`` and ``headrace serve`` agree: on which models are served, and on why the others are not.

One repository of wrong models, and a few right ones, is given to both commands.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

IO = """
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
IDENTITY = 'backend: "identity" max_batch_size: 8 '
GOOD = IDENTITY + IO
ONNX = 'backend: "onnxruntime" max_batch_size: 8 '
PYTHON = 'backend: "python" max_batch_size: 8 ' + IO

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in inputs]
"""


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


def warmup(tensor: str, name: str = "x", batch_size: int = 1) -> str:
    return (
        f'model_warmup {{ name: "w" batch_size: {batch_size} '
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_FP32 {tensor} }} }} }} '
    )


def labelled(file: str) -> str:
    return IDENTITY + IO.replace('name: "y"', f'name: "y" label_filename: "{file}"')


def graph(nodes: Any = None, initializers: Any = ()) -> ModelProto:
    """``y = -x`` for f32[n, 4]."""
    io: tuple[int, list[Any]] = (TensorProto.FLOAT, ["n", 4])
    made = helper.make_graph(
        nodes or [helper.make_node("Neg", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", *io)],
        [helper.make_tensor_value_info("y", *io)],
        list(initializers),
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def reaching_out() -> ModelProto:
    weights = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="../../secret")
    return graph([helper.make_node("Add", ["x", "W"], ["y"])], [weights])


@dataclass(frozen=True)
class Case:
    """A model: its config, its files, and part of the reason why it is refused; none for one that is served."""

    config: str | bytes | None
    reason: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=lambda: {"1/": ""})


def onnx(config: str, reason: str, model: ModelProto | bytes | None = None, **files: str | bytes) -> Case:
    content = model if isinstance(model, bytes) else (model or graph()).SerializeToString()
    return Case(config, reason, {"1/model.onnx": content, **files})


def python(config: str, reason: str, source: str = MODEL) -> Case:
    return Case(config, reason, {"1/model.py": source})


DIMENSION = "dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
CASES: dict[str, Case] = {
    # ------------------------------------------------------------------ served
    "good_identity": Case(GOOD),
    "good_onnx": onnx(ONNX + IO, ""),
    "good_onnx_bare": Case(None, "", {"1/model.onnx": graph().SerializeToString()}),
    "good_sequence": Case(GOOD + "sequence_batching { }"),
    "good_python": python(PYTHON, ""),
    "good_warmup": Case(GOOD + warmup("dims: 4 random_data: true", batch_size=3)),
    # ------------------------------------------------------------------ text
    "brace": Case("backend: {", "expected"),
    "not_utf8": Case(b'name: "\xff"', "not UTF-8"),
    "field": Case(GOOD + "max_bach_size: 4", "has no field 'max_bach_size'"),
    "enum": Case(GOOD.replace("TYPE_FP32", "TYPE_FLOAT", 1), "TYPE_FLOAT"),
    "number": Case(GOOD.replace("8", '"eight"', 1), "eight"),
    # ------------------------------------------------------------------ model
    "named": Case(GOOD + 'name: "other"', "unexpected directory name 'named' for model 'other'"),
    "platform": Case('platform: "nonsense"' + IO, "unexpected platform type 'nonsense' for platform"),
    "pair": Case(ONNX + IO + 'platform: "nonsense"', "unexpected 'platform' and 'backend' pair"),
    "no_backend": Case(IO, "Could not determine backend for model 'no_backend'"),
    "unknown_backend": Case(GOOD.replace("identity", "identty"), "did you mean 'identity'?"),
    "fil": Case(GOOD.replace("identity", "fil"), "headrace-fil, is not published yet"),
    "runtime": Case(GOOD + 'runtime: "libnothere.so"', "unable to find backend library 'libnothere.so'"),
    "runtime_file": Case(GOOD + 'runtime: "other.py"', "unable to find backend library 'other.py'"),
    "runtime_out": Case(GOOD + 'runtime: "../x.so"', "escapes backend directory"),
    "filename_out": Case(GOOD + 'default_model_filename: "../../x"', "must stay in the model directory"),
    "negative": Case(GOOD.replace("8", "-8", 1), "'max_batch_size' must be non-negative value"),
    "no_version": Case(GOOD, "at least one version must be available", {}),
    "other_version": Case(
        GOOD + "version_policy { specific { versions: 7 } }", "at least one version must be available"
    ),
    "bad_and_no_version": Case(GOOD + "instance_group { count: -1 }", "has count -1", {}),
    "cache": Case(
        GOOD + "response_cache { enable: true } model_transaction_policy { decoupled: true }", "Response Cache"
    ),
    "metrics": Case(GOOD + "model_metrics { metric_control { } }", "must specify 'metric_identifier'"),
    # ------------------------------------------------------------------ inputs and outputs
    "dims_zero": Case(GOOD.replace("dims: 4", "dims: 0", 1), DIMENSION),
    "dims_minus_two": Case(GOOD.replace("dims: 4", "dims: -2", 1), DIMENSION),
    "no_dims": Case(GOOD.replace("dims: 4", "", 1), "must specify 'dims'"),
    "no_type": Case(GOOD.replace("data_type: TYPE_FP32", "", 1), "must specify 'data_type'"),
    "no_name": Case(GOOD.replace('name: "x"', "", 1), "model input must specify 'name'"),
    "twice": Case(GOOD + 'input { name: "x" data_type: TYPE_FP32 dims: 4 }', "is specified more than once"),
    "reshape": Case(GOOD.replace("dims: 4 }", "dims: 4 reshape { shape: [ 3 ] } }", 1), "dims and reshape"),
    "format": Case(GOOD.replace("dims: 4 }", "dims: 4 format: FORMAT_NHWC }", 1), "NHWC/NCHW require 3 dims"),
    "shape_tensor": Case(GOOD.replace("dims: 4 }", "dims: 4 is_shape_tensor: true }", 1), "shape tensors are only"),
    "counts": Case(GOOD + 'input { name: "z" data_type: TYPE_FP32 dims: 4 }', "2 inputs but 1 outputs"),
    # ------------------------------------------------------------------ batching and instances
    "preferred": Case(GOOD + "dynamic_batching { preferred_batch_size: 16 }", "preferred size must be <= max batch"),
    "preferred_zero": Case(GOOD + "dynamic_batching { preferred_batch_size: 0 }", "preferred size must be positive"),
    "level": Case(GOOD + "dynamic_batching { priority_levels: 2 }", "default priority level must be in range [1, 2]"),
    "level_policy": Case(
        GOOD
        + "dynamic_batching { priority_levels: 2 default_priority_level: 1 "
        + "priority_queue_policy { key: 3 value { max_queue_size: 1 } } }",
        "priority queue policy must have priority level in range [1, 2]",
    ),
    "ordering": Case(
        GOOD + "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
        "Only one priority level is allowed",
    ),
    "count": Case(GOOD + "instance_group { count: -1 }", "has count -1"),
    "many": Case(GOOD + "instance_group { count: 1025 }", "has count 1025"),
    "gpus": Case(GOOD + "instance_group { kind: KIND_CPU gpus: 0 }", "specifies one or more GPUs"),
    "profile": Case(GOOD + 'instance_group { kind: KIND_CPU profile: "1" }', "only supported for TensorRT models"),
    # ------------------------------------------------------------------ unsupported features
    "control": Case(
        GOOD + 'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_START } } }',
        "must specify either 'int32_false_true'",
    ),
    "ensemble": Case(
        f'platform: "ensemble" {IO} ensemble_scheduling {{ step {{ model_name: "n" model_version: -1 '
        'input_map { key: "a" value: "x" } output_map { key: "b" value: "y" } } }',
        "contains models that are not available or ambiguous: n",
    ),
    "step": Case('platform: "ensemble" ensemble_scheduling { step { model_name: "n" } }', "must specify 'input_map'"),
    "sources": Case(
        GOOD + 'batch_input { target_name: "n" data_type: TYPE_FP32 source_input: ["x", "z"] }',
        "expects 1 source input, got 2",
    ),
    # ------------------------------------------------------------------ parameters
    "parameter": Case(GOOD + parameter("execute_delay", "5"), "did you mean 'execute_delay_ms'?"),
    "value": Case(GOOD + parameter("execute_delay_ms", "soon"), "expected a whole number"),
    "padding": Case(GOOD + parameter("padding", "{}"), "it has neither 'pad' nor 'pad_batch_to'"),
    "isolation": Case(GOOD + parameter("isolation", "island"), "no plugin provides executor"),
    "memory": Case(GOOD + parameter("memory_limit_bytes", "1000000"), "needs instances in processes of their own"),
    "memory_value": Case(GOOD + parameter("memory_limit_bytes", "much"), "expected a number of bytes above 0"),
    # ------------------------------------------------------------------ files beside the model
    "label_out": Case(labelled("../../secret"), "is outside model directory"),
    "label_missing": Case(labelled("nowhere.txt"), "cannot read label file"),
    "link_out": Case(GOOD, "is a link that leads out of the model repository", {"1/": "", "secret": "link"}),
    # ------------------------------------------------------------------ warm-up
    "warm_dims": Case(GOOD + warmup("dims: -1 zero_data: true"), "all variable-size dimensions are specified"),
    "warm_type": Case(
        GOOD + 'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { dims: 4 zero_data: true } } }',
        "must specify 'data_type'",
    ),
    "warm_data": Case(GOOD + warmup("dims: 4"), "to have input_data_type set"),
    "warm_missing": Case(GOOD + warmup('dims: 4 input_data_file: "none"'), "cannot read warmup data file"),
    "warm_short": Case(
        GOOD + warmup('dims: 4 input_data_file: "short"'), "expects 16 bytes", {"1/": "", "warmup/short": b"12"}
    ),
    "warm_out": Case(GOOD + warmup('dims: 4 input_data_file: "../../../secret"'), "must stay in the model's 'warmup'"),
    "warm_name": onnx(ONNX + IO + warmup("dims: 4 zero_data: true", name="nope"), "missing required input(s) ['x']"),
    "warm_shape": onnx(ONNX + IO + warmup("dims: 5 zero_data: true"), "unexpected shape for input 'x'"),
    # ------------------------------------------------------------------ ONNX
    "onnx_dims": onnx(ONNX + IO.replace("dims: 4", "dims: 5", 1), "the model expects 2 dimensions (shape [-1,4])"),
    "onnx_batch_in_dims": onnx(ONNX + IO.replace("dims: 4", "dims: [ -1, 4 ]", 1), "specifies 3 dimensions"),
    "onnx_name": onnx(ONNX + IO.replace('"x"', '"nope"'), "nope"),
    "onnx_output": onnx(ONNX + IO.replace('"y"', '"nope"'), "nope"),
    "onnx_type": onnx(ONNX + IO.replace("TYPE_FP32", "TYPE_INT32", 1), "configuration expects datatype TYPE_INT32"),
    "onnx_inputs": onnx(
        ONNX + IO + 'input { name: "z" data_type: TYPE_FP32 dims: 4 }', "configuration expects 2 inputs"
    ),
    "onnx_missing": Case(ONNX + IO, "model.onnx"),
    "onnx_broken": onnx(ONNX + IO, "onnx runtime error", b"no graph"),
    "onnx_bare_broken": Case(None, "onnx runtime error", {"1/model.onnx": b"no graph"}),
    "onnx_session": onnx(
        ONNX + IO + parameter("session.model_external_initializers_file_folder_path", "/"),
        "is not passed on to ONNX Runtime",
    ),
    "onnx_weights": onnx(ONNX + IO, "which must stay in the model directory", reaching_out()),
    "onnx_mode": onnx(ONNX + IO + parameter("execution_mode", "3"), "Expected values for  execution_mode are 0 or 1"),
    "onnx_library": onnx(ONNX + IO + 'model_operations { op_library_filename: "ops.so" }', "ops.so"),
    "onnx_accelerator": onnx(
        ONNX + IO + 'optimization { execution_accelerators { cpu_execution_accelerator { name: "abacus" } } }',
        "unknown Execution Accelerator 'abacus' is requested",
    ),
    # ------------------------------------------------------------------ Python
    "python_syntax": python(PYTHON, "SyntaxError", "class TritonPythonModel:\n    def execute(self requests):\n"),
    "python_import": python(PYTHON, "No module named 'nowhere_to_be_found'", "import nowhere_to_be_found\n"),
    "python_class": python(PYTHON, "TritonPythonModel", "class Other:\n    pass\n"),
    "python_raise": python(
        PYTHON, "ValueError: boom", MODEL + "    def initialize(self, args):\n        raise ValueError('boom')\n"
    ),
    "python_missing": Case(PYTHON, "model.py"),
    "python_environment": python(PYTHON + parameter("EXECUTION_ENV_PATH", "/nowhere.tar.gz"), "nowhere.tar.gz"),
}
WRONG = [name for name, case in CASES.items() if case.reason]
#: Each Python model starts processes of its own, twice: for its config and for itself.
DEADLINE_S = 240


def write(root: Path, name: str, case: Case) -> None:
    model = root / name
    model.mkdir(parents=True)
    if case.config is not None:
        text = case.config if isinstance(case.config, bytes) else case.config.encode()
        (model / "config.pbtxt").write_bytes(text)
    for file, content in case.files.items():
        path = model / file
        path.parent.mkdir(exist_ok=True)
        if file.endswith("/"):
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif content == "link":
            path.symlink_to(root.parent / "secret")
        else:
            path.write_text(content)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("agree") / "models"
    for name, case in CASES.items():
        write(root, name, case)
    (root.parent / "secret").write_text("canary")
    return root


@pytest.fixture(scope="module")
def checked(repository: Path) -> dict[str, list[str]]:
    """Return the output of ``headrace check`` for each model."""
    command = [sys.executable, "-m", "headrace_cli", "check", "--json", str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1, done.stderr
    return {found["model"]: [problem["message"] for problem in found["problems"]] for found in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def served(repository: Path) -> dict[str, str]:
    """Model to the reason that the index of ``headrace serve`` shows; empty for one that is ready."""
    command = [sys.executable, "-m", "headrace_cli", "serve", f"--model-repository={repository}"]
    flags = ["--exit-on-error=false", "--strict-parameters=true", "--http-address=127.0.0.1", "--http-port=0"]
    # At a verbose level the index names files of the machine, as check does.
    others = ["--allow-grpc=false", "--allow-metrics=false", "--exit-timeout-secs=10", "--log-verbose=1"]
    with subprocess.Popen([*command, *flags, *others], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            port = _read_until(server.stderr, r"HTTPService.* at 127\.0\.0\.1:([0-9]+)")
            _read_until(server.stderr, r"loaded [0-9]+ of ([0-9]+) models")
            threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would hold it up
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/repository/index", data=b"{}", method="POST")
            with urllib.request.urlopen(request, timeout=60) as answer:
                entries = json.load(answer)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
    return {
        entry["name"]: "" if entry.get("state") == "READY" else entry.get("reason", "no reason") for entry in entries
    }


def _read_until(lines: Any, pattern: str) -> str:
    for line in lines:
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(f"no line matches {pattern!r}")


def test_the_table_is_long_enough() -> None:
    assert len(WRONG) >= 60


@pytest.mark.parametrize("name", CASES)
def test_check_and_serve_agree_on_whether_a_model_is_served(
    name: str, checked: dict[str, list[str]], served: dict[str, str]
) -> None:
    assert bool(checked[name]) == bool(served[name]) == bool(CASES[name].reason), (checked[name], served[name])


@pytest.mark.parametrize("name", WRONG)
def test_check_lists_the_very_reason_for_which_serve_refuses(
    name: str, checked: dict[str, list[str]], served: dict[str, str], repository: Path
) -> None:
    reason, *problems = (text.replace(f"{repository}/{name}/", "") for text in (served[name], *checked[name]))
    assert CASES[name].reason in reason
    assert any(message in reason for message in problems), (problems, reason)
