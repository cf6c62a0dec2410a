"""Ensembles for Headrace: a graph of models that answers as one, as the config's ``ensemble_scheduling`` draws it.

::

    platform: "ensemble"
    ensemble_scheduling {
      step [
        { model_name: "resize" model_version: -1
          input_map { key: "image" value: "photo" } output_map { key: "resized" value: "small" } },
        { model_name: "classify" model_version: -1
          input_map { key: "pixels" value: "small" } output_map { key: "scores" value: "classes" } }
      ]
    }

A step runs as soon as all its inputs exist, in parallel with others. Only steps that the requested outputs need run.
Tensors pass between steps without a copy. Source: docs/spec/behaviours.md section 6.6.
"""

from __future__ import annotations

from headrace import Scheduler, hookimpl
from headrace_ensemble.scheduler import EnsembleScheduler

__all__ = ["EnsembleScheduler"]


@hookimpl
def register_schedulers() -> list[type[Scheduler]]:
    return [EnsembleScheduler]
