"""A text that deploys Triton: its report and the new text."""

from __future__ import annotations

from pathlib import Path

from headrace_migrate.container_parts import ContainerParts
from headrace_migrate.dockerfile_syntax import read_instructions
from headrace_migrate.dockerfiles import Dockerfiles
from headrace_migrate.manifests import Manifests
from headrace_migrate.report import BadInput, Report
from headrace_migrate.repository_models import review_models
from headrace_migrate.server_commands import ServerCommands
from headrace_migrate.shell_scripts import ShellScripts
from headrace_migrate.sources import SourceKind, kind_of
from headrace_migrate.text_edits import TextEdits
from headrace_migrate.torchserve_properties import read_properties
from headrace_migrate.yaml_documents import documents

#: The image in a new manifest, as docs/containers.md builds it.
IMAGE = "headrace"


def migrate_text(
    text: str, report: Report, image: str = "", kind: SourceKind | None = None, *, reads_models: bool = False
) -> None:
    """Fill ``report`` from ``text``, and set its new text. ``kind`` is None if the content decides.

    If ``reads_models``, the local model repositories in command lines are read, too.
    Raises `BadInput`.
    """
    try:
        _read(text, report, image, kind or kind_of(text, report.source), reads_models)
    except BadInput as error:
        if not error.line:
            raise
        raise BadInput(f"{report.source}:{error.line}: {error}") from None


def _read(text: str, report: Report, image: str, kind: SourceKind, reads_models: bool) -> None:
    if kind is SourceKind.PROPERTIES:
        report.new, report.shows_new = read_properties(text, report), True
        return
    edits = TextEdits(text)
    commands, parts = ServerCommands(report, edits), ContainerParts(report, edits, image or IMAGE)
    if kind is SourceKind.YAML:
        manifests = Manifests(report, commands, parts)
        manifests.read(documents(text, report.source))
        found = manifests.found
    elif kind is SourceKind.DOCKERFILE:
        Dockerfiles(report, commands, parts, image).read(list(read_instructions(text)))
        found = bool(report.findings)
    else:
        ShellScripts(commands, parts).read(text)
        found, report.shows_new = commands.found > 0, True
    if not found:
        raise BadInput(f"{report.source}: nothing of Triton is in this {kind.value}")
    for repository in dict.fromkeys(commands.repositories) if reads_models and kind is SourceKind.SHELL else ():
        if "://" not in repository and Path(repository).is_dir():
            review_models(Path(repository), report)
    report.new = edits.result()
