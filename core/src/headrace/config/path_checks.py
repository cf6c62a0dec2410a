"""Checks that the name of a file stays in its directory, by the name alone (docs/spec/security.md C2, C3).

The author or sender of a config chooses these names. Links in the repository are checked when a model is loaded, by
`headrace.storage.local_storage`.
"""

from __future__ import annotations


def why_path_leaves(name: str, levels: int = 0) -> str:
    """Return why ``name`` leaves its directory; empty if it does not. It may reach ``levels`` directories above it."""
    if "\0" in name:
        return "it contains NUL"
    if "\\" in name:
        return "it contains a backslash"
    if name.startswith("/"):
        return "it is absolute"
    if _climbs(name, levels):
        return "it climbs out with '..'"
    return ""


def one_line(name: str) -> str:
    """Return ``name`` with control characters escaped, so that it is one line in a log."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _climbs(name: str, levels: int) -> bool:
    """True if ``name`` passes through a directory more than ``levels`` above the one in which it starts."""
    for part in name.split("/"):
        levels += -1 if part == ".." else part not in ("", ".")
        if levels < 0:
            return True
    return False
