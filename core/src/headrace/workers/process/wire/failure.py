"""What is raised when the other process is beyond trust."""

from __future__ import annotations


class WireError(Exception):
    """The peer has sent something that no version of the schema allows."""
