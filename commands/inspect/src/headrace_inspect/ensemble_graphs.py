"""Draws ensembles as text and as SVG: their steps in the order in which they can run.

Steps of one level do not depend on each other and can run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from headrace import ModelConfig

_WHEN = "ensemble.when."
#: Pixels: width of a character, height of a line, gap between columns, margin.
_CHARACTER, _LINE, _GAP, _MARGIN = 8, 18, 70, 20


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A step. ``reads`` and ``writes`` map the model's tensors to the ensemble's. ``when`` is its condition or empty.

    ``level`` counts from 1; it is 0 for a step that can never run.
    """

    step: int
    model: str
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    when: str
    level: int

    @property
    def needs(self) -> set[str]:
        """The ensemble tensors that the step waits for."""
        return {*self.reads.values(), self.when.removeprefix("!")} - {""}


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The steps of an ensemble, sorted by level, and the ensemble's inputs and outputs."""

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    steps: Sequence[GraphStep] = field(default_factory=list)


def step_graph(config: ModelConfig) -> StepGraph:
    """Return the graph of an ensemble. The config may have errors."""
    conditions = {
        key.removeprefix(_WHEN): value.string_value for key, value in config.parameters.items() if key.startswith(_WHEN)
    }
    steps = [
        GraphStep(
            index,
            step.model_name,
            dict(sorted(step.input_map.items())),
            dict(sorted(step.output_map.items())),
            conditions.get(str(index), conditions.get(step.model_name, "")),
            0,
        )
        for index, step in enumerate(config.ensemble_scheduling.step)
    ]
    inputs, outputs = ([io.name for io in tensors] for tensors in (config.input, config.output))
    return StepGraph(inputs, outputs, _levelled(steps, inputs))


def _levelled(steps: Sequence[GraphStep], inputs: Sequence[str]) -> list[GraphStep]:
    """Return ``steps`` with their levels, sorted by level. Steps that can never run are last."""
    missing = [step.needs for step in steps]
    readers: dict[str, list[int]] = {}
    for index, needs in enumerate(missing):
        for tensor in needs:
            readers.setdefault(tensor, []).append(index)
    found: list[GraphStep] = []
    available, level = list(dict.fromkeys(inputs)), 1
    ready = [index for index, needs in enumerate(missing) if not needs]
    while available or ready:
        for tensor in available:
            for index in readers.pop(tensor, ()):
                missing[index].discard(tensor)
                if not missing[index]:
                    ready.append(index)
        available = []
        for index in sorted(ready):
            found.append(replace(steps[index], level=level))
            available += steps[index].writes.values()
        ready, level = [], level + 1
    known = {step.step for step in found}
    return found + [step for step in steps if step.step not in known]


def as_text(graph: StepGraph) -> list[str]:
    """Return one line per step, sorted by level."""
    width = max((len(step.model) for step in graph.steps), default=0)
    return [
        f"{step.level or '-':>3}  step {step.step}  {step.model:<{width}}  {', '.join(_maps(step.reads, '<-'))}  =>  "
        f"{', '.join(_maps(step.writes, '->'))}{_condition(step)}"
        for step in graph.steps
    ]


def _maps(tensors: Mapping[str, str], arrow: str) -> Iterator[str]:
    return (f"{name} {arrow} {tensor}" for name, tensor in tensors.items())


def _condition(step: GraphStep) -> str:
    if not step.when:
        return ""
    return f"  only if {'not ' if step.when.startswith('!') else ''}{step.when.removeprefix('!')}"


@dataclass(frozen=True, slots=True)
class _Box:
    """A step, an input or an output as it is drawn: title, kind, corner and size."""

    title: str
    kind: str
    x: int
    y: int
    width: int
    height: int


def as_svg(graphs: Mapping[str, StepGraph]) -> str:
    """Return an SVG of all ``graphs`` with their names, one below the other."""
    parts: list[str] = []
    y = width = 0
    for name, graph in graphs.items():
        parts.append(f'<text x="{_MARGIN}" y="{y + _MARGIN + 6}" class="name">{escape(name)}</text>')
        body, size = _drawn(graph, y + 2 * _LINE)
        parts += body
        width, y = max(width, size[0]), size[1] + _MARGIN
    style = (
        "text{font:13px monospace} .name{font-weight:bold} rect{fill:#fff;stroke:#456} .tensor{fill:#eef4fa} "
        ".step{fill:#fffbe8} path{fill:none;stroke:#456} .when{stroke-dasharray:5 4} .label{fill:#456;font-size:11px}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + _MARGIN}" height="{y + _MARGIN}">'
    return "\n".join([head, f"<style>{style}</style>", *parts, "</svg>", ""])


def _drawn(graph: StepGraph, top: int) -> tuple[list[str], tuple[int, int]]:
    """Return the SVG elements of one graph below ``top``, and its right and lower ends."""
    last = max((step.level for step in graph.steps), default=0) + 1
    columns: list[list[tuple[str, str, str]]] = [[] for _ in range(last + 1)]
    for name in graph.inputs:
        columns[0].append((f"input {name}", name, "tensor"))
    for step in graph.steps:
        columns[step.level or last - 1].append((f"step {step.step}", f"{step.step}  {step.model}", "step"))
    for name in graph.outputs:
        columns[last].append((f"output {name}", name, "tensor"))
    boxes: dict[str, _Box] = {}
    x, bottom = _MARGIN, top
    for column in columns:
        wide = max((len(title) for _, title, _ in column), default=0) * _CHARACTER + 20
        for row, (key, title, kind) in enumerate(column):
            boxes[key] = _Box(title, kind, x, top + row * 3 * _LINE, wide, 2 * _LINE - 6)
            bottom = max(bottom, boxes[key].y + 3 * _LINE)
        x += wide + _GAP
    return [*_edges(graph, boxes), *map(_box, boxes.values())], (x - _GAP, bottom)


def _edges(graph: StepGraph, boxes: Mapping[str, _Box]) -> Iterator[str]:
    source = {name: f"input {name}" for name in graph.inputs}
    source |= {tensor: f"step {step.step}" for step in graph.steps for tensor in step.writes.values()}
    for step in graph.steps:
        lines: dict[tuple[str, str], list[str]] = {}  # one line for all tensors between two boxes
        for tensor in sorted(step.needs & source.keys()):
            kind = "" if tensor in step.reads.values() else "when"
            lines.setdefault((source[tensor], kind), []).append(tensor)
        for (start, kind), tensors in lines.items():
            yield _edge(boxes[start], boxes[f"step {step.step}"], ", ".join(tensors), kind)
    for name in graph.outputs:
        if name in source:
            yield _edge(boxes[source[name]], boxes[f"output {name}"], name, "")


def _edge(start: _Box, end: _Box, label: str, kind: str) -> str:
    x1, y1, x2, y2 = start.x + start.width, start.y + start.height // 2, end.x, end.y + end.height // 2
    middle = (x1 + x2) // 2
    line = f'<path class="{kind}" d="M{x1},{y1} C{middle},{y1} {middle},{y2} {x2},{y2}"/>'
    return f'{line}<text class="label" x="{x1 + 4}" y="{y1 - 4 + (y2 - y1) // 8}">{escape(label)}</text>'


def _box(box: _Box) -> str:
    frame = f'<rect class="{box.kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="4"/>'
    return f'{frame}<text x="{box.x + 10}" y="{box.y + box.height // 2 + 5}">{escape(box.title)}</text>'
