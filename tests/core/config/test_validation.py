"""Valid configs pass; all problems are returned at once, with their fields; the machine's GPUs are considered."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.config.derive import derive
from headrace.config.model_config_pb2 import DataType, ModelConfig
from headrace.config.validation import Problem, problems
from headrace.storage.local_storage import files_below

IO = """
input { name: "x" data_type: TYPE_FP32 dims: [4] }
output { name: "y" data_type: TYPE_FP32 dims: [4] }
"""

GOOD = {
    "nothing_but_a_backend": 'backend: "identity"',
    "every_data_type": 'backend: "identity"'
    + "".join(
        f'input {{ name: "x{kind}" data_type: {kind} dims: [-1, 2] }} '
        f'output {{ name: "y{kind}" data_type: {kind} dims: [-1, 2] }} '
        for kind in DataType.keys()[1:]
    ),
    "legacy_platform": f'platform: "onnxruntime_onnx" max_batch_size: 8 {IO}',
    "torch_aoti": f'backend: "pytorch" platform: "torch_aoti" {IO}',
    "unknown_backend_with_any_platform": f'backend: "mine" platform: "whatever" {IO}',
    "latest_versions": f'backend: "identity" version_policy {{ latest {{ num_versions: 2 }} }} {IO}',
    "specific_versions": f'backend: "identity" version_policy {{ specific {{ versions: [0, 3] }} }} {IO}',
    "all_versions": f'backend: "identity" version_policy {{ all {{ }} }} {IO}',
    "scalar_per_item": """backend: "identity" max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: [1] reshape { shape: [] } }
        output { name: "y" data_type: TYPE_FP32 dims: [1, 1] reshape { shape: [] } }""",
    "reshape_around_a_variable_dim": """backend: "identity"
        input { name: "x" data_type: TYPE_FP32 dims: [2, 4, -1, 6] reshape { shape: [8, -1, 1, 6] } }""",
    "image": """backend: "identity" max_batch_size: 4
        input { name: "x" data_type: TYPE_UINT8 format: FORMAT_NHWC dims: [224, 224, 3] }
        input { name: "z" data_type: TYPE_UINT8 format: FORMAT_NCHW dims: [3, -1, -1] optional: true }
        output { name: "y" data_type: TYPE_FP32 dims: 1000 label_filename: "labels/names.txt" }""",
    "tensorrt": """platform: "tensorrt_plan" max_batch_size: 4
        input { name: "x" data_type: TYPE_INT32 dims: 2 is_shape_tensor: true }
        input { name: "z" data_type: TYPE_FP16 dims: [1, 2, 3] is_non_linear_format_io: true }
        output { name: "y" data_type: TYPE_FP32 dims: 10 }
        cc_model_filenames { key: "7.5" value: "model_7_5.plan" }
        instance_group { profile: ["0", "11"] count: 2 }""",
    "largest_rank": f'backend: "identity" input {{ name: "x" data_type: TYPE_BOOL dims: {[1] * 32} }}',
    "largest_tensor": f'backend: "identity" input {{ name: "x" data_type: TYPE_BOOL dims: {2**63 - 1} }}',
    "ragged": """backend: "identity" max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
        output { name: "y" data_type: TYPE_FP32 dims: -1 }
        batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "n" data_type: TYPE_INT32 source_input: "x" }
        batch_output { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }""",
    "instances": f"""backend: "identity" {IO}
        instance_group {{ name: "cpu" kind: KIND_CPU count: 3 host_policy: "cpu" }}
        instance_group {{ count: 0 }}
        instance_group {{ kind: KIND_MODEL passive: true }}
        instance_group {{ rate_limiter {{ resources {{ name: "R" count: 4 }} priority: 2 }} }}""",
    "most_instances": f'backend: "identity" instance_group {{ count: 1000 }} instance_group {{ count: 24 }} {IO}',
    "default_batching": f'backend: "identity" max_batch_size: 8 dynamic_batching {{ }} {IO}',
    "batching_without_batches": f'backend: "identity" dynamic_batching {{ }} {IO}',
    "batching": f"""backend: "identity" max_batch_size: 8 {IO}
        dynamic_batching {{
          preferred_batch_size: [1, 4, 8] max_queue_delay_microseconds: 100 priority_levels: 2
          default_priority_level: 2
          default_queue_policy {{ timeout_action: DELAY default_timeout_microseconds: 1 max_queue_size: 4294967295 }}
          priority_queue_policy {{ key: 1 value {{ allow_timeout_override: true }} }}
          priority_queue_policy {{ key: 2 value {{ timeout_action: REJECT }} }}
        }}""",
    "ordered_batching": f"""backend: "identity" max_batch_size: 8 {IO}
        dynamic_batching {{
          preserve_ordering: true priority_levels: 1 default_priority_level: 1
          default_queue_policy {{ timeout_action: REJECT default_timeout_microseconds: 5 }}
          priority_queue_policy {{ key: 1 value {{ timeout_action: DELAY }} }}
        }}""",
    "longest_delay": f"""backend: "identity" max_batch_size: 8 {IO}
        dynamic_batching {{ max_queue_delay_microseconds: {(2**63 - 1) // 1000} }}""",
    "warmup": f"""backend: "identity" max_batch_size: 8 {IO}
        model_warmup {{ name: "zero" batch_size: 8 count: 5
          inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: 4 zero_data: true }} }} }}
        model_warmup {{ name: "file" batch_size: 1
          inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: [4, 0] input_data_file: "raw/x" }} }} }}
        model_warmup {{ name: "skipped" inputs {{ key: "x" value {{ dims: -1 }} }} }}""",
    "metrics": f"""backend: "identity" {IO} metric_tags {{ key: "team" value: "vision" }}
        model_metrics {{ metric_control {{ metric_identifier {{ family: "nv_inference_first_response_histogram_ms" }}
          histogram_options {{ buckets: [-1, 0.5, 5000, inf] }} }} }}""",
    "decoupled": f'backend: "python" model_transaction_policy {{ decoupled: true }} {IO}',
    "cached": f'backend: "identity" response_cache {{ enable: true }} {IO}',
}


def derived(text: str, repository: Path) -> ModelConfig:
    """Return the config of model ``m`` in the state in which it is validated."""
    config = ModelConfig()
    text_format.Parse(text, config)
    (repository / "m" / "1").mkdir(parents=True)
    derive(config, "m", files_below(repository / "m"))
    return config


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD.keys())
def test_a_good_config_passes(text: str, tmp_path: Path) -> None:
    config = derived(text, tmp_path)
    before = config.SerializeToString(deterministic=True)
    assert problems(config, files=tmp_path / "m") == []
    assert config.SerializeToString(deterministic=True) == before


def test_all_problems_are_listed_with_their_fields() -> None:
    config = ModelConfig(max_batch_size=-1)
    config.input.add(name="x", dims=[0])
    config.instance_group.add(count=-3)
    actual = problems(config)
    assert actual == [
        Problem("name", "model configuration must specify 'name'"),
        Problem("platform", "unexpected platform type '' for "),
        Problem("max_batch_size", "'max_batch_size' must be non-negative value for "),
        Problem("version_policy", "must specify 'version policy' for "),
        Problem(
            "instance_group[0].count",
            "instance group _0 of model  has count -3, expected 1 to 1024, or 0 for the default",
        ),
        Problem("input[0].data_type", "model input 'x' must specify 'data_type' for "),
        Problem(
            "input[0].dims",
            "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for ",
        ),
    ]


def test_a_platform_without_a_backend_is_refused() -> None:
    config = ModelConfig(name="m", platform="caffe2")
    config.version_policy.latest.num_versions = 1
    assert problems(config) == [Problem("platform", "unexpected platform type 'caffe2' for m")]


def test_the_gpus_of_the_machine_may_be_used(tmp_path: Path) -> None:
    text = f"""backend: "identity" {IO}
        instance_group {{ kind: KIND_GPU }}
        instance_group {{ kind: KIND_GPU gpus: [1, 0] }}
        instance_group {{ gpus: 1 }}"""
    assert problems(derived(text, tmp_path), gpus=(0, 1)) == []


@pytest.mark.parametrize("kind", ["KIND_GPU", "KIND_AUTO"])
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(kind: str, tmp_path: Path) -> None:
    config = derived(f'backend: "identity" {IO} instance_group {{ kind: {kind} gpus: [0, -1, 2] }}', tmp_path)
    assert [(problem.field, problem.message) for problem in problems(config, gpus=(1, 0))] == [
        (
            f"instance_group[0].gpus[{index}]",
            f"instance group m_0 of model m specifies invalid or unsupported gpu id {gpu}. GPUs with at least the "
            "minimum required CUDA compute compatibility of 6.000000 are: 0, 1",
        )
        for index, gpu in ((1, -1), (2, 2))
    ]


def test_a_gpu_group_without_gpus_is_refused(tmp_path: Path) -> None:
    config = derived(f'backend: "identity" {IO} instance_group {{ kind: KIND_GPU gpus: 0 }}', tmp_path)
    (problem,) = problems(config, gpus=())
    assert problem.message.endswith("compute compatibility of 6.000000 are: none")


def test_instances_on_each_gpu_count_towards_the_limit(tmp_path: Path) -> None:
    config = derived(f'backend: "identity" {IO} instance_group {{ count: 513 gpus: [0, 1] }}', tmp_path)
    assert [problem.message for problem in problems(config, gpus=(0, 1))] == [
        "the instance groups of model m have 1026 instances in all, the limit is 1024"
    ]


def test_an_enormous_config_is_refused_in_the_time_it_takes_to_read_it(tmp_path: Path) -> None:
    """Every product of dims is bounded before it starts."""
    config = derived('backend: "identity" max_batch_size: 8', tmp_path)
    tensor = config.input.add(name="x", data_type=1, dims=[2**62] * 200_000)
    tensor.reshape.shape.extend([2**62] * 200_000)
    started = time.process_time()
    assert [problem.field for problem in problems(config)] == ["input[0].dims"]
    assert time.process_time() - started < 10  # milliseconds, unless something is quadratic
