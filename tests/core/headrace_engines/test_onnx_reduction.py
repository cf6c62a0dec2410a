"""Files without the values of weights, with the package ``onnx`` as the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace import LoadError
from headrace_engines import check_onnx_references, onnx_reduction, onnx_repeats
from headrace_engines.onnx_reduction import reduced

LARGE = numpy_helper.from_array(np.frombuffer(b"Loop, location, EPContext" * 400, np.uint8), "values")
SMALL = numpy_helper.from_array(np.arange(8, dtype=np.float32), "small")


def model(*initializers: TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Identity", ["values"], ["y"])
    output = helper.make_tensor_value_info("y", TensorProto.UINT8, [None])
    return helper.make_model(helper.make_graph([node], "g", [], [output], initializers))


def outside() -> TensorProto:
    """An initializer that names a file and has values, too."""
    tensor = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[4], raw_data=bytes(5000))
    tensor.external_data.add(key="location", value="/etc/passwd" + "/x" * 1000)
    return tensor


def test_all_but_large_values_stays_and_nothing_is_seen_in_values(tmp_path: Path) -> None:
    whole = model(SMALL, LARGE, SMALL)
    (tmp_path / "m").write_bytes(whole.SerializeToString())
    text = reduced(tmp_path / "m")
    assert text is not None
    whole.graph.initializer[1].ClearField("raw_data")
    assert onnx.ModelProto.FromString(text) == whole
    assert not onnx_repeats(tmp_path / "m")
    assert check_onnx_references(tmp_path / "m", tmp_path) == []


def test_a_file_that_a_large_initializer_names_is_found(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(model(LARGE, outside()).SerializeToString())
    with pytest.raises(LoadError, match="it is absolute"):
        check_onnx_references(tmp_path / "m", tmp_path)


def test_a_second_graph_is_read_as_the_first(tmp_path: Path) -> None:
    """Protobuf merges them."""
    (tmp_path / "m").write_bytes(model(LARGE).SerializeToString() + model(outside()).SerializeToString())
    with pytest.raises(LoadError, match="it is absolute"):
        check_onnx_references(tmp_path / "m", tmp_path)


@pytest.mark.parametrize(("limit", "most"), [("_MOST_FIELDS", 5), ("_MOST_BYTES", 20)])
def test_a_file_with_too_much_besides_values_is_searched_whole(
    limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").write_bytes(model(SMALL, LARGE).SerializeToString())
    monkeypatch.setattr(onnx_reduction, limit, most)
    assert reduced(tmp_path / "m") is None
    assert onnx_repeats(tmp_path / "m")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x3a\x7f", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x00\x00\x00\x00", b"\x0b", b"\x08\x80",
     b"\x08\x01\x08\x01ORTM"],
)  # fmt: skip
def test_bytes_that_are_no_message_are_skipped(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    assert reduced(tmp_path / "m") is None


def test_every_shortened_file_is_none_or_a_message(tmp_path: Path) -> None:
    whole = model(SMALL, LARGE).SerializeToString()
    for size in [*range(1, 60), *range(60, len(whole), 997)]:
        (tmp_path / "m").write_bytes(whole[:size])
        text = reduced(tmp_path / "m")
        assert text is None or onnx.ModelProto.FromString(text)
