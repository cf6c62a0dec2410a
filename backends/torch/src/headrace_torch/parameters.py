"""The parameters of a model for PyTorch. Source: docs/spec/behaviours.md section 10.3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace import ConfigError, Model, ModelConfig, one_line, parse_parameters

#: The values of ``AUTOCAST``; empty computes in the model's own types.
AUTOCAST = ("", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one model for PyTorch. For a thread count of 0, Headrace chooses."""

    #: Record nothing for gradients. ``false`` is for models that compute gradients.
    inference_mode: bool = field(default=True, metadata={"key": "INFERENCE_MODE"})
    #: Run TorchScript without its optimiser: the first requests are faster, the others may be slower.
    disable_optimized_execution: bool = field(default=False, metadata={"key": "DISABLE_OPTIMIZED_EXECUTION"})
    disable_cudnn: bool = field(default=False, metadata={"key": "DISABLE_CUDNN"})
    #: Instances of a version on the same device share one module, so its weights are in memory once. They may run it at
    #: the same time. The default is true on the CPU if that is safe (`headrace_torch.weight_sharing`).
    enable_weight_sharing: bool | None = field(default=None, metadata={"key": "ENABLE_WEIGHT_SHARING"})
    #: Give unused memory of a GPU back after every execution.
    enable_cache_cleaning: bool = field(default=False, metadata={"key": "ENABLE_CACHE_CLEANING"})
    #: Threads within an operator. 0: the cores of this process divided among the CPU instances, all but one if there is
    #: one instance.
    intra_op_thread_count: int = field(default=0, metadata={"key": "INTRA_OP_THREAD_COUNT"})
    #: Threads across operators, for the whole process; the first model that sets it decides.
    inter_op_thread_count: int = field(default=0, metadata={"key": "INTER_OP_THREAD_COUNT"})
    #: Mixed precision: ``bfloat16`` or ``float16`` for the operators that PyTorch lists as safe.
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
        parse_compile_options(self.torch_compile, self.trust)
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
        """Threads within an operator by either name. For 0, Headrace chooses."""
        return self.intra_op_thread_count or self.num_threads

    @property
    def threads_across(self) -> int:
        """Threads across operators by either name. For 0, PyTorch's own number applies."""
        return self.inter_op_thread_count or self.num_interop_threads


#: The end of an error about something that needs trust.
HOW_TO_TRUST = "if you trust who made it, set the model's parameter 'trust' to 'true'"


def is_trusted(model: Model) -> bool:
    """True if ``model`` may do more than compute. Raises `ConfigError` if a load request sets ``trust``."""
    if model.parameters.trust:
        model.refuse_if_sent("parameter 'trust'", "parameters['trust']")
    return bool(model.parameters.trust)


def trusted_file(config: ModelConfig) -> str:
    """Return the file that may run code because of ``trust``; empty without it. Raises `ConfigError`."""
    is_code = parse_parameters(Parameters, config.parameters).trust
    return f"{config.default_model_filename or 'its file'} (parameter 'trust')" if is_code else ""


COMPILE_KEY = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
#: The arguments of ``torch.compile`` except the model: the types of each in JSON, and their names in errors.
#: Source: docs/spec/behaviours.md section 10.3, and the signature of ``torch.compile``.
_COMPILE_OPTIONS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "fullgraph": ((bool,), "true or false"),
    "dynamic": ((bool, type(None)), "true, false or null"),
    "backend": ((str,), "text"),
    "mode": ((str, type(None)), "text or null"),
    "options": ((dict, type(None)), "an object or null"),
    "disable": ((bool,), "true or false"),
}


def parse_compile_options(text: str, trust: bool) -> dict[str, Any] | None:
    """Return the arguments of ``torch.compile`` in the JSON ``text``; None, for no compilation, if it is empty.

    Values of ``options`` that are text or lists may name commands, libraries and files, and ``trace`` writes files:
    these need ``trust``. Needs no PyTorch. Raises `ConfigError` naming the key, the value and the rule.
    """
    if not text.strip():
        return None
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _compile_error(f"is no JSON: {error}: '{one_line(text)[:200]}'") from None
    if not isinstance(options, dict):
        raise _compile_error(f"is '{one_line(text)[:200]}', expected a JSON object with {', '.join(_COMPILE_OPTIONS)}")
    for key, value in options.items():
        if key == "model":
            raise _compile_error("has 'model': 'model' is not an optional parameter for 'torch.compile'")
        if key not in _COMPILE_OPTIONS:
            raise _compile_error(
                f"has '{one_line(key)[:100]}', which torch.compile does not take; known: {', '.join(_COMPILE_OPTIONS)}"
            )
        types, expected = _COMPILE_OPTIONS[key]
        if not isinstance(value, types):
            raise _compile_error(f"has '{key}': {json.dumps(value)[:100]}, expected {expected}")
    if options.get("mode") is not None and options.get("options") is not None:
        raise _compile_error("has 'mode' and 'options', of which torch.compile takes one")
    for key, value in (options.get("options") or {}).items():
        if not trust and (key.startswith("trace") or not isinstance(value, (bool, int, float, type(None)))):
            raise _compile_error(
                f"has the option '{one_line(key)[:100]}', which may name files or commands: that needs the model's "
                "parameter 'trust' to be 'true'"
            )
    return options


def _compile_error(problem: str) -> ConfigError:
    return ConfigError(f"parameter '{COMPILE_KEY}' {problem}", field=f"parameters[{COMPILE_KEY!r}]")
