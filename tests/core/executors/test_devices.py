"""Instance groups to instances, against docs/spec/behaviours.md section 4.5."""

from __future__ import annotations

from typing import ClassVar

import pytest
from google.protobuf import text_format

from headrace.backends.base import Backend, Device, DeviceKind, Instance, Model, Tensors
from headrace.config.model_config_pb2 import ModelConfig, ModelInstanceGroup
from headrace.errors import ConfigError
from headrace.executors import devices
from headrace.executors.devices import available_gpus, fill_groups, plan_instances


class Nothing(Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        return inputs


class OnBoth(Backend):
    name: ClassVar[str] = "both"
    devices: ClassVar[tuple[DeviceKind, ...]] = ("gpu", "cpu")
    default_cpu_instances: ClassVar[int] = 2

    def load(self, model: Model) -> Nothing:
        return Nothing()


class OnCpu(OnBoth):
    name: ClassVar[str] = "cpu-only"
    devices: ClassVar[tuple[DeviceKind, ...]] = ("cpu",)


def plan(text: str, backend: type[Backend] = OnBoth, gpus: tuple[int, ...] = ()) -> list[tuple[str, Device]]:
    config = text_format.Parse(f'name: "m" {text}', ModelConfig())
    fill_groups(config, backend({}), gpus)
    return [(placement.name, placement.device) for placement in plan_instances(config)]


def test_without_a_group_there_is_one_named_after_the_model_with_the_backends_default_count() -> None:
    assert plan("") == [("m_0", Device("cpu")), ("m_1", Device("cpu"))]


def test_the_default_number_of_instances_may_depend_on_the_config() -> None:
    class OneOfASequence(OnCpu):
        def cpu_instances(self, config: ModelConfig) -> int:
            return 1 if config.HasField("sequence_batching") else 3

    assert len(plan("", OneOfASequence)) == 3
    assert len(plan("sequence_batching { }", OneOfASequence)) == 1
    assert len(plan("sequence_batching { } instance_group { count: 2 }", OneOfASequence)) == 2
    assert len(plan("instance_group { kind: KIND_MODEL }", OneOfASequence)) == 1


def test_auto_means_every_gpu_if_there_is_one_and_the_backend_can_use_it() -> None:
    assert plan("", gpus=(0, 3)) == [("m_0", Device("gpu", 0)), ("m_1", Device("gpu", 3))]
    assert [device.kind for _, device in plan("", OnCpu, gpus=(0,))] == ["cpu", "cpu"]


def test_a_count_is_per_gpu() -> None:
    text = "instance_group { kind: KIND_GPU count: 2 gpus: [1, 0] }"
    assert plan(text, gpus=(0, 1)) == [
        ("m_0_0", Device("gpu", 1)),
        ("m_0_1", Device("gpu", 1)),
        ("m_0_2", Device("gpu", 0)),
        ("m_0_3", Device("gpu", 0)),
    ]


def test_groups_are_numbered_unless_named_and_passive_ones_make_no_instances() -> None:
    text = """
        instance_group { kind: KIND_CPU count: 1 } instance_group { name: "spare" kind: KIND_CPU passive: true }
        instance_group { name: "own" kind: KIND_MODEL }
    """
    assert plan(text) == [("m_0_0", Device("cpu")), ("own_0", Device("model"))]


def test_the_config_has_the_chosen_number() -> None:
    config = ModelConfig(name="m")
    fill_groups(config, OnBoth({}), ())
    (group,) = config.instance_group
    assert (group.name, group.kind, group.count) == ("m", ModelInstanceGroup.KIND_CPU, 2)


class OnGpu(OnCpu):
    name = "gpu-only"
    devices = ("gpu",)


@pytest.mark.parametrize("text", ["", "instance_group { count: 2 }"])
def test_a_backend_for_gpus_is_refused_without_a_gpu(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(text, OnGpu)
    assert caught.value.message == ("model m needs a GPU: backend 'gpu-only' runs on gpu, but no GPUs are available")
    with pytest.raises(ConfigError, match="m_0 of model m has kind KIND_CPU, but backend 'gpu-only' runs on gpu"):
        plan("instance_group { kind: KIND_CPU }", OnGpu)


def test_a_device_that_the_backend_cannot_use_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="m_0 of model m has kind KIND_GPU, but backend 'cpu-only' runs on cpu"):
        plan("instance_group { kind: KIND_GPU gpus: [0] }", OnCpu, gpus=(0,))


@pytest.mark.parametrize(
    ("visible", "driver", "expected"),
    [
        (None, 2, (0, 1)),
        ("", 2, ()),
        ("-1", 2, ()),
        ("1", 2, (0,)),
        ("0,1,2", 2, (0, 1)),
        (None, 0, ()),
        ("0,-1,1", 2, (0,)),
        ("7", 2, ()),
        ("1,1", 2, ()),
        (" 1, 0", 2, (0, 1)),
        ("GPU-5ac1", 2, (0,)),
        ("GPU-5ac1", 0, ()),
    ],
)
def test_gpus_are_those_that_cuda_would_see(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, driver: int, expected: tuple[int, ...]
) -> None:
    monkeypatch.delenv("TRITON_SERVER_CPU_ONLY", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(devices, "_driver_gpus", lambda: driver)
    available_gpus.cache_clear()
    try:
        assert available_gpus() == expected
        monkeypatch.setenv("TRITON_SERVER_CPU_ONLY", "1")
        available_gpus.cache_clear()
        assert available_gpus() == ()
    finally:
        available_gpus.cache_clear()
