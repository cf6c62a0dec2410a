"""Checks a derived and completed config against every rule of behaviours.md section 4.

`validate` raises the first problem, as a load does; `problems` lists them all, as ``penstock
check`` does. Each module holds the rules of one noun and yields `Problem` in Triton's words.
Only ``paths`` looks at the disk, and only when ``files`` is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.config.model_config_pb2 import ModelConfig
from penstock.config.validation import (
    batching,
    ensembles,
    enums,
    instances,
    io,
    metrics,
    model,
    paths,
    ragged,
    sequences,
    states,
    warmup,
)
from penstock.config.validation.problem import Problem
from penstock.errors import ConfigError

__all__ = ["Problem", "problems", "validate"]


def validate(config: ModelConfig, *, gpus: Sequence[int] = (), files: Path | None = None) -> None:
    """Raise `ConfigError` with the first problem of ``config``, and its code; see `problems`."""
    for problem in _check(config, gpus, files):
        raise ConfigError(problem.message, problem.code)


def problems(config: ModelConfig, *, gpus: Sequence[int] = (), files: Path | None = None) -> list[Problem]:
    """Every problem of ``config``, in Triton's order of checking.

    ``gpus`` are the ids of the GPUs that instances may use. With ``files``, the model's directory,
    files that the config names are followed through symbolic links and must stay inside it.
    """
    return list(_check(config, gpus, files))


def _check(config: ModelConfig, gpus: Sequence[int], files: Path | None) -> Iterator[Problem]:
    unknown = list(enums.check(config))
    yield from unknown
    if unknown:  # the other checks take the names of enum values for granted
        return
    yield from model.check(config)
    yield from batching.check(config)
    yield from sequences.check(config)
    yield from states.check(config)
    yield from ensembles.check(config)
    yield from model.check_caching(config)
    yield from metrics.check(config)
    yield from instances.check(config, gpus)
    yield from io.check(config)
    yield from ragged.check(config)
    yield from warmup.check(config)
    yield from paths.check(config, files)
