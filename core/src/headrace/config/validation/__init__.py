"""Checks a derived and completed config against every rule of docs/spec/behaviours.md section 4.

A load raises the first of the `problems`; ``headrace check`` lists all of them. Each module has the rules of one part
of the config and yields each `Problem` with Triton's text. Only ``paths`` reads the disk, and only if it has ``files``.
The rules of a scheduler's part of the config are its own (`headrace.FullScheduler.check_config`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.validation import instances, io, model, paths
from headrace.config.validation.model import check_caching
from headrace.config.validation.shared import Problem, check_enums, check_shape

__all__ = ["Problem", "check_caching", "check_shape", "problems"]


def early(
    config: ModelConfig, *, complete: bool, needs_backend: bool = True, scheduled: Iterable[Problem] = ()
) -> list[Problem]:
    """Return the problems that Triton finds before it reads the versions and calls the backend, in its order.

    If the config is ``complete``, because no backend will complete it, its inputs and outputs are checked, too.
    ``needs_backend`` is False if the scheduler works without a backend. ``scheduled`` are the problems that the
    scheduler finds. They are not read if an enum value is invalid.
    """
    unknown = list(check_enums(config))
    if unknown:
        return unknown
    problems = [
        *model.check(config, needs_backend),
        *model.check_batching(config),
        *scheduled,
        *model.check_ensemble(config),
        *check_caching(config),
        *model.check_metrics(config),
    ]
    if complete:
        return [*problems, *io.check(config), *io.check_ragged(config)]
    if config.max_batch_size == 0:  # the backend may still set the batch size
        return [problem for problem in problems if "preferred_batch_size" not in problem.field]
    return problems


def problems(
    config: ModelConfig,
    *,
    gpus: Sequence[int] = (),
    files: Path | None = None,
    needs_backend: bool = True,
    scheduled: Iterable[Problem] = (),
) -> list[Problem]:
    """Return every problem of ``config``, in Triton's order of checking.

    ``gpus`` are the ids of the GPUs that instances may use. If ``files``, the model's directory, is given, a batching
    library that the config names must be in it. ``needs_backend`` and ``scheduled`` are as for `early`.
    """
    unknown = list(check_enums(config))
    if unknown:  # the other checks need valid enum values
        return unknown
    return [
        *model.check(config, needs_backend),
        *model.check_batching(config),
        *scheduled,
        *model.check_ensemble(config),
        *check_caching(config),
        *model.check_metrics(config),
        *instances.check(config, gpus),
        *io.check(config),
        *io.check_ragged(config),
        *instances.check_warmup(config),
        *paths.check(config, files),
    ]
