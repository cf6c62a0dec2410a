"""The CUDA driver as ctypes calls it: an error code becomes an error with the function's name."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from headrace_engines import CudaError, CudaLibrary


class PlayedLibrary:
    """A library in which every function answers ``code``."""

    def __init__(self, code: int, missing: str = "") -> None:
        self._code, self._missing = code, missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(f"undefined symbol: {name}")

        def function(*arguments: object) -> int:
            return self._code

        return function


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (PlayedLibrary(100), "^cuInit failed with CUresult 100$"),
        (
            PlayedLibrary(0, "cuIpcOpenMemHandle_v2"),
            "^the CUDA driver is too old: undefined symbol: cuIpcOpenMemHandle",
        ),
        (None, "^there is no CUDA driver$"),
    ],
)
def test_an_unusable_driver_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, library: Any, words: str
) -> None:
    def load(name: str) -> Any:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(ctypes, "PyDLL", load)
    with pytest.raises(CudaError, match=words):
        CudaLibrary()


def test_a_thread_uses_the_one_context_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, kind, lambda name: PlayedLibrary(0))
    driver = CudaLibrary()
    driver.use(0)
    with driver.using(0):
        pass
    assert driver.devices() == []
    assert driver.new_stream() == driver.stream(0) == 0


@pytest.mark.parametrize(("code", "is_for_a_capture"), [(900, True), (906, True), (2, False), (700, False)])
def test_a_refusal_for_a_capture_is_known(monkeypatch: pytest.MonkeyPatch, code: int, is_for_a_capture: bool) -> None:
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, kind, lambda name: PlayedLibrary(code))
    with pytest.raises(CudaError, match=f"CUresult {code}$") as refused:
        CudaLibrary()
    assert refused.value.is_for_a_capture is is_for_a_capture
    assert not CudaError("there is no CUDA driver").is_for_a_capture
