"""Access for Headrace: who may do what with which models, over every protocol.

::

    headrace keys add access.json alice --models 'digits*'
    headrace serve --access-keys=access.json ...

::

    AccessControl    the interceptor: reads who a caller is, and decides               (access_interceptor)
    KeyFile          principals, keys, roles and issuers of an access file             (key_file)
    AccessRule       which operations are allowed on which models                      (access_rules)
    Issuer           whose tokens are accepted, and what their claims mean             (issuers)
    KeySet           the public keys of an issuer, from a file or an address           (key_sets)
    Tokens           verifies tokens, and keeps them until they expire                 (tokens)
    VerificationPace one unknown token in each turn of the event loop               (verification_pace)
    KeptPermits      what was decided for a credential, until something changes        (kept_permits)
    KeyFileWatcher   the access file of a server, which follows changes                (key_file_watcher)
    headrace keys    changes the file, and explains what a key or a token may do       (keys_command, key_actions)
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
