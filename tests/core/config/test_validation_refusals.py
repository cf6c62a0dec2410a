"""Invalid configs, each with the exact text of its refusal.

Texts are Triton's (docs/spec/behaviours.md sections 3.2, 4.4 to 4.11) where it has one; where it has none,
the text names the thing, the value and the rule.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.config.derive import derive
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.validation import problems
from headrace.errors import Code
from headrace.storage.local_storage import files_below

LEVELS = "priority_levels: 3 default_priority_level: 1"
BASE = 'name: "m" backend: "identity" max_batch_size: 8 '
ENSEMBLE = 'name: "e" platform: "ensemble" '
IO = 'input { name: "x" data_type: TYPE_FP32 dims: [4] } output { name: "y" data_type: TYPE_FP32 dims: [4] } '
BIG = 9223372036854775807


def step(inputs: str, outputs: str, model: str = "a") -> str:
    """Return a step that reads and writes the named tensors, each as an input or output of that name in capitals."""
    reads = " ".join(f'input_map {{ key: "{name.upper()}" value: "{name}" }}' for name in inputs.split())
    writes = " ".join(f'output_map {{ key: "{name.upper()}" value: "{name}" }}' for name in outputs.split())
    return f'step {{ model_name: "{model}" model_version: -1 {reads} {writes} }} '


def ensemble(*steps: str) -> str:
    return f"{ENSEMBLE}{IO}ensemble_scheduling {{ {''.join(steps)} }}"


def given(tensor: str) -> str:
    return f"{BASE}input {{ {tensor} }}"


def warmup(tensor: str) -> str:
    return f'{BASE}{IO}model_warmup {{ name: "w" batch_size: 1 inputs {{ key: "x" value {{ {tensor} }} }} }}'


MODEL = [
    (
        "alias_that_triton_derives_and_then_refuses",
        'name: "m" platform: "libtorch"',
        "unexpected 'platform' and 'backend' pair, got:libtorch, pytorch",
    ),
    (
        "pair",
        'name: "m" backend: "onnxruntime" platform: "tensorrt_plan"',
        "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime",
    ),
    (
        "pair_of_pytorch",
        'name: "m" backend: "pytorch" platform: "x"',
        "unexpected 'platform' and 'backend' pair, got:x, pytorch",
    ),
    (
        "ensemble_with_backend",
        f'{ENSEMBLE} backend: "python" ensemble_scheduling {{ {step("x", "y")} }} {IO}',
        "Ensemble model 'e' must have platform type 'ensemble' and empty backend type",
    ),
    (
        "negative_batch",
        'name: "m" backend: "b" max_batch_size: -1',
        "'max_batch_size' must be non-negative value for m",
    ),
    (
        "no_specific_versions",
        f"{BASE} version_policy {{ specific {{ }} }}",
        "version policy 'specific' lists no versions for m",
    ),
    (
        "negative_version",
        f"{BASE} version_policy {{ specific {{ versions: [1, -1] }} }}",
        "version policy 'specific' lists version -1, expected integers >= 0 for m",
    ),
    (
        "cache_and_decoupled",
        f"{BASE} response_cache {{ enable: true }} model_transaction_policy {{ decoupled: true }}",
        "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable the "
        "response cache.",
    ),
    (
        "cache_and_sequences",
        f"{BASE} response_cache {{ enable: true }} sequence_batching {{ }}",
        "Response Cache does not currently support model m with sequence batching scheduler. Please disable the "
        "response cache.",
    ),
    (
        "metric_without_identifier",
        f"{BASE} model_metrics {{ metric_control {{ histogram_options {{ buckets: 1 }} }} }}",
        "metric control must specify 'metric_identifier'",
    ),
    (
        "metric_without_family",
        f"{BASE} model_metrics {{ metric_control {{ metric_identifier {{ }} histogram_options {{ buckets: 1 }} }} }}",
        "metric identifier must specify non-empty 'family'",
    ),
    (
        "metric_without_options",
        f'{BASE} model_metrics {{ metric_control {{ metric_identifier {{ family: "f" }} }} }}',
        "metric control must specify 'histogram_options'",
    ),
    (
        "metric_without_buckets",
        f'{BASE} model_metrics {{ metric_control {{ metric_identifier {{ family: "f" }} histogram_options {{ }} }} }}',
        "histogram options must specify non-empty 'buckets'",
    ),
    (
        "metric_with_falling_buckets",
        f'{BASE} model_metrics {{ metric_control {{ metric_identifier {{ family: "f" }} histogram_options '
        "{ buckets: [2, 1] } } }",
        "histogram 'buckets' of metric family 'f' must increase for m",
    ),
    (
        "metric_with_a_bucket_that_is_no_number",
        f'{BASE} model_metrics {{ metric_control {{ metric_identifier {{ family: "f" }} histogram_options '
        "{ buckets: nan } } }",
        "histogram 'buckets' of metric family 'f' must increase for m",
    ),
]

ENUMS = [
    (
        "unknown_kind",
        f"{BASE} instance_group {{ kind: 9 }}",
        "instance_group[0].kind is 9, expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL",
    ),
    (
        "unknown_data_type",
        warmup("data_type: 99 zero_data: true"),
        "model_warmup[0].inputs['x'].data_type is 99, expected one of TYPE_INVALID, TYPE_BOOL, TYPE_UINT8, "
        "TYPE_UINT16, TYPE_UINT32, TYPE_UINT64, TYPE_INT8, TYPE_INT16, TYPE_INT32, TYPE_INT64, TYPE_FP16, TYPE_FP32, "
        "TYPE_FP64, TYPE_STRING, TYPE_BF16",
    ),
    (
        "unknown_control",
        f"{BASE} sequence_batching {{ control_input {{ control {{ kind: -1 int32_false_true: [0, 1] }} }} }}",
        "sequence_batching.control_input[0].control[0].kind is -1, expected one of CONTROL_SEQUENCE_START, "
        "CONTROL_SEQUENCE_READY, CONTROL_SEQUENCE_END, CONTROL_SEQUENCE_CORRID",
    ),
    (
        "unknown_action",
        f"{BASE} dynamic_batching {{ default_queue_policy {{ timeout_action: 2 }} }}",
        "dynamic_batching.default_queue_policy.timeout_action is 2, expected one of REJECT, DELAY",
    ),
]

TENSORS = [
    ("input_name", given("data_type: TYPE_FP32 dims: 1"), "model input must specify 'name' for m"),
    (
        "output_name",
        f"{BASE} output {{ data_type: TYPE_FP32 dims: 1 }}",
        "model output must specify 'name' for m",
    ),
    ("input_type", given('name: "x" dims: 1'), "model input 'x' must specify 'data_type' for m"),
    ("output_type", f'{BASE} output {{ name: "y" dims: 1 }}', "model output 'y' must specify 'data_type' for m"),
    ("input_dims", given('name: "x" data_type: TYPE_FP32'), "model input 'x' must specify 'dims' for m"),
    (
        "output_dims",
        f'{BASE} output {{ name: "y" data_type: TYPE_FP32 }}',
        "model output 'y' must specify 'dims' for m",
    ),
    (
        "input_twice",
        given('name: "x" data_type: TYPE_FP32 dims: 4') + IO,
        "model input 'x' is specified more than once for m",
    ),
    (
        "output_twice",
        f'{BASE}{IO} output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}',
        "model output 'y' is specified more than once for m",
    ),
    (
        "zero_dim",
        given('name: "x" data_type: TYPE_FP32 dims: [4, 0]'),
        "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        "negative_dim",
        f'{BASE} output {{ name: "y" data_type: TYPE_FP32 dims: -2 }}',
        "model output 'y' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        "too_many_dims",
        given(f'name: "x" data_type: TYPE_FP32 dims: {[1] * 65}'),
        "tensor 'x' has 65 dims, the limit is 32 for m",
    ),
    (
        "too_many_elements",
        given('name: "x" data_type: TYPE_UINT8 dims: [2147483648, 2147483648, 2]'),
        f"element count for tensor 'x' exceeds maximum size of {BIG} for m",
    ),
    (
        "too_many_elements_beside_a_variable_dim",
        given('name: "x" data_type: TYPE_UINT8 dims: [2147483648, -1, 2147483648, 2]'),
        f"element count for tensor 'x' exceeds maximum size of {BIG} for m",
    ),
    (
        "too_many_bytes",
        given(f'name: "x" data_type: TYPE_INT64 dims: {2**60}'),
        f"byte size for tensor 'x' exceeds maximum size of {BIG} for m",
    ),
    (
        "too_many_strings",
        given(f'name: "x" data_type: TYPE_STRING dims: {2**61}'),
        f"byte size for tensor 'x' exceeds maximum size of {BIG} for m",
    ),
    (
        "scalar_without_batch",
        'name: "m" backend: "b" input { name: "x" data_type: TYPE_FP32 dims: 1 reshape { } }',
        "model input 'x' cannot have empty reshape for non-batching model as scalar tensors are not supported for m",
    ),
    (
        "scalar_of_two",
        given('name: "x" data_type: TYPE_FP32 dims: 2 reshape { }'),
        "model input 'x' has different size for dims and reshape for m",
    ),
    (
        "scalar_of_any",
        given('name: "x" data_type: TYPE_FP32 dims: -1 reshape { }'),
        "model input 'x' has different size for dims and reshape for m",
    ),
    (
        "zero_in_reshape",
        given('name: "x" data_type: TYPE_FP32 dims: 4 reshape { shape: [4, 0] }'),
        "model input 'x' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        "reshape_of_another_size",
        given('name: "x" data_type: TYPE_FP32 dims: [2, 3] reshape { shape: [5] }'),
        "model input 'x' has different size for dims and reshape for m",
    ),
    (
        "reshape_of_another_size_after_a_variable_dim",
        f'{BASE} output {{ name: "y" data_type: TYPE_FP32 dims: [4, -1, 6] reshape {{ shape: [4, -1, 5] }} }}',
        "model output 'y' has different size for dims and reshape for m",
    ),
    (
        "reshape_moves_elements_across_a_variable_dim",
        given('name: "x" data_type: TYPE_FP32 dims: [2, -1, 3] reshape { shape: [3, -1, 2] }'),
        "model input 'x' has different size for dims and reshape for m",
    ),
    (
        "reshape_with_other_variable_dims",
        given('name: "x" data_type: TYPE_FP32 dims: [-1, -1] reshape { shape: [-1] }'),
        "model input 'x' has different number of variable-size dimensions for dims and reshape for m",
    ),
    (
        "reshape_fixes_a_variable_dim",
        given('name: "x" data_type: TYPE_FP32 dims: [4, -1] reshape { shape: [4] }'),
        "model input 'x' has different size for dims and reshape for m",
    ),
    (
        "reshape_with_too_many_dims",
        given(f'name: "x" data_type: TYPE_FP32 dims: 1 reshape {{ shape: {[1] * 33} }}'),
        "tensor 'x reshape' has 33 dims, the limit is 32 for m",
    ),
    (
        "nhwc",
        given('name: "x" data_type: TYPE_FP32 format: FORMAT_NHWC dims: [4, 4]'),
        "model input NHWC/NCHW require 3 dims for m",
    ),
    (
        "nchw",
        given('name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [4, 4, 4, 4]'),
        "model input NHWC/NCHW require 3 dims for m",
    ),
    (
        "shape_tensor",
        given('name: "x" data_type: TYPE_INT32 dims: 2 is_shape_tensor: true'),
        "shape tensors are only supported for TensorRT platform for m",
    ),
    (
        "shape_tensor_out",
        f'{BASE} output {{ name: "y" data_type: TYPE_INT32 dims: 2 is_shape_tensor: true }}',
        "shape tensors are only supported for TensorRT platform for m",
    ),
    (
        "non_linear",
        given('name: "x" data_type: TYPE_FP16 dims: [1, 2, 3] is_non_linear_format_io: true'),
        "Non-linear IO format is only supported for the TensorRT platform for m",
    ),
    (
        "non_linear_dims",
        'name: "m" platform: "tensorrt_plan" input { name: "x" data_type: TYPE_FP16 dims: [2, 3] '
        "is_non_linear_format_io: true }",
        "Non-linear IO format input requires 3 dims for m",
    ),
    (
        "non_linear_dims_out",
        'name: "m" platform: "tensorrt_plan" output { name: "y" data_type: TYPE_FP16 dims: [2, 3] '
        "is_non_linear_format_io: true }",
        "Non-linear IO format output requires 3 dims for m",
    ),
    (
        "batch_input_without_source",
        f'{BASE}{IO} batch_input {{ kind: BATCH_ITEM_SHAPE target_name: "z" data_type: TYPE_INT32 }}',
        "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 0 for m",
    ),
    (
        "batch_input_with_two_sources",
        f'{BASE}{IO} batch_input {{ target_name: "z" data_type: TYPE_INT32 source_input: ["x", "x"] }}',
        "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2 for m",
    ),
    (
        "batch_input_type",
        f'{BASE}{IO} batch_input {{ target_name: "z" data_type: TYPE_INT64 source_input: "x" }}',
        "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
    ),
    (
        "batch_input_of_nothing",
        f'{BASE}{IO} batch_input {{ target_name: "z" data_type: TYPE_FP32 source_input: "y" }}',
        "unknown source input name 'y' for m",
    ),
    (
        "batch_input_that_is_an_input",
        f'{BASE}{IO} batch_input {{ target_name: "x" data_type: TYPE_FP32 source_input: "x" }}',
        "target input name 'x' is an input of the model already for m",
    ),
    (
        "batch_input_twice",
        f'{BASE}{IO} batch_input {{ target_name: ["z", "z"] data_type: TYPE_FP32 source_input: "x" }}',
        "target input name 'z' can only be specified once for m",
    ),
    (
        "batch_output_source_count",
        f'{BASE}{IO} batch_output {{ target_name: "y" }}',
        "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m",
    ),
    (
        "batch_output_source",
        f'{BASE}{IO} batch_output {{ target_name: "y" source_input: "q" }}',
        "unknown source input name 'q' for m",
    ),
    (
        "batch_output_target",
        f'{BASE}{IO} batch_output {{ target_name: "q" source_input: "x" }}',
        "unknown target output name 'q' for m",
    ),
    (
        "batch_output_target_twice",
        f'{BASE}{IO} batch_output {{ target_name: ["y", "y"] source_input: "x" }}',
        "target output name 'y' can only be specified once for m",
    ),
]

INSTANCES = [
    (
        "negative_count",
        f"{BASE} instance_group {{ count: -1 }}",
        "instance group m_0 of model m has count -1, expected 1 to 1024, or 0 for the default",
    ),
    (
        "too_many",
        f'{BASE} instance_group {{ name: "g" count: 1025 }}',
        "instance group g of model m has count 1025, expected 1 to 1024, or 0 for the default",
    ),
    (
        "too_many_in_all",
        f"{BASE} instance_group {{ count: 1024 }} instance_group {{ count: 1 }}",
        "the instance groups of model m have 1025 instances in all, the limit is 1024",
    ),
    (
        "all_passive",
        f"{BASE} instance_group {{ passive: true }} instance_group {{ passive: true count: 2 }}",
        "all instance groups of model m are passive: at least one must execute requests",
    ),
    (
        "no_gpus",
        f"{BASE} instance_group {{ kind: KIND_GPU }}",
        "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
    ),
    (
        "cpu_with_gpus",
        f"{BASE} instance_group {{ kind: KIND_CPU gpus: 0 }}",
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    ),
    (
        "model_with_gpus",
        f"{BASE} instance_group {{ }} instance_group {{ kind: KIND_MODEL gpus: 0 }}",
        "instance group m_1 of model m has kind KIND_MODEL but specifies one or more GPUs",
    ),
    (
        "profile",
        'name: "m" backend: "onnxruntime" instance_group { name: "g" profile: "1" }',
        "instance group g of model m and platform onnxruntime_onnxspecifies profile field which is only supported for "
        "TensorRT models",
    ),
    (
        "negative_profile",
        'name: "m" platform: "tensorrt_plan" instance_group { name: "g" profile: ["0", "-1"] }',
        "instance group g of model m and platform tensorrt_plan specifies invalid profile -1. The field should contain "
        "the string representation of a non-negative integer.",
    ),
]

BATCHING = [
    (
        "preferred_zero",
        f"{BASE} dynamic_batching {{ preferred_batch_size: 0 }}",
        "dynamic batching preferred size must be positive for m",
    ),
    (
        "preferred_negative",
        f"{BASE} dynamic_batching {{ preferred_batch_size: [4, -4] }}",
        "dynamic batching preferred size must be positive for m",
    ),
    (
        "preferred_too_large",
        f"{BASE} dynamic_batching {{ preferred_batch_size: [4, 9] }}",
        "dynamic batching preferred size must be <= max batch size for m",
    ),
    (
        "preferred_without_batches",
        'name: "m" backend: "b" dynamic_batching { preferred_batch_size: 1 }',
        "dynamic batching preferred size must be <= max batch size for m",
    ),
    (
        "no_default_level",
        f"{BASE} dynamic_batching {{ priority_levels: 3 }}",
        "default priority level must be in range [1, 3] for m",
    ),
    (
        "default_level_too_low",
        f"{BASE} dynamic_batching {{ priority_levels: 3 default_priority_level: 4 }}",
        "default priority level must be in range [1, 3] for m",
    ),
    (
        "policy_for_level_zero",
        f"{BASE} dynamic_batching {{ {LEVELS} priority_queue_policy {{ key: 0 }} }}",
        "priority queue policy must have priority level in range [1, 3] for m",
    ),
    (
        "policy_for_no_level",
        f"{BASE} dynamic_batching {{ {LEVELS} priority_queue_policy {{ key: 4 }} }}",
        "priority queue policy must have priority level in range [1, 3] for m",
    ),
    (
        "ordering_and_levels",
        f"{BASE} dynamic_batching {{ preserve_ordering: true priority_levels: 2 default_priority_level: 1 }}",
        "Only one priority level is allowed when 'preserve_ordering' is true for m",
    ),
    (
        "ordering_and_delay",
        f"{BASE} dynamic_batching {{ preserve_ordering: true default_queue_policy {{ timeout_action: DELAY "
        "default_timeout_microseconds: 1 } }",
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
    ),
    (
        "ordering_and_delay_of_a_level",
        f"{BASE} dynamic_batching {{ preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
        "priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1 } } }",
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
    ),
]

ENSEMBLES = [
    ("no_scheduling", ENSEMBLE + IO, "ensemble scheduling must be set for ensemble e whose platform is ensemble"),
]

WARMUP = [
    (
        "variable",
        warmup("data_type: TYPE_FP32 dims: [2, -1] zero_data: true"),
        "warmup setting expects all variable-size dimensions are specified for input 'x'",
    ),
    (
        "negative",
        warmup("data_type: TYPE_FP32 dims: [2, -2] zero_data: true"),
        "tensor 'x' contains an invalid dimension in shape [2,-2]",
    ),
    (
        "rank",
        warmup(f"data_type: TYPE_FP32 dims: {[1] * 33} zero_data: true"),
        "tensor 'x' has 33 dims, the limit is 32",
    ),
    (
        "no_data",
        warmup("data_type: TYPE_FP32 dims: 4"),
        "[request id: <id_unknown>] warmup setting expects input 'x' to have input_data_type set",
    ),
    (
        "no_type",
        warmup("dims: 4 zero_data: true"),
        "warmup sample 'w' of model m must specify 'data_type' for input 'x'",
    ),
    (
        "size",
        warmup("data_type: TYPE_INT64 dims: [2147483648, 2147483648, 2] random_data: true"),
        f"warmup sample 'w' of model m takes {2**66} bytes for input 'x', the limit is 4294967296",
    ),
    (
        "batch_size",
        f'{BASE}{IO} model_warmup {{ name: "w" batch_size: 4294967295 }}',
        "warmup sample 'w' of model m has batch_size 4294967295, the limit is 1024",
    ),
    (
        "count",
        f'{BASE}{IO} model_warmup {{ name: "w" batch_size: 1 count: 4294967295 }}',
        "warmup sample 'w' of model m has count 4294967295, the limit is 1000000",
    ),
]

TABLES = {
    "model": MODEL,
    "enums": ENUMS,
    "tensors": TENSORS,
    "instances": INSTANCES,
    "batching": BATCHING,
    "ensembles": ENSEMBLES,
    "warmup": WARMUP,
}
BAD = [
    pytest.param(text, message, id=f"{table}-{name}") for table, rows in TABLES.items() for name, text, message in rows
]


def derived(text: str, repository: Path) -> ModelConfig:
    """Return the config in the state in which it is validated."""
    config = ModelConfig()
    text_format.Parse(text, config)
    (repository / config.name / "1").mkdir(parents=True)
    derive(config, config.name, files_below(repository / config.name))
    return config


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_bad_config_is_refused_in_the_words_of_the_rule(text: str, message: str, tmp_path: Path) -> None:
    first = problems(derived(text, tmp_path))[0]
    assert (first.message, first.code) == (message, Code.INVALID_ARGUMENT)


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_config_above_breaks_one_rule_only(text: str, message: str, tmp_path: Path) -> None:
    assert {problem.message for problem in problems(derived(text, tmp_path))} == {message}
