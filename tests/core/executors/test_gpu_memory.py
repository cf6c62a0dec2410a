"""The limit on loads onto full GPUs, by the words of docs/spec/behaviours.md section 14."""

from __future__ import annotations

import pytest

from headrace.backends.base import Device
from headrace.errors import Code, Unavailable
from headrace.executors.devices import Placement
from headrace.executors.gpu_memory import refuse_beyond, used_part

PLACEMENTS = [
    Placement("m_0_0", Device("cpu")),
    Placement("m_1_0", Device("gpu", 0)),
    Placement("m_1_1", Device("gpu", 1)),
]


def refusal(limits: dict[int, float], used: dict[int, float]) -> Unavailable:
    with pytest.raises(Unavailable) as raised:
        refuse_beyond(limits, PLACEMENTS, used.__getitem__)
    return raised.value


def test_a_gpu_that_is_fuller_than_its_limit_takes_no_further_instance() -> None:
    error = refusal({0: 0.5, 1: 0.5}, {0: 0.4, 1: 0.6})
    assert error.code is Code.UNAVAILABLE
    assert error.message == (
        "can not create model 'm_1_1': memory limit set for GPU 1 has exceeded, model loading is rejected."
    )


def test_gpus_without_a_limit_are_not_asked() -> None:
    refuse_beyond({7: 0.0}, PLACEMENTS, dict[int, float]().__getitem__)
    refuse_beyond({0: 0.5}, PLACEMENTS, {0: 0.5}.__getitem__)


def test_unknown_gpu_memory_is_refused() -> None:
    def broken(gpu: int) -> float:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    with pytest.raises(Unavailable, match="set for GPU 0, but its used memory is unknown: libn"):
        refuse_beyond({0: 0.5}, PLACEMENTS, broken)


@pytest.mark.gpu
def test_the_part_in_use_is_a_part() -> None:
    try:
        part = used_part(0)
    except OSError as error:
        pytest.skip(f"no GPU here: {error}")
    assert 0 <= part <= 1
