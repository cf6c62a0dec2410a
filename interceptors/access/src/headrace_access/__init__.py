"""Access control for Headrace: the operations that each principal may do on each model, over every protocol.

::

    headrace keys add access.json alice --models 'digits*'
    headrace serve --access-keys=access.json ...

::

    AccessControl    the interceptor: authenticates and authorizes callers             (access_interceptor)
    KeyFile          principals, keys, roles and issuers of an access file             (key_file)
    AccessRule       the operations that are allowed on models                         (access_rules)
    Issuer           an accepted issuer of tokens, and the meaning of its claims       (issuers)
    KeySet           the public keys of an issuer, from a file or an address           (key_sets)
    Tokens           verifies tokens, and caches them until they expire                (tokens)
    VerificationLimiter  limits the CPU time of unknown tokens                         (verification_limiter)
    PermitCache      caches decisions until the file changes                           (permit_cache)
    KeyFileWatcher   reads the access file again when it changes                       (key_file_watcher)
    headrace keys    changes the file, and prints the rights of a key or a token       (keys_command, key_actions)
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
