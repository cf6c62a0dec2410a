"""Fixtures of the tests of routers: a repository in a short notation, and its server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from google.protobuf import text_format

from headrace import ModelConfig


def tensors(dims: str = "-1", datatype: str = "FP32") -> str:
    return (
        f'input {{ name: "x" data_type: TYPE_{datatype} dims: [{dims}] }} '
        f'output {{ name: "y" data_type: TYPE_{datatype} dims: [{dims}] }} '
    )


def identity(batch: int = 8, more: str = "", dims: str = "-1", datatype: str = "FP32") -> str:
    """The config of an identity model."""
    return f'backend: "identity" max_batch_size: {batch} {tensors(dims, datatype)} {more}'


def router(targets: str, more: str = "", **parameters: object) -> str:
    """The config of a router, with its parameters ``scheduler.*``."""
    parameters_of = {"scheduler": "router", "scheduler.targets": targets}
    parameters_of |= {f"scheduler.{name}": str(value) for name, value in parameters.items()}
    return more + "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }} ' for name, value in parameters_of.items()
    )


def config(text: str, name: str = "r") -> ModelConfig:
    return text_format.Parse(text, ModelConfig(name=name))


def write(repository: Path, name: str, text: str, versions: Sequence[int] = (1,)) -> None:
    """Add a model to the repository, or replace it."""
    for version in versions:
        (repository / name / str(version)).mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(text)
