from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.server import Server
from tests.core.conftest import WriteModel

CONFIG = """
backend: "identity" max_batch_size: 4
input {{ name: "x" data_type: TYPE_FP32 dims: [-1] reshape {{ shape: [1, -1] }} }}
output {{ name: "y" data_type: TYPE_FP32 dims: [-1] reshape {{ shape: [1, -1] }} }}
parameters {{ key: "isolation" value {{ string_value: "{0}" }} }}
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_reshape_of_the_config_is_undone_once(
    make_server: Callable[..., Server], write_model: WriteModel, isolation: str
) -> None:
    write_model("m", CONFIG.format(isolation))
    sent = np.arange(10, dtype=np.float32).reshape(2, 5)
    with make_server() as server:
        np.testing.assert_array_equal(server.infer("m", {"x": sent}).outputs["y"], sent)
