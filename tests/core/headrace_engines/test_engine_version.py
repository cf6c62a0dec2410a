"""The versions of an engine that a backend supports."""

from __future__ import annotations

import pytest

from headrace import LoadError
from headrace_engines import check_engine_version

SUPPORTED = ((1, 9), (2, 0))
REASON = "toy {} is installed; backend 'played' supports versions from 1.9 up to, and without, 2.0"


@pytest.mark.parametrize("version", ["1.9", "1.9.0rc1", "1.10.3+cpu", "1.99"])
def test_a_supported_version_passes(version: str) -> None:
    check_engine_version("toy", "played", version, SUPPORTED)


@pytest.mark.parametrize("version", ["1.8.9", "2.0", "2.0.0rc1", "0.10", "10.0", "dev"])
def test_another_version_is_refused_with_both(version: str) -> None:
    with pytest.raises(LoadError) as refused:
        check_engine_version("toy", "played", version, SUPPORTED)
    assert refused.value.message == REASON.format(version)


def test_the_error_ends_with_the_command_that_installs() -> None:
    with pytest.raises(LoadError) as refused:
        check_engine_version("toy", "played", "2.1", SUPPORTED, "pip install 'toy<2'")
    assert refused.value.message == REASON.format("2.1") + "; run: pip install 'toy<2'"
