"""The versions of an engine that a backend supports."""

from __future__ import annotations

import re
from typing import TypeAlias

from headrace import LoadError, one_line

#: Versions from the first one up to, and without, the second, each as major and minor number.
Versions: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


def check_engine_version(engine: str, backend: str, version: str, supported: Versions, install: str = "") -> None:
    """Raise `LoadError` if ``version`` of ``engine`` is not among those that ``backend`` supports.

    The error names both, and ends with the command ``install``, if there is one.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else None
    least, below = supported
    if found is None or not least <= found < below:
        raise LoadError(
            f"{engine} {one_line(version)} is installed; backend '{backend}' supports versions from "
            f"{least[0]}.{least[1]} up to, and without, {below[0]}.{below[1]}{install and f'; run: {install}'}"
        )
