"""The parameters of a model for PyTorch. Source: docs/spec/behaviours.md section 10.3."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace import ConfigError, Model, ModelConfig, one_line, parse_parameters
from headrace_torch.compile_options import parse_options

#: The values of ``AUTOCAST``; empty computes in the model's own types.
AUTOCAST = ("", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one model for PyTorch. A thread count of 0 lets Headrace choose."""

    #: Nothing is recorded for gradients. ``false`` leaves that on, for models that take gradients themselves.
    inference_mode: bool = field(default=True, metadata={"key": "INFERENCE_MODE"})
    #: Run TorchScript without its optimiser: the first requests are faster, the others may be slower.
    disable_optimized_execution: bool = field(default=False, metadata={"key": "DISABLE_OPTIMIZED_EXECUTION"})
    disable_cudnn: bool = field(default=False, metadata={"key": "DISABLE_CUDNN"})
    #: Instances of a version on the same device run one module, whose weights are then in memory once, and may run it
    #: at the same time. By default, those on the CPU do if that is safe (`headrace_torch.weight_sharing`).
    enable_weight_sharing: bool | None = field(default=None, metadata={"key": "ENABLE_WEIGHT_SHARING"})
    #: Give unused memory of a GPU back after every execution.
    enable_cache_cleaning: bool = field(default=False, metadata={"key": "ENABLE_CACHE_CLEANING"})
    #: Threads within an operator. 0: the cores of this process divided among the CPU instances, all but one if there is
    #: one instance.
    intra_op_thread_count: int = field(default=0, metadata={"key": "INTRA_OP_THREAD_COUNT"})
    #: Threads across operators, for the whole process; the first model that sets it decides.
    inter_op_thread_count: int = field(default=0, metadata={"key": "INTER_OP_THREAD_COUNT"})
    #: Mixed precision: ``bfloat16`` or ``float16`` where PyTorch holds that to be safe.
    autocast: str = field(default="", metadata={"key": "AUTOCAST"})
    #: `intra_op_thread_count` and `inter_op_thread_count`, as Triton calls them for modules in a ``model.py``.
    num_threads: int = field(default=0, metadata={"key": "NUM_THREADS"})
    num_interop_threads: int = field(default=0, metadata={"key": "NUM_INTEROP_THREADS"})
    #: How TorchScript runs; PyTorch's defaults unless set. For the whole process; the first model that sets it decides.
    enable_jit_executor: bool | None = field(default=None, metadata={"key": "ENABLE_JIT_EXECUTOR"})
    enable_jit_profiling: bool | None = field(default=None, metadata={"key": "ENABLE_JIT_PROFILING"})
    enable_tensor_fuser: bool | None = field(default=None, metadata={"key": "ENABLE_TENSOR_FUSER"})
    #: Compile a module in a ``model.py`` with these arguments of ``torch.compile``, as JSON; empty does not compile.
    torch_compile: str = field(default="", metadata={"key": "TORCH_COMPILE_OPTIONAL_PARAMETERS"})
    #: On a GPU, a batch is copied and starts its kernels while another one computes.
    overlap: bool = True
    #: Execute a model a few times with zeros before it is ready, if that has no visible effect.
    warm_up: bool = True
    #: Load a file that could run code, write files or reach other libraries. Only for files from people you trust.
    trust: bool = False

    def __post_init__(self) -> None:
        parse_options(self.torch_compile, self.trust)
        if self.autocast not in AUTOCAST:
            raise ConfigError(
                f"parameter 'AUTOCAST' is '{one_line(self.autocast)}', expected bfloat16 or float16",
                field="parameters['AUTOCAST']",
            )
        for key, value in (
            ("INTRA_OP_THREAD_COUNT", self.intra_op_thread_count),
            ("INTER_OP_THREAD_COUNT", self.inter_op_thread_count),
            ("NUM_THREADS", self.num_threads),
            ("NUM_INTEROP_THREADS", self.num_interop_threads),
        ):
            if value < 0:
                raise ConfigError(
                    f"parameter '{key}' is {value}, but a number of threads is 0 or more", field=f"parameters[{key!r}]"
                )

    @property
    def threads_within(self) -> int:
        """Threads within an operator by either name; 0 lets Headrace choose."""
        return self.intra_op_thread_count or self.num_threads

    @property
    def threads_across(self) -> int:
        """Threads across operators by either name; 0 leaves PyTorch's own number."""
        return self.inter_op_thread_count or self.num_interop_threads


#: The end of an error about something that needs trust.
HOW_TO_TRUST = "if you trust who made it, set the model's parameter 'trust' to 'true'"


def is_trusted(model: Model) -> bool:
    """True if ``model`` may do more than compute. Raises `ConfigError` if a load request says so."""
    if model.parameters.trust:
        model.refuse_if_sent("parameter 'trust'", "parameters['trust']")
    return bool(model.parameters.trust)


def trusted_file(config: ModelConfig) -> str:
    """Return the file that may run code because of ``trust``; empty without it. Raises `ConfigError`."""
    is_code = parse_parameters(Parameters, config.parameters).trust
    return f"{config.default_model_filename or 'its file'} (parameter 'trust')" if is_code else ""
