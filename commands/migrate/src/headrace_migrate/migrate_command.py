"""The command ``headrace migrate``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import Command, one_line

if TYPE_CHECKING:
    from headrace_migrate.report import Report
    from headrace_migrate.sources import SourceKind

#: The exit code for an input that cannot be read.
BAD_INPUT = 2


class Migrate(Command):
    """Reports the differences of a deployment, and writes the new one."""

    name = "migrate"
    help = "say what of a deployment of Triton runs as it is, and write the new one"
    synopsis = "[options] <file or directory> | [options] -- <command line>"
    description = (
        "Read a command line of tritonserver, a Dockerfile or a manifest (Kubernetes, KServe, Compose, values of a "
        "chart); a .mar or config.properties of TorchServe, or a directory with model-settings.json of MLServer. Say "
        "of each part whether it runs as it is. Exits with 0 if everything does, 1 if something differs or is not "
        "there, 2 if the input cannot be read."
    )
    example = "headrace migrate triton.yaml --write headrace.yaml"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        parser.add_argument("input", nargs="?", help="a file, a directory, '-' for stdin, or a command line in quotes")
        parser.add_argument("--repository", metavar="DIR", help="the model repository, to list what it needs")
        parser.add_argument("--image", default="", help="your image of Headrace; default: headrace")
        parser.add_argument("--write", metavar="FILE|DIR", help="write the new text or repository here; must not exist")
        parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments. What follows ``--`` is ``words``."""
        own = list(words[: words.index("--")] if "--" in words else words)
        arguments = super().parse(own)
        arguments.words = list(words[len(own) + 1 :])
        if (arguments.input is None) == (not arguments.words):
            self._parser.error("expected one input: a file or directory, or -- and a command line")
        return arguments

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report. Return 0 if everything runs, 1 if something differs, 2 for a bad input."""
        from headrace_migrate.report import BadInput

        try:
            report = _report(arguments)
        except BadInput as error:
            print(one_line(str(error)), file=sys.stderr)
            return BAD_INPUT
        print(report.as_json() if arguments.format == "json" else report.as_text(), end="")
        if arguments.format == "json":
            print()
        elif report.new is not None and not arguments.write and report.shows_new:
            print(report.new, end="" if report.new.endswith("\n") else "\n")
        return report.exit_code


def _report(arguments: argparse.Namespace) -> Report:
    """Return the report, after the new files are written. Raises `BadInput`."""
    from headrace_migrate.deployments import migrate_text  # it imports yaml, and every server imports this module
    from headrace_migrate.report import BadInput, Report
    from headrace_migrate.repository_models import review_models
    from headrace_migrate.sources import SourceKind, read_text

    target = Path(arguments.write) if arguments.write else None
    if target is not None and os.path.lexists(target):
        raise BadInput(f"{target} exists already: name another place")
    name = arguments.input
    if name is not None and (models := _read_models(Path(name[:4096]), target)) is not None:
        return models
    kind: SourceKind | None = None
    if name is None:
        text, source, kind = shlex.join(arguments.words), "command line", SourceKind.SHELL
    elif "tritonserver" in name and any(map(str.isspace, name)) and not Path(name[:255]).exists():
        text, source, kind = name, "command line", SourceKind.SHELL
    else:
        text, source = read_text(name), name
    report = Report(source)
    if arguments.repository:
        review_models(Path(arguments.repository), report)
    migrate_text(text, report, arguments.image, kind, reads_models=not arguments.repository)
    if target is not None and report.new is not None:
        _write(target, report.new)
    return report


def _read_models(path: Path, target: Path | None) -> Report | None:
    """Return the report on an archive of TorchServe or a directory of MLServer, after the new repository is written to
    ``target``; None if ``path`` is neither. Raises `BadInput`."""
    from headrace_migrate.mlserver_models import SETTINGS, read_directory
    from headrace_migrate.model_repository import write_models
    from headrace_migrate.report import Report

    report = Report(str(path))
    if path.suffix == ".mar":
        from headrace_migrate.torchserve_archives import read_archive  # it imports yaml, too

        model = read_archive(path, report)
        models = [] if model is None else [model]
    elif path.is_dir() and any([*path.glob(SETTINGS), *path.glob(f"*/{SETTINGS}")]):
        models = read_directory(path, report)
    else:
        return None
    if target is not None and models:
        write_models(target, models)
    return report


def _write(target: Path, text: str) -> None:
    """Write ``text`` to the new file ``target``. Raises `BadInput`."""
    from headrace_migrate.report import BadInput

    try:
        with target.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise BadInput(f"{target} cannot be written: {error.strerror or error}") from error
