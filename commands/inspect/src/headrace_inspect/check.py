"""``headrace check``: reports the problems of every model of a repository, and the config fields that were completed.

Some problems appear only in a load. So each model is loaded, one after the other, as ``headrace serve`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import (
    Command,
    CompletedField,
    ConfigError,
    HeadraceError,
    Inspector,
    ServerOptions,
    one_line,
    parse_options,
)

if TYPE_CHECKING:
    from headrace_inspect.reports import ModelReport

_RED, _GREEN, _DIM, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[0m"


#: Flags with one value that mean what they mean to ``headrace serve``, and what their help calls the value.
_FLAGS = {
    "--model-config-name": "NAME",
    "--backend-directory": "PATH",
    "--rate-limit": "execution_count|off",
    "--plugins": "NAME,...",
}


class Check(Command):
    name = "check"
    help = "list the problems of a repository"
    synopsis = "[options] <path> ... | --security [--json] -- [headrace serve | tritonserver] <flags of the server>"
    description = (
        "Check every model of a repository, or one model, as a load does. Exits with 1 if there is any problem. "
        "With --security: list who may do what on a server with these flags, without a start; exits with 1 if "
        "something is open that --security-profile=public closes."
    )
    example = "headrace check /srv/models"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        parser.add_argument(
            "path",
            nargs="*",
            help="a model repository, or the directory of one model; with --security, behind '--', "
            "the flags of the server",
        )
        parser.add_argument("--security", action="store_true", help="list who may do what on the server")
        parser.add_argument(
            "--no-load", action="store_true", help="check only the configs; start no engine and load no model"
        )
        parser.add_argument("--strict", action="store_true", help="as --disable-auto-complete-config of headrace serve")
        parser.add_argument("--allow-external-links", action="store_true", help="as the flag of headrace serve")
        for flag, shown in _FLAGS.items():
            parser.add_argument(flag, metavar=shown, help="as the flag of headrace serve")
        parser.add_argument(
            "--rate-limit-resource",
            action="append",
            default=[],
            metavar="NAME:COUNT[:DEVICE]",
            help="as the flag of headrace serve; may be repeated",
        )
        parser.add_argument("--graph", metavar="FILE.svg", help="also draw the ensembles to this file")
        parser.add_argument("--json", action="store_true", help="print a JSON array, one object per model")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        arguments = super().parse(words)
        if not arguments.path and not arguments.security:
            self._parser.error("the following arguments are required: path")
        return arguments

    def run(self, arguments: argparse.Namespace) -> int:
        """Print a report on each model. Return 1 if there is any problem, else 0."""
        from headrace_inspect.security_report import review

        if arguments.security:
            return review(arguments.path, arguments.json)
        repositories, models = _split(arguments.path)
        for model in models:
            print(f"'{model}' is a model, not a repository: this model alone is checked", file=sys.stderr)
        # The reports have all that matters of the server's log.
        logging.disable(logging.CRITICAL)
        try:
            reports = _reports(_options(arguments, repositories, models), arguments, repositories, models)
        except HeadraceError as error:
            print(error.message, file=sys.stderr)
            return 1
        finally:
            logging.disable(logging.NOTSET)
        if arguments.graph and not _draw(reports, Path(arguments.graph)):
            return 1
        print(json.dumps([asdict(report) for report in reports], indent=2) if arguments.json else _picture(reports))
        return 1 if any(report.problems for report in reports) else 0


def _options(arguments: argparse.Namespace, repositories: Sequence[str], models: Sequence[Path]) -> ServerOptions:
    """Return the options that ``headrace serve`` has with the same flags. Raises `ConfigError`."""
    values = {flag: getattr(arguments, flag[2:].replace("-", "_")) for flag in _FLAGS}
    options = parse_options(
        [
            *(f"--model-repository={path}" for path in (*repositories, *(model.parent for model in models))),
            *(f"{flag}={value}" for flag, value in values.items() if value is not None),
            *(f"--rate-limit-resource={resource}" for resource in arguments.rate_limit_resource),
            *(["--disable-auto-complete-config"] if arguments.strict else []),
            *(["--allow-external-links=true"] if arguments.allow_external_links else []),
        ]
    )
    return replace(options, strict_parameters=True, exit_timeout_secs=10)


def _reports(
    options: ServerOptions, arguments: argparse.Namespace, repositories: Sequence[str], models: Sequence[Path]
) -> list[ModelReport]:
    from headrace_inspect.reports import report_on
    from headrace_inspect.resource_scopes import ResourceScopes
    from headrace_inspect.trial import Trial

    for repository in map(Path, repositories):
        if inner := _repository_below(repository):
            raise ConfigError(f"'{repository}' holds no models, but '{inner}' does: name that one")
    with contextlib.ExitStack() as stack:
        inspector = stack.enter_context(Inspector(options))
        places = inspector.models()
        chosen = {name: found for name, found in places.items() if _is_meant(name, found, repositories, models)}
        load = None if arguments.no_load else stack.enter_context(Trial(options)).load
        scopes = ResourceScopes(inspector, chosen, options)
        return [report_on(name, found, inspector, load, scopes) for name, found in chosen.items()]


def _draw(reports: Sequence[ModelReport], path: Path) -> bool:
    """Draw the ensembles into the file ``path``. Return true if it was written."""
    from headrace_inspect.ensemble_graphs import as_svg

    graphs = {report.model: report.graph for report in reports if report.graph is not None}
    try:
        path.write_text(as_svg(graphs), encoding="utf-8")
    except OSError as error:
        print(f"cannot write the graph to '{path}': {error.strerror}", file=sys.stderr)
        return False
    return True


def _split(paths: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Return the repositories among ``paths``, and the directories of single models."""
    repositories, models = [], []
    for path_text in paths:
        path = Path(path_text)
        if Inspector.is_model(path):
            models.append(path if path.name else path.absolute())
        else:
            repositories.append(path_text)
    return repositories, models


def _repository_below(path: Path) -> Path | None:
    """Return the first directory in ``path`` that contains models, unless a directory in ``path`` is a model."""
    folders = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    if any(map(Inspector.is_model, folders)):
        return None
    return next((folder for folder in folders if any(map(Inspector.is_model, folder.iterdir()))), None)


def _is_meant(name: str, places: Sequence[str], repositories: Sequence[str], models: Sequence[Path]) -> bool:
    wanted = {repository.rstrip("/") for repository in repositories}
    return any(place.removesuffix(f"/{name}") in wanted or Path(place) in models for place in places)


def _picture(reports: Sequence[ModelReport]) -> str:
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    problems = sum(len(report.problems) for report in reports)
    lines = [line for report in reports for line in _lines(report, coloured, shows_completed=not problems)]
    is_short = problems and any(report.completed for report in reports)
    remark = "; completed fields are not shown here, but with --json" if is_short else ""
    return "\n".join([*lines, f"{_number(len(reports), 'model')}, {_number(problems, 'problem')}{remark}"])


def _lines(report: ModelReport, coloured: bool, shows_completed: bool) -> list[str]:
    from headrace_inspect.ensemble_graphs import as_text

    verdict = _paint(_number(len(report.problems), "problem"), _RED, coloured)
    return [
        f"{one_line(report.model)}: {verdict if report.problems else _paint('ok', _GREEN, coloured)}",
        *(f"  {one_line(str(problem))}" for problem in report.problems),
        *(f"  note: {one_line(str(note))}" for note in report.notes),
        *(f"  {one_line(line)}" for line in (as_text(report.graph) if report.graph else ())),
        *(_paint(f"  {_completion_line(each)}", _DIM, coloured) for each in report.completed if shows_completed),
        "",
    ]


def _completion_line(completion: CompletedField) -> str:
    return one_line(f"{completion.field} = {completion.value}   completed by {completion.source}")


def _paint(text: str, colour: str, coloured: bool) -> str:
    return f"{colour}{text}{_PLAIN}" if coloured else text


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
