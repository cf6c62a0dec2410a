"""Files that an ONNX graph names, found from the graph alone. The tests of backends cover every field that can name
one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from headrace import LoadError
from headrace_engines import check_onnx_references, onnx_references, onnx_repeats

SHAPE: list[str | int | None] = ["n", 4]


def write(path: Path, nodes: list[onnx.NodeProto], weights: list[TensorProto]) -> Path:
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE)] for name in "xy")
    path.write_bytes(helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, weights)).SerializeToString())
    return path


def with_weights(path: Path, **entries: str) -> Path:
    """``y = x + W`` whose W lies where ``entries`` say."""
    tensor = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return write(path, [helper.make_node("Add", ["x", "W"], ["y"])], [tensor])


def compiled(path: Path, context: str, **attributes: Any) -> Path:
    """A graph that an accelerator has compiled, into ``context``."""
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context=context, **attributes)
    return write(path, [node], [])


@pytest.mark.parametrize(
    ("place", "levels"), [("m", 0), ("1/m", 1), ("1/model.onnx/m", 2), ("1/../m", 0), ("1/./a/../m", 1)]
)
def test_a_graph_may_name_files_up_to_the_model_s_directory(tmp_path: Path, place: str, levels: int) -> None:
    path = tmp_path / place
    (tmp_path / "1" / "a").mkdir(parents=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_onnx_references(with_weights(path, location="../" * levels + "weights.bin", offset="0"), tmp_path)
    climbing = "../" * (levels + 1) + "weights.bin"
    with pytest.raises(LoadError) as refusal:
        check_onnx_references(with_weights(path, location=climbing), tmp_path)
    assert refusal.value.message == (
        f"'{path}' names the file '{climbing}', which must stay in the model directory: it climbs out with '..'"
    )


def test_files_with_weights_are_named_once_each_and_no_others(tmp_path: Path) -> None:
    weights = [
        TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
        for name in ("V", "W", "X")
    ]
    for tensor, location in zip(weights, ("b.bin", "w/a.bin", "b.bin"), strict=True):
        tensor.external_data.add(key="location", value=location)
    assert check_onnx_references(write(tmp_path / "m", [], weights), tmp_path) == ["b.bin", "w/a.bin"]
    assert check_onnx_references(compiled(tmp_path / "m", "engine.bin", embed_mode=0, location="x"), tmp_path) == []


def test_only_what_is_called_the_location_is_one(tmp_path: Path) -> None:
    assert check_onnx_references(with_weights(tmp_path / "m", checksum="/location"), tmp_path) == []


def test_compiled_part_of_an_accelerator_is_a_file_unless_it_is_embedded(tmp_path: Path) -> None:
    check_onnx_references(compiled(tmp_path / "m", "/not/a/path but bytes", embed_mode=1), tmp_path)
    for graph in (
        compiled(tmp_path / "a", "/etc/passwd", embed_mode=0),
        compiled(tmp_path / "b", "x", onnx_model_filename="/etc/passwd"),
    ):
        with pytest.raises(LoadError, match=r"names the file '/etc/passwd', .*: it is absolute"):
            check_onnx_references(graph, tmp_path)


@pytest.mark.parametrize("content", [b"", b"location", b"\x0a\xff no graph, but location", b"<net>location</net>"])
def test_file_without_a_graph_is_reported_by_the_engine(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content)
    check_onnx_references(tmp_path / "m", tmp_path)


@pytest.mark.parametrize("size", [6, 7, 100])
def test_a_word_is_found_wherever_pieces_of_the_file_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(onnx_references, "_PIECE_BYTES", size)
    path = tmp_path / "m"
    for before in range(20):
        path.write_bytes(b"L" * before + b"Loop" + b"Loo" * 9)
        assert onnx_repeats(path)
        path.write_bytes(b"L" * before + b"Lop" + b"Loo" * 9)
        assert not onnx_repeats(path)
    path.write_bytes(b"")
    assert not onnx_repeats(path)


def test_a_loop_is_seen_in_branches_and_functions(tmp_path: Path) -> None:
    assert not onnx_repeats(write(tmp_path / "m", [helper.make_node("Relu", ["x"], ["y"])], []))
    inner = helper.make_graph([helper.make_node("Loop", ["", "c", "x"], ["y"])], "inner", [], [])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    assert onnx_repeats(write(tmp_path / "m", [branch], []))
