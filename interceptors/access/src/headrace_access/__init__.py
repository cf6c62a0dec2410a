"""Access keys for Headrace: who may do what with which models, over every protocol.

::

    headrace keys add access.json alice --models 'digits*'
    headrace serve --access-keys=access.json ...

::

    AccessControl   the interceptor: reads the key of a caller, and decides     (access_interceptor)
    KeyFile         principals, their keys and what they are allowed            (key_file)
    KeyFileWatcher  the key file of a server, which follows changes             (key_file_watcher)
    headrace keys   adds, lists, revokes and checks keys                        (keys_command)
"""

from __future__ import annotations

from headrace import Command, Interceptor, OptionGroup, hookimpl
from headrace_access.access_interceptor import AccessControl
from headrace_access.key_options import AccessOptions
from headrace_access.keys_command import AccessKeys

__all__ = ["AccessControl", "AccessKeys", "AccessOptions"]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [AccessOptions]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [AccessControl]


@hookimpl
def register_commands() -> list[type[Command]]:
    return [AccessKeys]
