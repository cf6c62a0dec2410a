"""Rules of ``instance_group``, and of ``model_warmup``, which every instance runs.

Source: docs/spec/behaviours.md sections 4.5 and 4.10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.config.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelWarmup
from headrace.config.validation.shared import MAX_MADE_BYTES, MAX_RANK, Problem, invalid_dimension, size_in_bytes

#: The most instances of a group, and of all groups of a model. An instance is a thread or a process.
MAX_INSTANCES = 1024
#: Triton's default for --min-supported-compute-capability, as it prints it.
_COMPUTE_CAPABILITY = "6.000000"
_GPU_KINDS = (ModelInstanceGroup.KIND_AUTO, ModelInstanceGroup.KIND_GPU)


def check(config: ModelConfig, gpus: Sequence[int]) -> Iterator[Problem]:
    """Check the counts, devices and profiles of all groups."""
    total = 0
    for index, group in enumerate(config.instance_group):
        field = f"instance_group[{index}]"
        title = f"instance group {group.name or f'{config.name}_{index}'} of model {config.name}"
        yield from _check_count(group, field, title)
        yield from _check_devices(group, field, title, gpus)
        yield from _check_profiles(group, field, title, config.platform)
        total += max(group.count, 1) * max(len(group.gpus), 1)
    if total > MAX_INSTANCES and all(group.count <= MAX_INSTANCES for group in config.instance_group):
        yield Problem(
            "instance_group",
            f"the instance groups of model {config.name} have {total} instances in all, the limit is {MAX_INSTANCES}",
        )
    if config.instance_group and all(group.passive for group in config.instance_group):
        yield Problem(
            "instance_group",
            f"all instance groups of model {config.name} are passive: at least one must execute requests",
        )


def _check_count(group: ModelInstanceGroup, field: str, title: str) -> Iterator[Problem]:
    if not 0 <= group.count <= MAX_INSTANCES:
        yield Problem(
            f"{field}.count", f"{title} has count {group.count}, expected 1 to {MAX_INSTANCES}, or 0 for the default"
        )


def _check_devices(group: ModelInstanceGroup, field: str, title: str, gpus: Sequence[int]) -> Iterator[Problem]:
    field = f"{field}.gpus"
    if group.kind not in _GPU_KINDS:
        if group.gpus:
            kind = ModelInstanceGroup.Kind.Name(group.kind)
            yield Problem(field, f"{title} has kind {kind} but specifies one or more GPUs")
        return
    if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus and not gpus:
        yield Problem(field, f"{title} has kind KIND_GPU but no GPUs are available")
    there = ", ".join(map(str, sorted(gpus))) or "none"
    for index, gpu in enumerate(group.gpus):
        if gpu not in gpus:
            yield Problem(
                f"{field}[{index}]",
                f"{title} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum required "
                f"CUDA compute compatibility of {_COMPUTE_CAPABILITY} are: {there}",
            )


def _check_profiles(group: ModelInstanceGroup, field: str, title: str, platform: str) -> Iterator[Problem]:
    if not group.profile:
        return
    title = f"{title} and platform {platform}"
    if platform != "tensorrt_plan":  # Triton's text lacks the space, too
        yield Problem(f"{field}.profile", f"{title}specifies profile field which is only supported for TensorRT models")
        return
    for index, profile in enumerate(group.profile):
        if not (profile.isascii() and profile.isdigit()):
            yield Problem(
                f"{field}.profile[{index}]",
                f"{title} specifies invalid profile {profile}. The field should contain the string representation "
                "of a non-negative integer.",
            )


#: The most requests of a sample, and the most rounds: with more, the model would take too long to become ready.
MAX_REQUESTS = 1024
MAX_COUNT = 1_000_000
#: Triton's prefix of a message about a request without an id, such as a warm-up request.
NO_ID = "[request id: <id_unknown>] "


def check_warmup(config: ModelConfig) -> Iterator[Problem]:
    """Check every sample that will run. A sample with batch size 0 does not run."""
    for index, sample in enumerate(config.model_warmup):
        if sample.batch_size:
            yield from _check_sample(sample, f"model_warmup[{index}]", config)


def _check_sample(sample: ModelWarmup, field: str, config: ModelConfig) -> Iterator[Problem]:
    title = f"warmup sample '{sample.name}' of model {config.name}"
    most = max(config.max_batch_size, MAX_REQUESTS)
    if sample.batch_size > most:
        yield Problem(f"{field}.batch_size", f"{title} has batch_size {sample.batch_size}, the limit is {most}")
    if sample.count > MAX_COUNT:
        yield Problem(f"{field}.count", f"{title} has count {sample.count}, the limit is {MAX_COUNT}")
    for name in sorted(sample.inputs):
        yield from _check_input(name, sample.inputs[name], f"{field}.inputs[{name!r}]", title)


def _check_input(name: str, tensor: ModelWarmup.Input, field: str, title: str) -> Iterator[Problem]:
    if not tensor.data_type:
        yield Problem(f"{field}.data_type", f"{title} must specify 'data_type' for input '{name}'")
    if -1 in tensor.dims:
        yield Problem(
            f"{field}.dims", f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        )
    elif any(dim < 0 for dim in tensor.dims):
        yield Problem(f"{field}.dims", invalid_dimension(name, tensor.dims))
    elif len(tensor.dims) > MAX_RANK:
        yield Problem(f"{field}.dims", f"tensor '{name}' has {len(tensor.dims)} dims, the limit is {MAX_RANK}")
    elif tensor.data_type and size_in_bytes(tensor.dims, tensor.data_type) > MAX_MADE_BYTES:
        yield Problem(
            f"{field}.dims",
            f"{title} takes {size_in_bytes(tensor.dims, tensor.data_type)} bytes for input '{name}', "
            f"the limit is {MAX_MADE_BYTES}",
        )
    if tensor.WhichOneof("input_data_type") is None:
        yield Problem(field, f"{NO_ID}warmup setting expects input '{name}' to have input_data_type set")
