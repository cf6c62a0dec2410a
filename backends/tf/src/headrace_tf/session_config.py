"""The session's ``ConfigProto``, from a model's config, parameters and backend options.

Source: docs/spec/behaviours.md section 10.4.
"""

from __future__ import annotations

from typing import Any

from headrace import ConfigError, LoadError, Model, one_line
from headrace_engines import threads_per_instance
from headrace_tf.parameters import DEFAULT_CPU_INSTANCES, BackendOptions
from headrace_tf.tensorflow_process import has_xla_on_cpu, log, threads_of_process

_TENSORRT, _GPU_IO, _MIXED_PRECISION = "tensorrt", "gpu_io", "auto_mixed_precision"


def session_config(tensorflow: Any, model: Model, options: BackendOptions) -> Any:
    """Raises `ConfigError` for accelerators that there are not, and `LoadError` for one that is no more."""
    parameters = model.parameters
    config = tensorflow.compat.v1.ConfigProto()
    default = threads_per_instance(model.config, DEFAULT_CPU_INSTANCES)
    config.intra_op_parallelism_threads = threads_of_process(parameters.intra_threads, default, model.name)
    config.use_per_session_threads = parameters.per_session_threads
    # Below 0 the instance's own thread runs all operators: no hop, and as many busy threads as instances.
    config.inter_op_parallelism_threads = parameters.inter_threads or (0 if parameters.per_session_threads else -1)
    config.gpu_options.per_process_gpu_memory_fraction = options.gpu_memory_fraction
    config.gpu_options.allow_growth = options.allow_growth
    config.allow_soft_placement = options.allow_soft_placement
    if model.device.kind == "cpu":
        config.device_count["GPU"] = 0
    _compile(tensorflow, model, config)
    _accelerate(model, config)
    return config


def _compile(tensorflow: Any, model: Model, config: Any) -> None:
    """Set XLA by ``optimization.graph.level``: on from 1, more for more, off below 0, the default for 0."""
    level = model.config.optimization.graph.level
    levels = tensorflow.compat.v1.OptimizerOptions
    if not level:
        return
    chosen = levels.OFF if level < 0 else levels.ON_1 if level == 1 else levels.ON_2
    config.graph_options.optimizer_options.global_jit_level = chosen
    if level > 0 and model.device.kind == "cpu" and not has_xla_on_cpu():
        log.warning(
            "model '%s': optimization.graph.level has no effect, because this program imported TensorFlow before, and "
            "without TF_XLA_FLAGS=--tf_xla_cpu_global_jit",
            model.name,
        )


def _accelerate(model: Model, config: Any) -> None:
    accelerators = model.config.optimization.execution_accelerators
    if accelerators.cpu_execution_accelerator:
        raise ConfigError("CPU Execution Accelerator is not supported in TensorFlow backend")
    names = {each.name for each in accelerators.gpu_execution_accelerator}
    for name in sorted(names - {_TENSORRT, _GPU_IO, _MIXED_PRECISION}):
        raise ConfigError(f"unknown Execution Accelerator '{one_line(name)}' is requested")
    if {_TENSORRT, _MIXED_PRECISION} <= names:
        raise ConfigError("Auto mixed precision can not be set with TFTRT optimization")
    if names and model.device.kind == "cpu":
        log.warning(
            "model '%s': GPU Execution Accelerator will be ignored for model instance on CPU",
            model.name,
            extra={"model": model.name},
        )
    elif _TENSORRT in names:
        raise LoadError(
            f"model '{model.name}' asks for the accelerator 'tensorrt', which TensorFlow's packages no longer have "
            "(since 2.18): leave it out, or export the model for the backend 'tensorrt'"
        )
    elif _MIXED_PRECISION in names:
        config.graph_options.rewrite_options.auto_mixed_precision = 1  # RewriterConfig.ON
