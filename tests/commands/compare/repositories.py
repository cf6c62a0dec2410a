"""Two repositories with the same models. Each model has one change in the second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_BODY = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(each, "IN").as_numpy()) for each in requests]

    def answer(self, given):
        {body}
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])
"""
_STREAM = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for each in requests:
            sender = each.get_response_sender()
            for number in range({count}):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CONFIG = """\
backend: "python" max_batch_size: {rows}
input {{ name: "IN" data_type: TYPE_FP32 dims: [{dims}] }}
output {{ name: "{out}" data_type: TYPE_{out_type} dims: [-1] }}
parameters {{ key: "isolation" value {{ string_value: "thread" }} }}
{more}
"""
_FIRST = {"body": "out = given * np.float32(2)", "rows": 0, "dims": 4, "out": "OUT", "out_type": "FP32", "more": ""}
_FAILS = 'raise pb_utils.TritonModelException("{}")'
#: The change of each model in the second repository. ``same`` has none.
CHANGED: Mapping[str, Mapping[str, object]] = {
    "same": {},
    "values": {"body": "out = given * np.float32(2); out[2] += np.float32(0.5); out[3] += np.float32(7)"},
    "close": {"body": "out = given * np.float32(2.000002)"},
    "shape": {"body": "out = np.concatenate([given, given]) * np.float32(2)"},
    "datatype": {"body": "out = given.astype(np.float64) * 2", "out_type": "FP64"},
    "renamed": {"body": 'return pb_utils.InferenceResponse([pb_utils.Tensor("NEW", given)])', "out": "NEW"},
    "status": {"body": _FAILS.format("it broke")},
    "texts": {"body": _FAILS.format("one reason")},
    "config": {"rows": 0, "more": "instance_group { count: 2 kind: KIND_CPU }"},
}
_FIRST_TEXTS = {"texts": _FAILS.format("another reason")}
_DECOUPLED = "model_transaction_policy { decoupled: true }"


def write_repository(path: Path, *, is_second: bool) -> None:
    """Write all models, and one that only the second repository has."""
    for name, changes in CHANGED.items():
        settings = {**_FIRST, "body": _FIRST_TEXTS.get(name, _FIRST["body"]), **(changes if is_second else {})}
        _write(path / name, _CONFIG.format(**settings), _BODY.format(**settings))
    _write(
        path / "stream", _CONFIG.format(**{**_FIRST, "more": _DECOUPLED}), _STREAM.format(count=3 if is_second else 2)
    )
    if is_second:
        _write(path / "extra", _CONFIG.format(**_FIRST), _BODY.format(**_FIRST))


def _write(model: Path, config: str, code: str) -> None:
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(config)
    (model / "1" / "model.py").write_text(code)
