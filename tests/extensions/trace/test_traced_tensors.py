"""Tensors of a trace that are on a device."""

from __future__ import annotations

import numpy as np

from headrace_testing.played_tensors import PlayedDeviceTensor
from headrace_trace.traced_tensors import MAX_BYTES, copied, text_of


def test_a_tensor_on_a_device_is_traced_like_an_array_unless_it_is_large() -> None:
    x, large = np.arange(3, dtype=np.int32), PlayedDeviceTensor(np.zeros(MAX_BYTES + 1, np.uint8))
    device, host = copied({"x": PlayedDeviceTensor(x)}) + copied({"x": x})
    assert text_of(device) == text_of(host) == "0,1,2"
    assert device[:3] == host[:3]
    assert copied({"large": large})[0].data is None
    assert large.copies == []
