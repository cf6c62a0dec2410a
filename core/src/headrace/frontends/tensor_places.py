"""Tensors that lie elsewhere than in the message."""

from __future__ import annotations

from headrace.errors import HeadraceError, NotFound


def no_region(name: str) -> HeadraceError:
    """Why a tensor cannot lie in the region ``name``."""
    return NotFound(f"Unable to find shared memory region: '{name}'")
