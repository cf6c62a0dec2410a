"""The words of each ``--security-profile``, which are the defaults of its server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: The flag that chooses a profile.
FLAG = "--security-profile"
#: The words of each profile. Words of the command line override them.
PROFILES: dict[str, tuple[str, ...]] = {
    "public": (
        "--model-control-mode=none",
        "--model-files-from=none",
        "--allow-client-shm=false",
        "--allow-external-links=false",
        "--log-verbose=0",
        "--metrics-address=127.0.0.1",
        "--security-closed=model-repository,trace,logging,shared-memory,reflection",
    ),
}


def with_profile(words: Sequence[str]) -> list[str]:
    """Return the words of the profile that ``words`` name, followed by ``words``. An unknown name is reported by the
    options."""
    return [*PROFILES.get(_profile(words), ()), *words]


def _profile(words: Sequence[str]) -> str:
    """Return the name of the profile in ``words``; the last one counts."""
    name = "none"
    for word, following in pairwise([*words, ""]):
        if word == FLAG:
            name = following
        elif word.startswith(f"{FLAG}="):
            name = word.partition("=")[2]
    return name
