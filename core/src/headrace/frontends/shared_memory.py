"""Clients' shared memory is not served yet: no region is ever registered (docs/spec/behaviours.md section 12.3)."""

from __future__ import annotations

from typing import Literal, TypeAlias

from headrace.config.support import NO_CLIENT_SHM
from headrace.errors import HeadraceError, NotFound, Unsupported

Kind: TypeAlias = Literal["system", "cuda"]


def require_status(kind: Kind, name: str) -> None:
    """Raise `NotFound` unless the status of all regions is asked for, of which there are none."""
    if name:
        raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")


def refuse_change() -> HeadraceError:
    """Why no region can be registered or taken back."""
    return Unsupported(NO_CLIENT_SHM)


def no_region(name: str) -> HeadraceError:
    """Why a tensor cannot lie in the region ``name``."""
    return NotFound(f"Unable to find shared memory region: '{name}'")
