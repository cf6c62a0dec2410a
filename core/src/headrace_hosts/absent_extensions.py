"""The errors for Triton's extensions that are not installed.

Without the extension for shared memory, no region is ever registered (docs/spec/behaviours.md section 12.3).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, TypeAlias

from headrace.config.support import NO_CLIENT_SHM
from headrace.distributions import missing
from headrace.errors import HeadraceError, NotFound, Unsupported

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["system", "cuda"]


@cache
def note_absent(extension: str) -> None:
    """Log the distribution that has ``extension``, for which a caller has asked. Once per process."""
    text = "a caller asks for the extension '%s', which is not installed. %s"
    log.info(text, extension, missing("extension", extension))


def refuse_unknown_region(kind: Kind, name: str) -> None:
    """Raise `NotFound` if ``name`` is not empty: no region exists."""
    if name:
        raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")


def region_change_error() -> HeadraceError:
    """Return the error for registering or unregistering a region."""
    return Unsupported(NO_CLIENT_SHM)
