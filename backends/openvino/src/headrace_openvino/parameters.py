"""The parameters of a model for OpenVINO.

Source: docs/spec/behaviours.md section 10.6.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace import ConfigError, one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one model for OpenVINO. A thread count of 0 is one that the config lacks."""

    #: The device of the model, by OpenVINO's name: ``CPU``, ``GPU``, ``NPU``, ``AUTO``, ``HETERO:GPU,CPU`` and so on.
    target_device: str = field(default="CPU", metadata={"key": "TARGET_DEVICE"})
    #: ``LATENCY`` or ``THROUGHPUT``; empty for OpenVINO's default.
    performance_hint: str = field(default="", metadata={"key": "PERFORMANCE_HINT"})
    #: Threads of all instances of a version together. 0: on the CPU the cores of this process.
    inference_num_threads: int = field(default=0, metadata={"key": "INFERENCE_NUM_THREADS"})
    #: Threads that compile the model, on devices other than the CPU, which has no such setting. 0: OpenVINO chooses.
    compilation_num_threads: int = field(default=0, metadata={"key": "COMPILATION_NUM_THREADS"})
    #: True: operators may compute in BF16. False: the CPU computes in FP32.
    hint_bf16: bool = field(default=False, metadata={"key": "HINT_BF16"})
    #: Concurrent executions: a number, ``AUTO`` or ``NUMA``. If it is empty, OpenVINO chooses.
    num_streams: str = field(default="", metadata={"key": "NUM_STREAMS"})
    #: ``YES``: the batch axis is the file's. Otherwise one that is fixed at another number than
    #: ``max_batch_size`` is made variable.
    skip_dynamic_batchsize: bool = field(default=False, metadata={"key": "SKIP_OV_DYNAMIC_BATCHSIZE"})
    #: True: the graph's inputs get the dims of the config before it is compiled.
    reshape_io_layers: bool = field(default=False, metadata={"key": "RESHAPE_IO_LAYERS"})
    #: True: a batch smaller than the fixed one of the graph is filled up with zeros.
    enable_batch_padding: bool = field(default=False, metadata={"key": "ENABLE_BATCH_PADDING"})
    #: A library of operators for the CPU, in the version's directory or the model's.
    cpu_extension_path: str = field(default="", metadata={"key": "CPU_EXTENSION_PATH"})

    def __post_init__(self) -> None:
        if self.performance_hint not in ("", "LATENCY", "THROUGHPUT"):
            raise ConfigError(
                f"parameter 'PERFORMANCE_HINT' must be LATENCY or THROUGHPUT, got '{one_line(self.performance_hint)}'"
            )
        for key, value in (
            ("INFERENCE_NUM_THREADS", self.inference_num_threads),
            ("COMPILATION_NUM_THREADS", self.compilation_num_threads),
        ):
            if value < 0:
                raise ConfigError(f"parameter '{key}' must be 0 or more, got {value}")
        streams = self.num_streams
        if streams not in ("", "AUTO", "NUMA") and not (streams.isascii() and streams.isdigit() and int(streams) > 0):
            raise ConfigError(
                f"parameter 'NUM_STREAMS' must be a number above 0, AUTO or NUMA, got '{one_line(streams)}'"
            )
