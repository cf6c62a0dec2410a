"""Drawings of ensembles: the levels of steps, and the SVG file."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from google.protobuf import text_format

from headrace.config.model_config_pb2 import ModelConfig
from headrace_cli import main
from headrace_inspect.ensemble_graphs import as_svg, as_text, step_graph

SVG = "{http://www.w3.org/2000/svg}"


def io(field: str, names: str) -> str:
    return " ".join(f'{field} {{ name: "{name}" data_type: TYPE_FP32 dims: 1 }}' for name in names.split())


def step(model: str, reads: str, writes: str) -> str:
    return (
        f'step {{ model_name: "{model}" model_version: -1 '
        + " ".join(
            f'{field} {{ key: "k{number}" value: "{tensor}" }}'
            for field, tensors in (("input_map", reads), ("output_map", writes))
            for number, tensor in enumerate(tensors.split())
        )
        + " } "
    )


DIAMOND = (
    f'platform: "ensemble" {io("input", "x <w>")} {io("output", "y z")} ensemble_scheduling {{ '
    + step("join", "m n", "y")
    + step("left", "x", "m")
    + step("right", "x <w>", "n f")
    + step("rare", "m", "z")
    + '} parameters { key: "ensemble.when.rare" value { string_value: "!f" } }'
)


def test_steps_are_drawn_after_their_dependencies_and_independent_ones_side_by_side() -> None:
    graph = step_graph(text_format.Parse(DIAMOND, ModelConfig()))
    assert as_text(graph) == [
        "  1  step 1  left   k0 <- x  =>  k0 -> m",
        "  1  step 2  right  k0 <- x, k1 <- <w>  =>  k0 -> n, k1 -> f",
        "  2  step 0  join   k0 <- m, k1 <- n  =>  k0 -> y",
        "  2  step 3  rare   k0 <- m  =>  k0 -> z  only if not f",
    ]


def test_a_step_that_can_never_run_has_no_level() -> None:
    config = f"{io('input', 'x')} ensemble_scheduling {{ {step('a', 'x q', 'p')} {step('b', 'p', 'q')} }}"
    graph = step_graph(text_format.Parse(config, ModelConfig()))
    assert [(each.step, each.level) for each in graph.steps] == [(0, 0), (1, 0)]
    assert as_text(graph)[0].startswith("  -  step 0")
    assert ElementTree.fromstring(as_svg({"e": graph})) is not None


def test_a_drawing_has_boxes_for_steps_and_tensors_and_lines_for_reads() -> None:
    graph = step_graph(text_format.Parse(DIAMOND, ModelConfig()))
    root = ElementTree.fromstring(as_svg({"one & <two>": graph, "three": graph}))
    kinds = [box.get("class") for box in root.iter(f"{SVG}rect")]
    assert (kinds.count("step"), kinds.count("tensor")) == (8, 8)
    lines = [line.get("class") for line in root.iter(f"{SVG}path")]
    assert (lines.count(""), lines.count("when")) == (2 * 8, 2)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"one & <two>", "three", "0  join", "<w>", "f"} <= texts
    boxes = [[int(box.get(side, "")) for side in ("x", "y", "width", "height")] for box in root.iter(f"{SVG}rect")]
    overlap = [
        (a, b)
        for n, a in enumerate(boxes)
        for b in boxes[n + 1 :]
        if a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]
    ]
    assert not overlap


def test_all_tensors_between_two_steps_are_one_line() -> None:
    text = """
      input [ { name: "a" } ] output [ { name: "b" } ]
      ensemble_scheduling { step [
        { model_name: "one" input_map { key: "x" value: "a" }
          output_map { key: "y" value: "s" } output_map { key: "z" value: "t" } },
        { model_name: "two" input_map { key: "x" value: "s" } input_map { key: "y" value: "t" }
          output_map { key: "z" value: "b" } } ] }"""
    root = ElementTree.fromstring(as_svg({"e": step_graph(text_format.Parse(text, ModelConfig()))}))
    labels = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "label"]
    assert labels == ["a", "s, t", "b"]


def test_check_writes_the_graph_as_text_json_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models/e/1").mkdir(parents=True)
    (tmp_path / "models/e/config.pbtxt").write_text(DIAMOND)
    picture = tmp_path / "graph.svg"
    main(["check", "--no-load", f"--graph={picture}", str(tmp_path / "models")])
    assert "  1  step 1  left   k0 <- x  =>  k0 -> m\n" in capsys.readouterr().out
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
    main(["check", "--no-load", "--json", str(tmp_path / "models")])
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["graph"]["inputs"], report["graph"]["steps"][0]["model"]) == (["x", "<w>"], "left")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").mkdir()
    assert main(["check", "--no-load", f"--graph={tmp_path}/none/x.svg", str(tmp_path / "models")]) == 1
    assert "cannot write the graph" in capsys.readouterr().err
