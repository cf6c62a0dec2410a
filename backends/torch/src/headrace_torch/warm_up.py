"""Executes a model with zeros before its first request, which would otherwise wait for PyTorch's one-time work.

TorchScript records shapes in the first execution and compiles for them in the second, which takes tens of milliseconds
each. Kernels are also loaded on first use. So an instance is executed a few times with zeros of the config's dims if
that has no visible effect: the model changes no state, draws no random numbers, and has no loop without a limit.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from headrace import HeadraceError, Instance, Model, ModelConfig, Tensors, dtypes

log = logging.getLogger("headrace.pytorch")

#: Executions with a single row: TorchScript records shapes in the first, compiles in the second, and runs the third.
_SINGLES = 3
#: Rows of one more execution, since kernels differ from those for one row; at most ``max_batch_size``.
_ROWS = 8
#: The size of dims that vary.
_VARYING = 8
#: No execution begins later, so that a large model loads in time.
_LONGEST_S = 2.0


def execute_zeros(instance: Instance, model: Model) -> None:
    """Execute ``instance`` of ``model`` with zeros. A model that fails for zeros is served nevertheless."""
    began = time.monotonic()
    config, name = model.config, model.name
    most = config.max_batch_size
    count = 0
    for rows in [*[min(most, 1)] * _SINGLES, *([min(most, _ROWS)] if most > 1 else [])]:
        zeros, why = zero_inputs(config, rows, _VARYING)
        if why:
            log.debug("model '%s' is not executed before its first request: %s", name, why)
            return
        if time.monotonic() - began > _LONGEST_S:
            break
        try:
            instance.execute(zeros)
        except HeadraceError as error:
            log.info("model '%s' fails for zeros, so the first requests may be slow: %s", name, error.message)
            return
        count += 1
    text = "model '%s', instance '%s': %d executions before the first request, %.2f s"
    log.debug(text, name, model.instance_name, count, time.monotonic() - began)


def zero_inputs(config: ModelConfig, rows: int, varying: int = 0) -> tuple[Tensors, str]:
    """Return zeros for every input of ``config``, with ``rows`` if it batches; and the obstacle, if there is one.

    ``varying`` is the size of variable dims. If it is 0, they are an obstacle.
    """
    if config.HasField("sequence_batching"):
        return {}, "it keeps state"
    found = {}
    for each in config.input:
        dims = tuple(each.reshape.shape) if each.HasField("reshape") else tuple(each.dims)
        kind = dtypes.BY_CONFIG_VALUE[each.data_type]
        if any(dim < 1 for dim in dims) and not varying:
            return {}, f"the dims of input '{each.name}' vary"
        if kind is dtypes.BYTES:
            return {}, f"input '{each.name}' is strings"
        sizes = tuple(varying if dim < 0 else dim for dim in dims)
        found[each.name] = np.zeros((rows, *sizes) if config.max_batch_size else sizes, kind.numpy)
    return found, ""
