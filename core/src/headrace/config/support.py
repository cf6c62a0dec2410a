"""The table of all options in `ServerOptions`, and the effect that each has today.

An option is built; or it is accepted without effect, and the server logs that if it is set; or it is refused if it is
set, because a server that ignores it would be unsafe or wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from enum import Enum

from headrace.config.options import ServerOptions
from headrace.distributions import missing
from headrace.errors import ConfigError


class FlagState(Enum):
    """The effect of setting an option. The values are the words in ``docs/flags.md``."""

    BUILT = "built"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Support:
    """The state of an option; ``reason`` completes "--flag is refused: ..."."""

    state: FlagState
    reason: str = ""


#: Triton's error for a client that uses shared memory. With the flag, a server without the extension does not start.
NO_CLIENT_SHM = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
#: Options that need an extension, by the name that it announces, or a frontend, by its name.
NEEDS = {
    "allow_client_shm": "system_shared_memory",
    "allow_sagemaker": "sagemaker",
    "allow_vertex_ai": "vertex_ai",
    "trace_config": "trace",
}
#: Fields that only frontends read, which check them when they are chosen.
_OF_FRONTENDS = ("allow_client_shm", "allow_sagemaker", "allow_vertex_ai")

_BUILT = Support(FlagState.BUILT)


def _no_effect(reason: str) -> Support:
    return Support(FlagState.NO_EFFECT, reason)


def _refused(reason: str) -> Support:
    return Support(FlagState.REFUSED, reason)


_ONE_LOOP = _no_effect("one event loop serves all connections")
_PLUGINS = "caches and agents are Python plugins found by entry point, not shared libraries"

SUPPORT = dict.fromkeys((field.name for field in fields(ServerOptions)), _BUILT) | {
    "model_namespacing": _refused("namespaces are not built yet; models of one name would be refused instead of kept"),
    "enable_peer_access": _no_effect("tensors do not move between GPUs"),
    "http_thread_count": _ONE_LOOP,
    "grpc_infer_thread_count": _ONE_LOOP,
    "grpc_infer_allocation_pool_size": _no_effect("requests are not pooled"),
    "grpc_max_response_pool_size": _no_effect("responses are not pooled"),
    "sagemaker_thread_count": _ONE_LOOP,
    "vertex_ai_thread_count": _ONE_LOOP,
    "cache_directory": _no_effect(_PLUGINS),
    "repoagent_directory": _no_effect(_PLUGINS),
    "cuda_memory_pool_byte_size": _no_effect("the engines keep their own pools"),
    "cuda_virtual_address_size": _no_effect("sequence state on the GPU is not built yet"),
    "min_supported_compute_capability": _no_effect("the engines decide which GPUs they support"),
    "buffer_manager_thread_count": _no_effect("tensors are not copied by a thread pool"),
    "host_policy": _no_effect("instances are not bound to NUMA nodes or cores"),
}

_DEFAULTS = ServerOptions()


def flag(name: str) -> str:
    """Return the flag of the field ``name``."""
    return "--" + name.replace("_", "-")


def refuse(options: ServerOptions) -> None:
    """Raise `ConfigError` for the first option that is set and refused."""
    for name, reason in _set_to(FlagState.REFUSED, options):
        raise ConfigError(f"{flag(name)} is refused: {reason}")


def refuse_without(announced: Collection[str], options: ServerOptions, names: Iterable[str] = _OF_FRONTENDS) -> None:
    """Raise `ConfigError` for the first of the options ``names`` that is set and needs a part that is not
    ``announced``."""
    for name in names:
        extension = NEEDS[name]
        if getattr(options, name) != getattr(_DEFAULTS, name) and extension not in announced:
            raise ConfigError(f"{flag(name)} is refused: it needs an extension. {missing('extension', extension)}")


def without_effect(options: ServerOptions) -> list[str]:
    """Return one line for each option that is set and has no effect."""
    return [f"{flag(name)} has no effect: {reason}" for name, reason in _set_to(FlagState.NO_EFFECT, options)]


def _set_to(state: FlagState, options: ServerOptions) -> Iterator[tuple[str, str]]:
    for name, support in SUPPORT.items():
        if support.state is state and getattr(options, name) != getattr(_DEFAULTS, name):
            yield name, support.reason
