"""Why a model is not loaded, in Triton's words (docs/spec/behaviours.md section 5.3)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headrace.errors import HeadraceError, InternalError, InvalidArgument, LoadError, OperatorError, summary
from headrace.models.repository import Entry

log = logging.getLogger(__name__)


def poll_failure(name: str, reason: str = "", *, is_override: bool = False) -> HeadraceError:
    """``name`` is not there or its config is wrong; what is behind it follows, where there is more to say.

    It is the caller's fault if the caller brought what is wrong, and the server's otherwise.
    """
    text = f"failed to load '{name}', failed to poll from model repository" + (reason and f": {reason}")
    return InvalidArgument(text) if is_override else LoadError(text)


def versions_failure(entry: Entry, failed: Mapping[int, HeadraceError]) -> OperatorError:
    """Versions could not be loaded: one clause for each."""
    clauses = "".join(f"version {n} is at UNAVAILABLE state: {reason(error, entry)};\n" for n, error in failed.items())
    return OperatorError(f"load failed for model '{entry.name}': {clauses}")


def reason(error: HeadraceError, entry: Entry) -> str:
    """``error`` as the index shows it."""
    return f"{error.code.value}: {entry.hide(error.message)}"


def unexpected(error: Exception) -> HeadraceError:
    """The error to be told for one that no backend should have let through."""
    log.error("unexpected error while loading", exc_info=error)
    failure = InternalError(summary(error))
    failure.__cause__ = error
    return failure
