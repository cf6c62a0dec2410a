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
    "llamacpp": "headrace-llamacpp",
    "onnxruntime": "headrace-onnx",
    "openvino": "headrace-openvino",
    "python": "headrace-python",
    "pytorch": "headrace-torch",
    "tensorflow": "headrace-tf",
    **{name: f"headrace-{name}" for name in ("tensorrt", "transformers", "vllm")},
}
#: The planned names of distributions for parts of Triton that Headrace does not have yet.
_PLANNED = {name: f"headrace-{name}" for name in ("dali", "fil", "tensorrtllm")}
_HOSTS = {"grpcio": "headrace-grpcio", "hypercorn": "headrace-hypercorn"}

_PARTS = {
    "agent": {name: f"headrace-{name}" for name in ("archive", "checksum", "decrypt")},
    "backend": _WRITTEN,
    "cache": {"redis": "headrace-redis"},
    "command": {
        **dict.fromkeys(("check", "explain", "index", "load", "unload"), "headrace-inspect"),
        **{name: f"headrace-{name}" for name in ("batch", "bundle", "compare", "migrate", "ray", "service", "trace")},
        "encrypt": "headrace-decrypt",
        "keys": "headrace-access",
        "quotas": "headrace-quotas",
        "traffic": "headrace-router",
    },
    "control mode": {"on-demand": "headrace-on-demand"},
    # Extensions of the protocol, which add paths and RPCs.
    "extension": {
        **{name: f"headrace-{name}" for name in ("events", "generate", "logging", "sequence", "trace")},
        "traffic": "headrace-router",
        **dict.fromkeys(("sagemaker", "vertex_ai"), "headrace-cloud-routes"),
        **dict.fromkeys(("shm", "system_shared_memory", "cuda_shared_memory"), "headrace-shm"),
    },
    # By the words that the flags of a plugin begin with.
    "flag": {
        **{name: f"headrace-{name}" for name in ("access", "cloud", "dashboard", "on-demand", "openai", "openapi")},
        **{name: f"headrace-{name}" for name in ("otel", "router", "shm")},
        **dict.fromkeys(("access-log", "audit-log"), "headrace-logging"),
        "quota": "headrace-quotas",
    },
    "frontend": _HOSTS,
    # By the field of the config, or the parameter ``scheduler``.
    "scheduler": {
        "ensemble_scheduling": "headrace-ensemble",
        "router": "headrace-router",
        "sequence_batching": "headrace-sequence",
    },
    "storage": {**dict.fromkeys(("as", "gs", "s3"), "headrace-cloud"), "gguf": "headrace-llamacpp"},
}
#: The hint for a missing part, by its kind: ``{0}`` is its name, ``{1}`` its distribution.
_HINTS = {
    "agent": "The agent '{0}' comes with the distribution {1}: pip install {1};",
    "cache": "The cache '{0}' comes with the distribution {1}: pip install {1};",
    "command": "The command '{0}' comes with the distribution {1}: pip install {1};",
    **dict.fromkeys(("control mode", "extension", "flag"), "It comes with the distribution {1}: pip install {1}"),
    "frontend": "The host '{0}' comes with the distribution {1}: pip install {1};",
    "scheduler": "Models with '{0}' need the distribution {1}: pip install {1};",
    "storage": "Repositories in '{0}' need the distribution {1}: pip install {1};",
}


def installs(module: str) -> str:
    """Return the command that installs ``module``, one of `EXTRAS`."""
    return f"pip install 'headrace[{EXTRAS[module]}]'"


def need(module: str, who: str) -> None:
    """Raise `ConfigError`, with the command that installs it, if ``module``, one of `EXTRAS`, is not installed.

    Blocks: it searches files.
    """
    if find_spec(module) is None:
        raise ConfigError(f"{who} needs a package that is not installed: {installs(module)}")


def distribution_of(kind: str, name: str) -> str:
    """Return the distribution that brings the part ``name`` of ``kind``, such as "backend"; empty if there is none."""
    return _PARTS.get(kind, {}).get(name, "")


def is_known(kind: str, name: str) -> bool:
    """True if ``name`` is a part that exists, or is planned, and not a typing error."""
    return name in _PARTS.get(kind, ()) or (kind == "backend" and name in _PLANNED)


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
    own = distribution_of(kind, name)
    return _HINTS[kind].format(name, own) if own else ""


def _backend_missing(name: str) -> str:
    """Return the hint for a missing backend: Triton's text, then ours."""
    text = f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
    if name in _WRITTEN:
        return f"{text} It comes with the distribution {_WRITTEN[name]}: pip install {_WRITTEN[name]};"
    if name in _PLANNED:
        return f"{text} Its distribution, {_PLANNED[name]}, is not published yet;"
    return text
