"""Checks a derived and completed config against every rule of docs/spec/behaviours.md section 4.

A load raises the first of the `problems`; ``headrace check`` lists them all. Each module holds the
rules of one noun and yields `Problem` in Triton's words. Only ``paths`` looks at the disk, and only
when ``files`` is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.validation import (
    dynamic_batching,
    ensembles,
    enums,
    implicit_state,
    instances,
    io,
    model,
    model_warmup,
    paths,
    ragged,
    sequences,
)
from headrace.config.validation.problem import Problem

__all__ = ["Problem", "problems"]


def early(config: ModelConfig, *, complete: bool) -> list[Problem]:
    """The problems that Triton finds before it looks at versions and asks the backend, in its order.

    A config that is ``complete``, because nobody will complete it, must have its inputs and outputs in order, too.
    """
    unknown = list(enums.check(config))
    if unknown:
        return unknown
    found = [
        *model.check(config),
        *dynamic_batching.check(config),
        *sequences.check(config),
        *ensembles.check(config),
        *model.check_caching(config),
        *model.check_metrics(config),
    ]
    if complete:
        return [*found, *io.check(config), *ragged.check(config)]
    if config.max_batch_size == 0:  # the backend may yet say how large batches are
        return [problem for problem in found if "preferred_batch_size" not in problem.field]
    return found


def problems(config: ModelConfig, *, gpus: Sequence[int] = (), files: Path | None = None) -> list[Problem]:
    """Every problem of ``config``, in Triton's order of checking.

    ``gpus`` are the ids of the GPUs that instances may use. With ``files``, the model's directory,
    a batching library that the config names must be in it.
    """
    unknown = list(enums.check(config))
    if unknown:  # the other checks take the names of enum values for granted
        return unknown
    return [
        *model.check(config),
        *dynamic_batching.check(config),
        *sequences.check(config),
        *implicit_state.check(config),
        *ensembles.check(config),
        *model.check_caching(config),
        *model.check_metrics(config),
        *instances.check(config, gpus),
        *io.check(config),
        *ragged.check(config),
        *model_warmup.check(config),
        *paths.check(config, files),
    ]
