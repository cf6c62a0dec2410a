"""The distributions of backends and schedulers that can be installed, and the extras of this distribution.

Errors about a missing one contain the command that installs it.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from importlib.util import find_spec

from headrace.errors import ConfigError

#: The extra of this distribution that installs a module.
EXTRAS = {"ml_dtypes": "bf16", "re2": "re2"}

_WRITTEN = {
    "onnxruntime": "headrace-onnx",
    "openvino": "headrace-openvino",
    "python": "headrace-python",
    "pytorch": "headrace-torch",
    "tensorflow": "headrace-tf",
    "tensorrt": "headrace-tensorrt",
}
#: The planned names of distributions for parts of Triton that Headrace does not have yet.
_PLANNED = {name: f"headrace-{name}" for name in ("dali", "fil", "tensorrtllm", "vllm")}
_AGENTS = {name: f"headrace-{name}" for name in ("archive", "checksum", "decrypt")}
_COMMANDS = {
    **dict.fromkeys(("check", "explain", "index", "load", "unload"), "headrace-inspect"),
    "encrypt": "headrace-decrypt",
    "batch": "headrace-batch",
    "service": "headrace-service",
    "trace": "headrace-trace",
    "traffic": "headrace-router",
}
_CONTROL_MODES = {"on-demand": "headrace-on-demand"}
_CACHES = {"redis": "headrace-redis"}
_HOSTS = {"grpcio": "headrace-grpcio", "hypercorn": "headrace-hypercorn"}
_STORAGES = dict.fromkeys(("as", "gs", "s3"), "headrace-cloud")
#: Extensions of the protocol, which add paths and RPCs.
_EXTENSIONS = {
    "events": "headrace-events",
    "generate": "headrace-generate",
    "logging": "headrace-logging",
    "trace": "headrace-trace",
    "sequence": "headrace-sequence",
    "traffic": "headrace-router",
    **dict.fromkeys(("sagemaker", "vertex_ai"), "headrace-cloud-routes"),
    **dict.fromkeys(("shm", "system_shared_memory", "cuda_shared_memory"), "headrace-shm"),
}
#: Schedulers in distributions of their own, by the field of the config or the parameter ``scheduler``.
_SCHEDULERS = {
    "ensemble_scheduling": "headrace-ensemble",
    "router": "headrace-router",
    "sequence_batching": "headrace-sequence",
}


def installs(module: str) -> str:
    """Return the command that installs ``module``, one of `EXTRAS`."""
    return f"pip install 'headrace[{EXTRAS[module]}]'"


def need(module: str, who: str) -> None:
    """Raise `ConfigError`, with the command that installs it, if ``module``, one of `EXTRAS`, is not installed.

    Blocks: it searches files.
    """
    if find_spec(module) is None:
        raise ConfigError(f"{who} needs what is not installed here: {installs(module)}")


def is_known(kind: str, name: str) -> bool:
    """True if ``name`` is a part that exists, or is planned, and not a typing error."""
    known = {
        "backend": _WRITTEN | _PLANNED,
        "scheduler": _SCHEDULERS,
        "agent": _AGENTS,
        "cache": _CACHES,
        "command": _COMMANDS,
        "frontend": _HOSTS,
        "storage": _STORAGES,
        "extension": _EXTENSIONS,
    }
    return name in known.get(kind, ())


def meant(kind: str, name: str, installed: Collection[str]) -> str:
    """Return the part of ``kind`` that ``name`` is probably a typing error of; empty if there is none.

    For a backend, the name of its distribution (``onnx``) and a platform (``onnxruntime_onnx``) count, too.
    """
    if is_known(kind, name):
        return ""
    lower = name.lower()
    known = sorted({*installed, *{"backend": _WRITTEN, "frontend": _HOSTS}.get(kind, ())})
    near = [part for part in known if _WRITTEN.get(part) == f"headrace-{lower}" or lower.startswith(part)]
    near += [part for part in known if len(lower) > 2 and lower in part] + get_close_matches(lower, known, 1)
    return next(iter(near), "")


def missing(kind: str, name: str) -> str:
    """Return the hint for a missing part ``name`` of ``kind``; empty if it is unknown."""
    if kind == "backend":
        return _backend_missing(name)
    if kind == "scheduler" and name in _SCHEDULERS:
        own = _SCHEDULERS[name]
        return f"Models with '{name}' need the distribution {own}: pip install {own};"
    if kind == "cache" and name in _CACHES:
        return f"The cache '{name}' comes with the distribution {_CACHES[name]}: pip install {_CACHES[name]};"
    if kind == "command" and name in _COMMANDS:
        return f"The command '{name}' comes with the distribution {_COMMANDS[name]}: pip install {_COMMANDS[name]};"
    if kind == "frontend" and name in _HOSTS:
        return f"The host '{name}' comes with the distribution {_HOSTS[name]}: pip install {_HOSTS[name]};"
    if kind == "agent" and name in _AGENTS:
        return f"The agent '{name}' comes with the distribution {_AGENTS[name]}: pip install {_AGENTS[name]};"
    if kind == "control mode" and name in _CONTROL_MODES:
        return f"It comes with the distribution {_CONTROL_MODES[name]}: pip install {_CONTROL_MODES[name]}"
    if kind == "extension" and name in _EXTENSIONS:
        return f"It comes with the distribution {_EXTENSIONS[name]}: pip install {_EXTENSIONS[name]}"
    if kind == "storage" and name in _STORAGES:
        return f"Repositories in '{name}' need the distribution {_STORAGES[name]}: pip install {_STORAGES[name]};"
    return ""


def _backend_missing(name: str) -> str:
    """Return the hint for a missing backend: Triton's text, then ours."""
    text = f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
    if name in _WRITTEN:
        return f"{text} It comes with the distribution {_WRITTEN[name]}: pip install {_WRITTEN[name]};"
    if name in _PLANNED:
        return f"{text} Its distribution, {_PLANNED[name]}, is not published yet;"
    return text
