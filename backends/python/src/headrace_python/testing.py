"""A pytest plugin: the fixture ``python_model``.

Loaded at the start of every pytest run where `headrace_python` is installed, so it imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from headrace_python.harness import PythonModel


class OpenModel(Protocol):
    """The type of the fixture ``python_model``."""

    def __call__(
        self,
        source: str | Path | type[Any],
        *,
        config: Mapping[str, Any] | None = None,
        parameters: Mapping[str, str] | None = None,
        models: Mapping[str, Callable[..., Any]] | None = None,
        auto_complete: bool = True,
        timeout_s: float = 10.0,
    ) -> PythonModel:
        """Yield a model, loaded in this process without a server; finalize it at the end of the test.

        - ``source``: a ``model.py``, a directory of a version or a model, or a class.
        - ``config``: fields of the config, as JSON. A ``config.pbtxt`` in the model's directory is read first, and
          ``auto_complete_config`` completes it.
        - ``parameters``: the config's parameters.
        - ``models``: the models for BLS: functions by name, from inputs to outputs.

        Raises `LoadError`.
        """


@pytest.fixture
def python_model() -> Iterator[OpenModel]:
    """``python_model(source, config=None, parameters=None, models=None)``: see `OpenModel`."""
    from headrace_python.harness import open_model

    opened: list[PythonModel] = []

    def open_one(source: str | Path | type[Any], **options: Any) -> PythonModel:
        opened.append(open_model(source if isinstance(source, type) else Path(source), **options))
        return opened[-1]

    yield open_one
    for model in opened:
        model.finalize()
