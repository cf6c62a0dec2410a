"""Names of files that must stay in a directory, judged by the name alone (docs/spec/security.md C2, C3).

Whoever writes a config, or sends one, chooses names. Links are made by whoever keeps the
repository, and are judged when a model is loaded, by `headrace.storage.local_storage`.
"""

from __future__ import annotations


def why_path_leaves(name: str, levels: int = 0) -> str:
    """Why ``name`` leaves its directory; empty if it does not.

    ``levels`` is how many directories above it the name may reach.
    """
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
    """``name`` with control characters written out, so that it stays one line in a log."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _climbs(name: str, levels: int) -> bool:
    """Whether ``name`` passes more than ``levels`` directories above the one it starts in."""
    for part in name.split("/"):
        levels += -1 if part == ".." else part not in ("", ".")
        if levels < 0:
            return True
    return False
