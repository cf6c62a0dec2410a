"""The executions of an instance, by a callable that the session creates at load.

Measured for two f32[1, 16] inputs and two outputs on the CPU: a signature of ``tf.saved_model.load`` takes 240 us,
``Session.run`` and ``Session.make_callable`` 80, and this, whose operators run on the calling thread, 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headrace import BackendError, BytesTensor, Code, Instance, LoadError, Model, Tensors, dtypes
from headrace_engines import Graph
from headrace_tf.tensorflow_process import reword
from headrace_tf.tensorflow_session import OpenSession, SessionPool


class TensorFlowInstance(Instance):
    """Runs a session with NumPy arrays on both sides. Outputs are fresh for every call."""

    def __init__(self, model: Model, opened: OpenSession, pool: SessionPool) -> None:
        from tensorflow.core.protobuf import config_pb2

        graph, config = opened.graph, model.config
        infos = {**graph.graph.inputs, **graph.graph.optional}
        self._inputs = tuple(graph.inputs)
        self._defaults = {name: graph.defaults[name] for name in graph.graph.optional}
        configured = Graph.of_config(config).outputs
        self._outputs = tuple(configured)
        self._string_inputs = [n for n, name in enumerate(self._inputs) if infos[name].datatype is dtypes.BYTES]
        self._scalar_inputs = [n for n, name in enumerate(self._inputs) if not infos[name].shape]
        self._scalar_outputs: Mapping[str, tuple[int, ...]] = {
            name: configured[name].shape for name in self._outputs if not graph.graph.outputs[name].shape
        }
        options = config_pb2.CallableOptions()
        options.feed.extend(graph.inputs.values())
        options.fetch.extend(graph.outputs[name] for name in self._outputs)
        has_pool = model.parameters.inter_threads or model.parameters.per_session_threads
        compiles = config.optimization.graph.level > 0  # in the midst of an execution, for seconds
        self.any_thread = model.device.kind == "cpu" and not (has_pool or compiles or opened.repeats)
        self._pool, self._opened, self._device = pool, opened, model.device
        try:
            # The implementation of Session.make_callable, which has no options.
            self._call: Callable[..., list[Any]] = opened.session._make_callable_from_options(options)
        except Exception as error:  # TensorFlow's own
            raise LoadError(f"unable to load model '{model.name}': '{graph.path}': {reword(error)}") from error

    def execute(self, inputs: Tensors) -> Tensors:
        if self._defaults:
            inputs = {**self._defaults, **inputs}
        feed: list[Any] = [inputs[name] for name in self._inputs]
        for index in self._string_inputs:
            if isinstance(feed[index], BytesTensor):  # and not a default
                feed[index] = feed[index].to_objects()
        for index in self._scalar_inputs:
            feed[index] = feed[index].reshape(())
        try:
            results = self._call(*feed)
        except Exception as error:  # TensorFlow's own
            raise BackendError(reword(error), Code.INTERNAL) from error
        outputs = dict(zip(self._outputs, results, strict=True))
        for name, dims in self._scalar_outputs.items():
            outputs[name] = np.asarray(outputs[name]).reshape(dims)
        return outputs

    def close(self) -> None:
        del self._call
        self._pool.release(self._device, self._opened)
