"""``headrace check``: reports the problems of every model of a repository, and the config fields that were completed.

Some problems appear only in a load. So each model is loaded, one after the other, as ``headrace serve`` does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

from headrace.cli import values
from headrace.cli.ensemble_graphs import as_svg, as_text
from headrace.cli.inspection import LoadRefusal, ModelReport, inspect
from headrace.cli.resource_scopes import ResourceScopes
from headrace.cli.usage import Parser
from headrace.config.completed_fields import CompletedField
from headrace.config.options import RateLimitResource, ServerOptions
from headrace.errors import ConfigError, HeadraceError
from headrace.plugins import Plugins
from headrace.server import Server
from headrace.storage.local_storage import is_model
from headrace.storage.repositories import Entry, Repositories
from headrace.telemetry.logs import one_line

_RED, _GREEN, _DIM, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[0m"


def run(words: Sequence[str]) -> int:
    """Print a report on each model. Return 1 if there is any problem, else 0."""
    arguments = _parser().parse(words)
    repositories, models = _split(arguments.path)
    options = ServerOptions(
        model_repository=(*repositories, *(str(model.parent) for model in models)),
        disable_auto_complete_config=arguments.strict,
        model_config_name=arguments.model_config_name,
        backend_directory=arguments.backend_directory,
        allow_external_links=arguments.allow_external_links,
        strict_parameters=True,
        exit_timeout_secs=10,
        rate_limit=arguments.rate_limit,
        rate_limit_resource=tuple(arguments.rate_limit_resource),
        plugins=None if arguments.plugins is None else tuple(filter(None, arguments.plugins.split(","))),
    )
    for model in models:
        print(f"'{model}' is a model, not a repository: this model alone is checked", file=sys.stderr)
    # The reports have all that matters of the server's log.
    logging.getLogger("headrace").setLevel(logging.CRITICAL + 1)
    try:
        for repository in map(Path, repositories):
            if inner := _repository_below(repository):
                raise ConfigError(f"'{repository}' holds no models, but '{inner}' does: name that one")
        plugins = Plugins.discover(options.plugins)
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(contextlib.closing(Repositories(options, plugins.storages)))
            chosen = [entry for entry in opened.scan().values() if _is_meant(entry, repositories, models)]
            load = None if arguments.no_load else stack.enter_context(Trial(options)).load
            scopes = ResourceScopes(chosen, options)
            reports = [inspect(entry, opened, options, plugins, load, scopes) for entry in chosen]
    except HeadraceError as error:
        print(error.message, file=sys.stderr)
        return 1
    finally:
        logging.getLogger("headrace").setLevel(logging.NOTSET)
    if arguments.graph and not _draw(reports, Path(arguments.graph)):
        return 1
    print(json.dumps([asdict(report) for report in reports], indent=2) if arguments.json else _picture(reports))
    return 1 if any(report.problems for report in reports) else 0


def _draw(reports: Sequence[ModelReport], path: Path) -> bool:
    """Draw the ensembles into the file ``path``. Return true if it was written."""
    graphs = {report.model: report.graph for report in reports if report.graph is not None}
    try:
        path.write_text(as_svg(graphs), encoding="utf-8")
    except OSError as error:
        print(f"cannot write the graph to '{path}': {error.strerror}", file=sys.stderr)
        return False
    return True


def _parser() -> Parser:
    parser = Parser(
        "headrace check",
        "[options] <path> ...",
        "Check every model of a repository, or one model, as a load does. Exits with 1 if there is any problem.",
        "Example: headrace check /srv/models --strict",
    )
    parser.add_argument("path", nargs="+", help="directory that holds one directory per model, or that of one model")
    parser.add_argument(
        "--no-load", action="store_true", help="check only the configs; start no engine and load no model"
    )
    parser.add_argument("--strict", action="store_true", help="as --disable-auto-complete-config of headrace serve")
    parser.add_argument("--model-config-name", default="", metavar="NAME", help="as the flag of headrace serve")
    backends = ServerOptions().backend_directory
    parser.add_argument("--backend-directory", default=backends, metavar="PATH", help="as the flag of headrace serve")
    parser.add_argument(
        "--allow-external-links", action="store_true", help="as --allow-external-links=true of headrace serve"
    )
    parser.add_argument(
        "--rate-limit",
        type=str.lower,
        default="off",
        choices=("off", "execution_count"),
        help="as the flag of headrace serve",
    )
    parser.add_argument(
        "--rate-limit-resource",
        type=_resource,
        action="append",
        default=[],
        metavar="NAME:COUNT[:DEVICE]",
        help="as the flag of headrace serve; may be repeated",
    )
    parser.add_argument("--plugins", metavar="NAME,...", help="as the flag of headrace serve")
    parser.add_argument("--graph", metavar="FILE.svg", help="draw the ensembles into this file, too")
    parser.add_argument("--json", action="store_true", help="print a JSON array, one object per model")
    return parser


def _resource(text: str) -> RateLimitResource:
    try:
        return values.resource(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _split(paths: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Return the repositories among ``paths``, and the directories of single models."""
    repositories, models = [], []
    for given in paths:
        path = Path(given)
        if is_model(path):
            models.append(path if path.name else path.absolute())
        else:
            repositories.append(given)
    return repositories, models


def _repository_below(path: Path) -> Path | None:
    """Return the first directory in ``path`` that holds models, if none in ``path`` is a model itself."""
    folders = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    if any(map(is_model, folders)):
        return None
    return next((folder for folder in folders if any(map(is_model, folder.iterdir()))), None)


def _is_meant(entry: Entry, repositories: Sequence[str], models: Sequence[Path]) -> bool:
    return any(each.url in repositories or Path(each.url) / entry.name in models for each in entry.repositories)


def _picture(reports: Sequence[ModelReport]) -> str:
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    problems = sum(len(report.problems) for report in reports)
    lines = [line for report in reports for line in _lines(report, coloured, shows_completed=not problems)]
    is_short = problems and any(report.completed for report in reports)
    remark = "; completed fields are not shown here, but with --json" if is_short else ""
    return "\n".join([*lines, f"{_number(len(reports), 'model')}, {_number(problems, 'problem')}{remark}"])


def _lines(report: ModelReport, coloured: bool, shows_completed: bool) -> list[str]:
    verdict = _paint(_number(len(report.problems), "problem"), _RED, coloured)
    return [
        f"{one_line(report.model)}: {verdict if report.problems else _paint('ok', _GREEN, coloured)}",
        *(f"  {one_line(str(problem))}" for problem in report.problems),
        *(f"  note: {one_line(str(note))}" for note in report.notes),
        *(f"  {one_line(line)}" for line in (as_text(report.graph) if report.graph else ())),
        *(_paint(f"  {_told(each)}", _DIM, coloured) for each in report.completed if shows_completed),
        "",
    ]


def _told(completion: CompletedField) -> str:
    return one_line(f"{completion.field} = {completion.value}   completed by {completion.source}")


def _paint(text: str, colour: str, coloured: bool) -> str:
    return f"{colour}{text}{_PLAIN}" if coloured else text


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Trial:
    """A context manager for a server without ports, which loads, warms up and unloads models."""

    def __init__(self, options: ServerOptions) -> None:
        """Raises `ConfigError` as `Server` does."""
        self._server = Server(replace(options, model_control_mode="explicit", load_model=()))

    def __enter__(self) -> Trial:
        with _stdout_aside():
            self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _stdout_aside():
            self._server.__exit__(kind, error, trace)

    def load(self, name: str) -> list[LoadRefusal]:
        """Load the model ``name`` and unload it again. Return why versions did not load."""
        with _stdout_aside():
            return asyncio.run_coroutine_threadsafe(self._try(name), self._server.loop).result()

    async def _try(self, name: str) -> list[LoadRefusal]:
        try:
            await self._server.load(name)
        except HeadraceError as error:
            return list(self._refusals(name)) or [LoadRefusal(0, error.code.value, error.message)]
        finally:
            await self._server.unload(name, unload_dependents=True)
        return []

    def _refusals(self, name: str) -> Iterator[LoadRefusal]:
        for entry in self._server.index():
            if entry.name == name and entry.reason and entry.version:
                code, _, message = entry.reason.partition(": ")
                yield LoadRefusal(int(entry.version), code, message)


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """Send what models print to stderr, also that of model processes: stdout is for the reports."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
