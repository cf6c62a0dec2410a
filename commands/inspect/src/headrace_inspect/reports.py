"""Reports on one model: the problems of its config, or, if there are none, the problems of a load.

The result is a `ModelReport`. `locate` finds the file and line of an error of a load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace import (
    Code,
    CompletedField,
    ConfigError,
    Findings,
    HeadraceError,
    InspectedModel,
    Inspector,
    Problem,
)
from headrace_inspect.ensemble_graphs import StepGraph, step_graph
from headrace_inspect.resource_scopes import ResourceScopes
from headrace_inspect.trial import LoadRefusal


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A problem and its place.

    ``line`` and ``column`` count from 1; they are 0 if the place is not known, or not in the file.
    ``field`` is a path in the config, empty if the problem is not in a field. ``code`` is the printed name of an error
    code.
    """

    file: str
    line: int
    column: int
    field: str
    message: str
    code: str

    def __str__(self) -> str:
        place = "".join(f":{number}" for number in (self.line, self.column) if number)
        field = f"{self.field}: " if self.field and not self.message.startswith(self.field) else ""
        return f"{self.file}{place}: {field}{self.message}"


@dataclass(slots=True)
class ModelReport:
    """The problems of a model, and the config fields that were completed.

    ``notes`` are config settings without effect; the model can be served.
    ``path`` is the config file, or the model's directory if there is none. An ensemble has a ``graph``.
    """

    model: str
    path: str
    problems: list[Diagnostic] = field(default_factory=list)
    notes: list[Diagnostic] = field(default_factory=list)
    completed: list[CompletedField] = field(default_factory=list)
    graph: StepGraph | None = None


def locate(message: str, model_path: Path, version: int, filename: str) -> tuple[Path, int]:
    """Return the file of the model that the error ``message`` is about, and the line in it; 0 if it names none.

    A Python error names both. All other errors are attributed to ``filename`` in the directory of the version.
    """
    folder = model_path / str(version)
    for name, line in (_of_frame(message), _of_syntax(message)):
        for place in (model_path / name, folder / name) if name else ():
            if place.is_file():
                return place, line
    return (folder / filename if filename and (folder / filename).exists() else folder), 0


def _of_syntax(message: str) -> tuple[str, int]:
    """Return file and line of a message like ``SyntaxError: invalid syntax (model.py, line 3)``."""
    _, _, inside = message.splitlines()[0].rpartition("(") if message else ("", "", "")
    name, _, line = inside.removesuffix(")").partition(", line ")
    return _known(name, line)


def _of_frame(message: str) -> tuple[str, int]:
    """Return file and line of the innermost frame: the first line after ``At:``, ``  1/model.py(3): initialize``."""
    _, _, frames = message.partition("\nAt:\n")
    name, _, rest = frames.strip().partition("(")
    return _known(name, rest.partition(")")[0])


def _known(name: str, line: str) -> tuple[str, int]:
    is_place = name and "\0" not in name and line.isascii() and line.isdigit() and len(line) < 9
    return (name, int(line)) if is_place else ("", 0)


def report_on(
    name: str,
    places: Sequence[str],
    inspector: Inspector,
    load: Callable[[str], list[LoadRefusal]] | None,
    scopes: ResourceScopes,
) -> ModelReport:
    """Report on the config of the model ``name``, and, if it has no problem, on a load by ``load``.

    If ``load`` is None, no engine is started: the config is not completed, and only the fields that it has are checked.
    ``scopes`` has the rate limiter resources of all models.

    Raises `ConfigError` for a ``--model-config-name`` that is no file name.
    """
    report = ModelReport(name, places[0])
    if len(places) > 1:
        message = f"model appears in two or more repositories: {', '.join(places)}"
        report.problems.append(Diagnostic(report.path, 0, 0, "", message, Code.INTERNAL.value))
        return report
    with contextlib.ExitStack() as stack:
        try:
            model = stack.enter_context(inspector.open(name))
        except HeadraceError as error:
            report.problems.append(Diagnostic(report.path, 0, 0, "", error.message, error.code.value))
            return report
        report.path = model.shown(model.config_file or model.directory)
        try:
            findings = model.check(has_engines=load is not None)
        except ConfigError as error:
            report.problems.append(_misread(report.path, error))
            return report
        _Report(report, model, findings).fill(load, scopes)
    report.problems.sort(key=lambda problem: (problem.line, problem.column))
    return report


def _misread(path: str, error: ConfigError) -> Diagnostic:
    """Return the diagnostic of a config that cannot be parsed: the message begins with the place and the field."""
    place = f"{path}:{error.line}:{error.column}: " if error.line else f"{path}: "
    message = error.message.removeprefix(place).removeprefix(f"{error.field}: ")
    return Diagnostic(path, error.line, error.column, error.field, message, error.code.value)


class _Report:
    """Adds to ``report`` what is wrong with ``model``, with the places."""

    def __init__(self, report: ModelReport, model: InspectedModel, findings: Findings) -> None:
        self._report, self._model, self._findings = report, model, findings

    def fill(self, load: Callable[[str], list[LoadRefusal]] | None, scopes: ResourceScopes) -> None:
        report, findings = self._report, self._findings
        report.completed += findings.completed
        if findings.config.HasField("ensemble_scheduling"):
            report.graph = step_graph(findings.config)
        for version, error in findings.failed:
            self._add_refusal(LoadRefusal(version, error.code.value, error.message))
        self._add(report.problems, findings.problems)
        self._add(report.notes, findings.notes)
        for refusal in load(report.model) if load is not None and not report.problems else ():
            self._add_refusal(refusal)
        self._add(report.problems, scopes.problems(self._model.read()))

    def _add(self, found: list[Diagnostic], problems: Iterable[Problem]) -> None:
        for problem in problems:
            line, column = self._find(problem.field)
            placed = Diagnostic(self._report.path, line, column, problem.field, problem.message, problem.code.value)
            if placed not in found:
                found.append(placed)

    def _add_refusal(self, refusal: LoadRefusal) -> None:
        """Add an error of a load: to the config if they do not match, else to the model's file."""
        field = "model_warmup" if "warmup" in refusal.message else ""
        message = refusal.message.strip()
        if field or not refusal.version or refusal.code in (Code.INVALID_ARGUMENT.value, Code.UNSUPPORTED.value):
            self._add(self._report.problems, [Problem(field, message, Code(refusal.code))])
            return
        filename = self._findings.config.default_model_filename
        file, line = locate(refusal.message, self._model.directory, refusal.version, filename)
        problem = Diagnostic(self._model.shown(file), line, 0, "", message, refusal.code)
        if problem not in self._report.problems:
            self._report.problems.append(problem)

    def _find(self, field: str) -> tuple[int, int]:
        """Return line and column of ``field``; (0, 0) if it was completed or there is none."""
        filled = any(field.startswith(completion.field) for completion in self._report.completed)
        return (0, 0) if filled else self._model.place(field) or (0, 0)
