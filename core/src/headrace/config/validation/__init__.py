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
    ensembles,
    instances,
    io,
    model,
    paths,
    sequences,
)
from headrace.config.validation.model import check_caching
from headrace.config.validation.shared import Problem, check_enums

__all__ = ["Problem", "check_caching", "problems"]


def early(config: ModelConfig, *, complete: bool, needs_backend: bool = True) -> list[Problem]:
    """The problems that Triton finds before it looks at versions and asks the backend, in its order.

    A config that is ``complete``, because nobody will complete it, must have its inputs and outputs in order, too.
    One that does not ``needs_backend`` has a scheduler that does without.
    """
    unknown = list(check_enums(config))
    if unknown:
        return unknown
    found = [
        *model.check(config, needs_backend),
        *model.check_batching(config),
        *sequences.check(config),
        *ensembles.check(config),
        *check_caching(config),
        *model.check_metrics(config),
    ]
    if complete:
        return [*found, *io.check(config), *io.check_ragged(config)]
    if config.max_batch_size == 0:  # the backend may yet say how large batches are
        return [problem for problem in found if "preferred_batch_size" not in problem.field]
    return found


def problems(
    config: ModelConfig, *, gpus: Sequence[int] = (), files: Path | None = None, needs_backend: bool = True
) -> list[Problem]:
    """Every problem of ``config``, in Triton's order of checking.

    ``gpus`` are the ids of the GPUs that instances may use. With ``files``, the model's directory,
    a batching library that the config names must be in it. ``needs_backend`` as for `early`.
    """
    unknown = list(check_enums(config))
    if unknown:  # the other checks take the names of enum values for granted
        return unknown
    return [
        *model.check(config, needs_backend),
        *model.check_batching(config),
        *sequences.check(config),
        *sequences.check_states(config),
        *ensembles.check(config),
        *check_caching(config),
        *model.check_metrics(config),
        *instances.check(config, gpus),
        *io.check(config),
        *io.check_ragged(config),
        *instances.check_warmup(config),
        *paths.check(config, files),
    ]
