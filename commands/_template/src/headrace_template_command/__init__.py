"""The command ``headrace template``: lists the backends that the models of a repository need."""

from __future__ import annotations

import argparse
import sys

from headrace import Command, HeadraceError, Inspector, ServerOptions, draw_table, hookimpl


class Template(Command):
    name = "template"
    help = "list the backends that models need"
    synopsis = "<repository>"
    example = "headrace template models"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("repository", help="a directory that holds one directory per model")

    def run(self, arguments: argparse.Namespace) -> int:
        try:
            with Inspector(ServerOptions(model_repository=(arguments.repository,))) as inspector:
                rows = [(name, _backend_of(name, inspector)) for name in inspector.models()]
        except HeadraceError as error:
            print(error.message, file=sys.stderr)
            return 1
        print(draw_table(("Model", "Backend"), rows), end="")
        return 0


def _backend_of(name: str, inspector: Inspector) -> str:
    """Return the backend that the model's config names; empty if the file formats decide. Raises `HeadraceError`."""
    with inspector.open(name) as model:
        config = model.read()
    return config.backend or config.platform


@hookimpl
def register_commands() -> list[type[Command]]:
    return [Template]
