"""Missing fields of a config, derived from the model's directory (docs/spec/behaviours.md section 4.3)."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.config.derive import derive, fill_batching, padding_inputs
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import ConfigError
from headrace.storage.local_storage import files_below

ModelKind = tuple[str, str, str]


def derived(root: Path, text: str = "", files: str = "", name: str = "m") -> ModelConfig:
    """Return the config ``text`` completed for ``files``: paths in the model's directory; a directory ends with /."""
    for file in (f"{name}/", *(f"{name}/{file}" for file in files.split())):
        path = root / file
        (path if file.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not file.endswith("/"):
            path.touch()
    config = text_format.Parse(text, ModelConfig())
    derive(config, name, files_below(root / name))
    return config


def kind_of(config: ModelConfig) -> ModelKind:
    return config.backend, config.platform, config.default_model_filename


SAVED: ModelKind = ("tensorflow", "tensorflow_savedmodel", "model.savedmodel")
GRAPH: ModelKind = ("tensorflow", "tensorflow_graphdef", "model.graphdef")
PLAN: ModelKind = ("tensorrt", "tensorrt_plan", "model.plan")
ONNX: ModelKind = ("onnxruntime", "onnxruntime_onnx", "model.onnx")
OPENVINO: ModelKind = ("openvino", "", "model.xml")
TORCH: ModelKind = ("pytorch", "pytorch_libtorch", "model.pt")
AOTI: ModelKind = ("pytorch", "torch_aoti", "model.pt2")
PYTHON: ModelKind = ("python", "", "model.py")
GGUF: ModelKind = ("llamacpp", "", "")  # the backend finds its name


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ("1/model.savedmodel/", SAVED),
        ("1/model.graphdef", GRAPH),
        ("1/model.plan", PLAN),
        ("1/model.onnx", ONNX),
        ("1/model.onnx/model.onnx", ONNX),
        ("1/model.xml", OPENVINO),
        ("1/model.pt", TORCH),
        ("1/model.pt2", AOTI),
        ("1/model.py", PYTHON),
        ("1/model.gguf", GGUF),
        ("1/SmolLM2.Q4_1.gguf 1/README.md", GGUF),
    ],
)
def test_a_model_file_alone_determines_the_config(tmp_path: Path, files: str, wanted: ModelKind) -> None:
    assert kind_of(derived(tmp_path, "", files)) == wanted


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ("1/model.py 1/model.pt2 1/model.pt", TORCH),
        ("1/model.py 1/model.pt 1/model.xml", OPENVINO),
        ("1/model.xml 1/model.onnx", ONNX),
        ("1/model.onnx 1/model.plan", PLAN),
        ("1/model.plan 1/model.graphdef", GRAPH),
        ("1/model.graphdef 1/model.savedmodel/", SAVED),
        ("1/model.pt/ 1/model.py", PYTHON),
        ("1/model.graphdef/ 1/model.py", PYTHON),
        ("1/model.savedmodel 1/model.py", PYTHON),
        ("1/tiny.gguf 1/model.py", PYTHON),
    ],
)
def test_of_several_files_the_first_in_tritons_order_counts(tmp_path: Path, files: str, wanted: ModelKind) -> None:
    assert kind_of(derived(tmp_path, "", files)) == wanted


def test_only_the_first_directory_by_name_is_read(tmp_path: Path) -> None:
    assert kind_of(derived(tmp_path, "", "1/ 2/model.onnx 10/model.py .cache/model.plan", "m.custom"))[0] == "custom"
    assert kind_of(derived(tmp_path, "", "10/model.py 2/model.onnx", "n")) == PYTHON


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('backend: "onnxruntime"', ONNX),
        ('platform: "onnxruntime_onnx"', ONNX),
        ('default_model_filename: "model.onnx"', ONNX),
        ('backend: "onnxruntime" default_model_filename: "net.onnx"', (*ONNX[:2], "net.onnx")),
        ('platform: "onnxruntime_onnx" default_model_filename: "net.onnx"', (*ONNX[:2], "net.onnx")),
        ('default_model_filename: "large.gguf"', (*GGUF[:2], "large.gguf")),
        ('platform: "tensorflow_graphdef"', GRAPH),
        ('backend: "tensorflow" default_model_filename: "model.graphdef"', GRAPH),
        ('backend: "tensorrt"', PLAN),
        ('backend: "openvino"', OPENVINO),
        ('backend: "openvino" default_model_filename: "model.onnx"', ("openvino", "", "model.onnx")),
        ('backend: "pytorch"', TORCH),
        ('platform: "torch_aoti"', AOTI),
        ('backend: "pytorch" runtime: "model.py"', ("pytorch", "pytorch_libtorch", "")),
        ('backend: "python"', PYTHON),
        ('backend: "identity"', ("identity", "", "")),
        ('platform: "libtorch"', ("pytorch", "libtorch", "")),
        ('platform: "caffe2"', ("", "caffe2", "")),
        ('default_model_filename: "net.onnx"', ("", "", "net.onnx")),
    ],
)
def test_config_fields_determine_the_backend_without_files(tmp_path: Path, text: str, wanted: ModelKind) -> None:
    assert kind_of(derived(tmp_path, text)) == wanted


@pytest.mark.parametrize(
    ("text", "files", "wanted"),
    [
        ('backend: "python"', "1/model.onnx 1/model.py", PYTHON),
        ('backend: "pytorch"', "1/model.pt2", AOTI),
        ('backend: "tensorflow"', "1/model.graphdef", GRAPH),
        ('backend: "identity"', "1/model.onnx", ("identity", "", "")),
        ('default_model_filename: "net.onnx"', "1/model.py", ("", "", "net.onnx")),
    ],
)
def test_the_config_takes_precedence_over_the_files(tmp_path: Path, text: str, files: str, wanted: ModelKind) -> None:
    assert kind_of(derived(tmp_path, text, files)) == wanted


@pytest.mark.parametrize(
    ("platform", "filename", "backend"),
    [
        ("foo", "model.onnx", "onnxruntime"),
        ("foo", "model.plan", "tensorrt"),
        ("foo", "model.xml", "openvino"),
        ("foo", "model.py", "python"),
        ("foo", "model.graphdef", ""),
        ("foo", "weights.bin", ""),
        ("foo", "", ""),
        ("onnxruntime_onnx", "model.plan", "tensorrt"),
        ("onnxruntime_onnx", "model.xml", "onnxruntime"),
        ("tensorrt_plan", "model.onnx", "tensorrt"),
        ("tensorflow_graphdef", "model.onnx", "tensorflow"),
    ],
)
def test_a_platform_and_a_file_that_conflict_determine_the_backend_as_in_triton(
    tmp_path: Path, platform: str, filename: str, backend: str
) -> None:
    """The expected results were recorded from Triton 2.51."""
    text = f'platform: "{platform}" default_model_filename: "{filename}"'
    assert kind_of(derived(tmp_path, text, "1/model.onnx")) == (backend, platform, filename)


def test_the_models_name_is_the_last_resort(tmp_path: Path) -> None:
    assert kind_of(derived(tmp_path, name="net.my.backend")) == ("my.backend", "", "model.my.backend")


NAMES = "model.savedmodel, model.graphdef, model.plan, model.onnx, model.xml, model.pt, model.pt2, model.py, *.gguf"


@pytest.mark.parametrize("name", ["m", "m."])
@pytest.mark.parametrize(
    ("files", "content"),
    [
        ("1/weights.bin", f"Its directory '1' has 'weights.bin', and none of {NAMES}"),
        (
            "1/digits.onnx",
            f"Its directory '1' has 'digits.onnx', and none of {NAMES}; rename 'digits.onnx' to model.onnx",
        ),
        ("one/config.pbtxt one/1/model.onnx", "It holds a model, 'one': perhaps it is the repository"),
        ("1/a.onnx 1/b.onnx", f"Its directory '1' has 'a.onnx', 'b.onnx', and none of {NAMES}"),
        (
            "3/e.onnx 3/d.onnx 3/c.onnx 3/b.onnx 3/a.onnx",
            f"Its directory '3' has 'a.onnx', 'b.onnx', 'c.onnx', 'd.onnx' and 1 more, and none of {NAMES}",
        ),
        ("", f"It has no version directory with one of {NAMES}"),
    ],
)
def test_a_model_without_a_backend_is_refused(tmp_path: Path, name: str, files: str, content: str) -> None:
    with pytest.raises(ConfigError) as caught:
        derived(tmp_path, "max_batch_size: 2", files, name)
    assert caught.value.message == (
        f"Invalid model name: Could not determine backend for model '{name}' with no backend in model configuration. "
        f"Expected model name of the form 'model.<backend_name>'. {content}"
    )


def test_a_version_that_is_taken_for_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="'1' is the name of a version: perhaps the repository is the directory above"
    ):
        derived(tmp_path, "", "", "1")


def test_the_name_comes_from_the_directory(tmp_path: Path) -> None:
    assert derived(tmp_path, 'backend: "identity"').name == "m"
    assert derived(tmp_path, 'name: "m" backend: "identity"').name == "m"


def test_an_ensemble_has_no_backend_and_no_pinned_memory(tmp_path: Path) -> None:
    config = derived(tmp_path, "ensemble_scheduling { }", "1/model.onnx")
    assert kind_of(config) == ("", "ensemble", "")
    assert not config.HasField("optimization")


def test_scheduling_of_an_ensemble_does_not_make_one_of_a_backends_model(tmp_path: Path) -> None:
    assert kind_of(derived(tmp_path, 'backend: "identity" ensemble_scheduling { }')) == ("identity", "", "")


def test_defaults_are_filled_in_and_choices_are_kept(tmp_path: Path) -> None:
    config = derived(tmp_path, 'backend: "identity"')
    assert config.version_policy.latest.num_versions == 1
    assert config.optimization.input_pinned_memory.enable
    assert config.optimization.output_pinned_memory.enable
    chosen = derived(
        tmp_path,
        'backend: "identity" version_policy { all { } } optimization { input_pinned_memory { enable: false } }',
    )
    assert chosen.version_policy.WhichOneof("policy_choice") == "all"
    assert not chosen.optimization.input_pinned_memory.enable
    assert chosen.optimization.output_pinned_memory.enable


def test_preferred_sizes_are_the_whole_batch(tmp_path: Path) -> None:
    base = 'backend: "identity" max_batch_size: 6 '
    assert derived(tmp_path, base + "dynamic_batching { }").dynamic_batching.preferred_batch_size == [6]
    config = derived(tmp_path, base + "dynamic_batching { preferred_batch_size: 2 }")
    assert config.dynamic_batching.preferred_batch_size == [2]
    oldest = derived(tmp_path, base + "sequence_batching { oldest { } }").sequence_batching
    assert oldest.oldest.preferred_batch_size == [6]
    assert oldest.max_sequence_idle_microseconds == 1_000_000
    direct = derived(tmp_path, base + "sequence_batching { max_sequence_idle_microseconds: 5 }").sequence_batching
    assert direct.WhichOneof("strategy_choice") is None
    assert direct.max_sequence_idle_microseconds == 5


def test_preferred_sizes_follow_a_batch_size_that_is_completed_later(tmp_path: Path) -> None:
    config = derived(tmp_path, 'backend: "identity" dynamic_batching { }')
    assert config.dynamic_batching.preferred_batch_size == []
    config.max_batch_size = 4
    fill_batching(config)
    assert config.dynamic_batching.preferred_batch_size == [4]


def test_deriving_twice_changes_nothing(tmp_path: Path) -> None:
    config = derived(tmp_path, "max_batch_size: 4 dynamic_batching { }", "1/model.onnx")
    again = ModelConfig.FromString(config.SerializeToString())
    derive(again, "m", files_below(tmp_path / "m"))
    assert again == config


PADDING = """{"pad": [{"input": "x", "axis": 0, "buckets": [4],
    "length": {"name": "length", "data_type": "TYPE_INT32"}, "mask": {"name": "mask", "data_type": "TYPE_BOOL"}}]}"""


def test_the_inputs_that_padding_makes_have_the_batch_axis() -> None:
    config = text_format.Parse('max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: -1 }', ModelConfig())
    assert padding_inputs(config) == []
    config.parameters["padding"].string_value = PADDING
    made = [(spec.name, spec.datatype.name, spec.dims) for spec in padding_inputs(config)]
    assert made == [("length", "INT32", (-1,)), ("mask", "BOOL", (-1, -1))]


def test_a_padding_that_cannot_be_read_makes_no_inputs() -> None:
    config = ModelConfig()
    config.parameters["padding"].string_value = "{"
    with pytest.raises(ConfigError, match="padding"):
        padding_inputs(config)
