"""The command ``headrace bundle``: server, backends and models in one archive, or the wheels for another machine."""

from __future__ import annotations

from headrace import Command, hookimpl
from headrace_bundle.bundle_command import BundleCommand

__all__ = ["BundleCommand", "register_commands"]


@hookimpl
def register_commands() -> list[type[Command]]:
    return [BundleCommand]
