from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.errors import HeadraceError
from headrace.server import Server
from tests.core.conftest import WriteModel

CONFIG = """
backend: "identity" max_batch_size: 4
input {{ name: "x" data_type: TYPE_FP32 dims: [-1] reshape {{ shape: [1, -1] }} }}
output {{ name: "y" data_type: TYPE_FP32 dims: [-1] reshape {{ shape: [1, -1] }} }}
parameters {{ key: "isolation" value {{ string_value: "{0}" }} }}
"""
SQUARE = CONFIG.replace(
    'output {{ name: "y" data_type: TYPE_FP32 dims: [-1] reshape {{ shape: [1, -1] }} }}',
    'output {{ name: "y" data_type: TYPE_FP32 dims: [4] reshape {{ shape: [2, 2] }} }}',
)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_reshape_of_the_config_is_undone_once(
    make_server: Callable[..., Server], write_model: WriteModel, isolation: str
) -> None:
    write_model("m", CONFIG.format(isolation))
    sent = np.arange(10, dtype=np.float32).reshape(2, 5)
    with make_server() as server:
        np.testing.assert_array_equal(server.infer("m", {"x": sent}).outputs["y"], sent)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_an_output_of_other_dims_than_the_configs_is_an_error(
    make_server: Callable[..., Server], write_model: WriteModel, isolation: str
) -> None:
    write_model("m", SQUARE.format(isolation))
    with make_server() as server, pytest.raises(HeadraceError) as caught:
        server.infer("m", {"x": np.zeros((1, 4), np.float32)})
    assert caught.value.message == "model 'm': output 'y' has shape [1, 1, 4], but the config says [-1, 2, 2]"
