"""Fixtures of the tests of ensembles: a repository in a short notation, and its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from headrace import Server
from headrace_testing.serving import serve

#: Name, data type and dims of a tensor.
IO = tuple[str, str, str]


def tensors(field: str, names: str, dims: str = "2", datatype: str = "FP32") -> str:
    """``names``, separated by blanks; one with ``?`` behind it is optional."""
    return "".join(
        f'{field} {{ name: "{name.rstrip("?")}" data_type: TYPE_{datatype} dims: [{dims}] '
        f"{'optional: true ' if name.endswith('?') else ''}}} "
        for name in names.split()
    )


def identity(inputs: str = "a", outputs: str = "b", batch: int = 8, **io: str) -> str:
    """The config of an identity model."""
    return f'backend: "identity" max_batch_size: {batch} {both(inputs, outputs, **io)}'


def both(inputs: str, outputs: str, **io: str) -> str:
    return tensors("input", inputs, **io) + tensors("output", outputs, **io)


def step(model: str, reads: str, writes: str, version: int = -1) -> str:
    """A step, as ``step("m", "a=x", "b=y")``: the model's tensor, and the ensemble's."""
    maps = [
        f'{field} {{ key: "{pair.partition("=")[0]}" value: "{pair.partition("=")[2]}" }}'
        for field, pairs in (("input_map", reads), ("output_map", writes))
        for pair in pairs.split()
    ]
    return f'step {{ model_name: "{model}" model_version: {version} {" ".join(maps)} }} '


def ensemble(
    steps: Sequence[str], inputs: str = "x", outputs: str = "y", batch: int = 8, more: str = "", **io: str
) -> str:
    """The config of an ensemble."""
    return (
        f'platform: "ensemble" max_batch_size: {batch} {both(inputs, outputs, **io)}'
        f"ensemble_scheduling {{ {' '.join(steps)} }} {more}"
    )


class Write(Protocol):
    def __call__(self, name: str, config: str, versions: Sequence[int] = ..., files: dict[str, str] = ...) -> Path: ...


@pytest.fixture
def write(headrace_repository: Path) -> Write:
    """Adds a model to the repository, or replaces it."""

    def write(name: str, config: str, versions: Sequence[int] = (1,), files: dict[str, str] | None = None) -> Path:
        folder = headrace_repository / name
        for version in versions:
            (folder / str(version)).mkdir(parents=True, exist_ok=True)
        for path, text in (files or {}).items():
            (folder / path).write_text(text)
        (folder / "config.pbtxt").write_text(config)
        return folder

    return write


@pytest.fixture
def run(headrace_repository: Path) -> Iterator[Callable[..., Server]]:
    """``run(**options)`` starts a server over the repository, without ports."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serve(headrace_repository, **options))


#: Options of a server that starts even if models fail.
LENIENT: dict[str, Any] = {"strict_readiness": False, "exit_on_error": False}
EXPLICIT: dict[str, Any] = {"model_control_mode": "explicit", **LENIENT}
