from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from headrace.backends.base import AnyInstance, Backend, Model
from headrace.backends.identity import Identity
from headrace.config.derive import derive
from headrace.config.options import ServerOptions
from headrace.config.parse import parse_text
from headrace.errors import ConfigError, HeadraceError
from headrace.models.configuring import complete, fill, parse, read
from headrace.plugins import Plugins
from headrace.server import Server
from headrace.storage.local_storage import files_below
from tests.core.conftest import inspect


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('platform: "caffe2"', "unexpected platform type 'caffe2' for m"),
        ('platform: "libtorch"', "unexpected 'platform' and 'backend' pair, got:libtorch, pytorch"),
        ('default_model_filename: "net.bin"', "unexpected platform type '' for m"),
        (
            'name: "other" backend: "identity"',
            "unexpected directory name 'm' for model 'other', directory name must equal model name",
        ),
        ('platform: "ensemble"', "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
    ],
)
def test_a_config_without_a_backend_is_refused_before_the_search_for_one(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    path, options = tmp_path / "m", ServerOptions()
    config = parse(path, options)
    with pytest.raises(ConfigError) as caught:
        read("m", config, path, files_below(path), options, Plugins.discover(()).schedulers)
    assert caught.value.message == message


ENSEMBLE = 'platform: "ensemble" max_batch_size: 1 '
INPUTS = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
IDENTITY = f'backend: "identity" max_batch_size: 8 {INPUTS} '


#: Mistakes, and Triton 2.51's words for them; it needs no version of the model to find most.
MISTAKES = {
    "platform": ('platform: "nonsense"', "unexpected platform type 'nonsense' for m"),
    "pair": (
        'platform: "nonsense" backend: "onnxruntime"',
        "unexpected 'platform' and 'backend' pair, got:nonsense, onnxruntime",
    ),
    "negative batch": ('backend: "identity" max_batch_size: -1', "'max_batch_size' must be non-negative value for m"),
    "preferred": (
        'backend: "identity" max_batch_size: 2 dynamic_batching { preferred_batch_size: 4 }',
        "dynamic batching preferred size must be <= max batch size for m",
    ),
    "preferred of no batch": (
        'backend: "identity" dynamic_batching { preferred_batch_size: 4 }',
        "dynamic batching preferred size must be <= max batch size for m",
    ),
    "two mistakes": (
        'name: "other" backend: "identity" max_batch_size: -1',
        "'max_batch_size' must be non-negative value for other",
    ),
    "ensemble with a backend": (
        'platform: "ensemble" backend: "python"',
        "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
    ),
    "batch input of two": (
        IDENTITY + 'batch_input { target_name: "n" data_type: TYPE_FP32 source_input: ["x", "z"] }',
        "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2 for m",
    ),
    "batch input of a type": (
        IDENTITY + 'batch_input { target_name: "n" data_type: TYPE_INT8 source_input: "x" }',
        "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
    ),
    "batch input of nothing": (
        IDENTITY + 'batch_input { target_name: "n" data_type: TYPE_FP32 source_input: "nope" }',
        "unknown source input name 'nope' for m",
    ),
    "dims": (
        'backend: "identity" input { name: "x" data_type: TYPE_FP32 dims: 0 }',
        "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    "gpus of a cpu": (
        'backend: "identity" instance_group { kind: KIND_CPU gpus: 0 }',
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    ),
}


def reasons(repository: Path, caplog: pytest.LogCaptureFixture, **options: object) -> str:
    """Why the model ``m`` is not served."""
    with pytest.raises(HeadraceError, match="failed to load all models"), Server(repository, **options):
        pass
    return caplog.text


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("versions", [(), (1,)])
def test_a_mistake_in_a_config_is_reported_before_missing_parts(
    mistake: str, versions: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, message = MISTAKES[mistake]
    for version in versions:
        (tmp_path / "m" / str(version)).mkdir(parents=True)
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    actual = reasons(tmp_path, caplog)
    assert message in actual
    assert "at least one version" not in actual
    assert "which this version does not have" not in actual
    assert "pip install" not in actual


@pytest.mark.parametrize(
    ("text", "feature"),
    [
        (IDENTITY + "sequence_batching { }", "pip install headrace-sequence"),
        (
            f'{ENSEMBLE}{INPUTS} ensemble_scheduling {{ step {{ model_name: "n" model_version: -1 '
            'input_map { key: "a" value: "x" } output_map { key: "b" value: "y" } } }',
            "pip install headrace-ensemble",
        ),
    ],
)
def test_an_unsupported_field_of_a_valid_config_is_reported(
    text: str, feature: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    assert feature in reasons(tmp_path, caplog, plugins=())


def test_a_missing_version_is_reported_for_a_valid_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(IDENTITY)
    assert "at least one version must be available under the version policy of model 'm'" in reasons(tmp_path, caplog)


def test_an_unknown_parameter_is_ignored_with_a_warning_unless_the_server_is_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    wrong = 'parameters { key: "execute_delay" value { string_value: "5" } }'
    (tmp_path / "m" / "config.pbtxt").write_text(IDENTITY + wrong)
    message = "unknown parameter 'execute_delay'; did you mean 'execute_delay_ms'? "
    with Server(tmp_path) as server:
        assert [entry.state for entry in server.index()] == ["READY"]
    (warning,) = [record for record in caplog.records if "execute_delay" in record.message]
    assert warning.levelname == "WARNING"
    assert warning.message.startswith(f"model 'm': {message}")
    place = f"{tmp_path / 'm' / 'config.pbtxt'}:1:{len(IDENTITY) + 19}: parameters['execute_delay']: "
    assert f"failed to load 'm' version 1: Invalid argument: {place}{message}" in reasons(
        tmp_path, caplog, strict_parameters=True
    )
    (problem,) = inspect(tmp_path, strict_parameters=True)
    assert message in problem


@pytest.mark.parametrize("versions", [(), (1,)])
@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (
            "\nresponse_cache { enable: true } model_transaction_policy { decoupled: true }",
            "2:26: response_cache.enable: ",
            "Response Cache",
        ),
        (
            "version_policy { specific { versions: [1,\n -3] } }",
            "2:2: version_policy.specific.versions[1]: ",
            "version policy",
        ),
        (
            "instance_group { count: 1 }\ninstance_group { count: -1 }",
            "2:25: instance_group[1].count: ",
            "instance group",
        ),
    ],
)
def test_the_log_has_the_place_of_a_mistake_and_clients_get_no_path(
    text: str, place: str, message: str, versions: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As headrace check does."""
    for version in versions:
        (tmp_path / "m" / str(version)).mkdir(parents=True)
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m" / "config.pbtxt").write_text(f"{IDENTITY} {text}")
    with Server(tmp_path, exit_on_error=False) as server:
        (line,) = server.index()
    assert f"{tmp_path / 'm' / 'config.pbtxt'}:{place}{message}" in caplog.text
    assert message in line.reason
    assert str(tmp_path) not in line.reason


@pytest.mark.parametrize("acts_on", [None, (), ("optimization.graph", "model_operations")])
def test_the_log_names_the_fields_for_engines_on_which_a_backend_does_not_act(
    acts_on: tuple[str, ...] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(
        IDENTITY + 'cc_model_filenames { key: "8.0" value: "a.bin" } model_operations { op_library_filename: "b.so" } '
        "optimization { graph { level: 1 } cuda { graphs: true } input_pinned_memory { enable: true } "
        'execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }'
    )
    monkeypatch.setattr(Identity, "engine_fields", acts_on)
    with Server(tmp_path):
        pass
    fields = {"cc_model_filenames", "model_operations", *(f"optimization.{each}" for each in (
        "cuda", "execution_accelerators", "graph"))}  # fmt: skip
    expected = set() if acts_on is None else fields - {*acts_on}
    assert {record.message for record in caplog.records if "has no effect" in record.message} == {
        f"model 'm': {field} has no effect: backend 'identity' does not act on it" for field in expected
    }


@dataclass(frozen=True, slots=True)
class Parameters:
    scale: float = 1.0


class Scaled(Backend):
    """Completes a config by what its parameters say."""

    name: ClassVar[str] = "scaled"
    Parameters = Parameters

    def complete_config(self, model: Model) -> None:
        model.config.max_batch_size = int(model.parameters.scale * 2)

    def load(self, model: Model) -> AnyInstance:
        raise NotImplementedError


TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }'


def model_of(text: str, tmp_path: Path) -> Model:
    config = parse_text(f'name: "m" backend: "scaled" {TENSORS} {text}')
    (tmp_path / "m" / "1").mkdir(parents=True)
    derive(config, "m", files_below(tmp_path / "m"))
    return Model("m", 1, tmp_path / "m" / "1", config)


def test_a_backend_that_completes_a_config_has_the_typed_parameters(tmp_path: Path) -> None:
    model = model_of('parameters { key: "scale" value { string_value: "4" } }', tmp_path)
    fill(model, Scaled({}), ServerOptions(), Plugins.discover(()).executors)
    assert model.config.max_batch_size == 8


def test_wrong_parameters_are_named_after_the_completion_without_them(tmp_path: Path) -> None:
    model = model_of('parameters { key: "scale" value { string_value: "much" } }', tmp_path)
    with pytest.raises(ConfigError, match="parameter 'scale' is 'much', expected a number"):
        complete(model, Scaled({}), ServerOptions(), Plugins.discover(()))
    assert model.config.max_batch_size == 2
