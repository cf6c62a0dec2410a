"""``--security-profile``: the conditions for the start of a server with a profile."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.errors import ConfigError
from headrace.server import Server
from headrace_cli import command_line
from headrace_cli.security.profile_words import FLAG, PROFILES
from headrace_cli.security.review import SecurityReview
from headrace_cli.security.security_options import SecurityOptions

log = logging.getLogger("headrace.security")


def enforce(server: Server, words: Sequence[str]) -> None:
    """Check the conditions of the profile of ``server``. ``words`` are the command line, behind those of the profile.

    Logs a warning for each thing that a flag opens. Raises `ConfigError` for an operation that is open without a flag.
    """
    profile = server.options.group(SecurityOptions).profile
    set_flags = _set_flags(words[len(PROFILES[profile]) :])
    is_refused = False
    for each in SecurityReview(server).exposures():
        opening = [flag for flag in each.flags if flag in set_flags]
        if each.is_open and opening:
            log.warning("%s=%s: %s opens: %s", FLAG, profile, ", ".join(opening), each)
        elif each.is_open and each.flags:
            is_refused = True
            log.error("%s=%s: %s; give %s", FLAG, profile, each, each.remedy)
        elif each.is_open:  # a file or a model, which the operator may be unable to change
            log.warning("%s=%s: %s; %s", FLAG, profile, each, each.remedy)
    if is_refused:
        raise ConfigError(f"{FLAG}={profile} starts no server that is open to strangers; see the errors above")


def _set_flags(words: Sequence[str]) -> set[str]:
    """Return the flags in ``words`` by their whole names."""
    flags, rest = command_line.split(words)
    return {f"--{one.flag.name}" for one in flags} | {word.partition("=")[0] for word in rest if word.startswith("--")}
