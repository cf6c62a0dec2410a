"""The options of a server: one frozen dataclass, one field per flag (docs/spec/behaviours.md section 8).

It is made of the classes of `headrace.config.option_parts`, one for each reader.

The name of a field is that of the flag, with underscores. Its default is Triton's. Deprecated spellings of a flag have
no field: the command line converts them. ``headrace_cli.flags`` describes each flag, `headrace.config.support` has
which of them have an effect, and ``docs/flags.md`` shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.option_groups import G, OptionGroup
from headrace.config.option_parts import (
    CloudOptions,
    ConfigOptions,
    ControlOptions,
    DeviceOptions,
    DirectoryOptions,
    GrpcConnectionOptions,
    GrpcLimitOptions,
    GrpcOptions,
    GrpcPoolOptions,
    GrpcTlsOptions,
    HttpLimitOptions,
    HttpOptions,
    HttpTlsOptions,
    LogOptions,
    MemoryOptions,
    MetricsOptions,
    RepositoryOptions,
    SchedulingOptions,
    TraceSetting,
)
from headrace.distributions import need


@dataclass(frozen=True, kw_only=True)
class ServerOptions(
    DirectoryOptions,
    DeviceOptions,
    SchedulingOptions,
    MetricsOptions,
    CloudOptions,
    GrpcOptions,
    GrpcPoolOptions,
    GrpcConnectionOptions,
    GrpcLimitOptions,
    GrpcTlsOptions,
    HttpOptions,
    HttpLimitOptions,
    HttpTlsOptions,
    MemoryOptions,
    ConfigOptions,
    ControlOptions,
    RepositoryOptions,
    LogOptions,
):
    """All options of a server. They do not change after the start."""

    id: str = "triton"
    exit_timeout_secs: int = 30
    exit_on_error: bool = True
    strict_readiness: bool = True
    #: The number of server processes that share the ports; 0 for a single server. ``headrace serve`` starts them.
    workers: int = 0
    #: The distributions or entry points whose plugins are loaded; None loads all that are installed.
    plugins: tuple[str, ...] | None = None
    #: The option groups of plugins (hook ``add_options``) that are set; the server adds the others with defaults.
    plugin_options: Sequence[OptionGroup] = ()
    trace_config: tuple[TraceSetting, ...] = ()

    def group(self, kind: type[G]) -> G:
        """Return the options of a plugin. Raises `LookupError` for a group that no plugin has added."""
        for group in self.plugin_options:
            if type(group) is kind:
                return group
        raise LookupError(f"no plugin has added the options {kind.__name__}, by the hook add_options")

    def __post_init__(self) -> None:
        """Apply the rules by which one option determines another (docs/spec/behaviours.md section 8)."""
        self._set("model_repository", tuple(sorted(set(self.model_repository))))
        self._set("exit_timeout_secs", max(self.exit_timeout_secs, 0))
        self._set("model_load_thread_count", max(self.model_load_thread_count, 1))
        self._set("model_load_retry_count", max(self.model_load_retry_count, 0))
        self._set("metrics_address", self.metrics_address or self.http_address)
        self._set("allow_gpu_metrics", self.allow_gpu_metrics and self.allow_metrics)
        self._set("allow_cpu_metrics", self.allow_cpu_metrics and self.allow_metrics)
        self._set("grpc_use_ssl", self.grpc_use_ssl or self.grpc_use_ssl_mutual)
        self._set("http_use_ssl", self.http_use_ssl or self.http_use_ssl_mutual)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def header_pattern(pattern: str) -> Callable[[str], Any]:
    """Return a function that searches for ``pattern`` in the name of a header, ignoring case unless it has ``(?-i)``.

    The syntax is RE2's, as in Triton. A search takes time linear in the length of the name. Raises `ValueError` that
    names the pattern if it is malformed. The library is imported only here, since few servers have a pattern; if it is
    missing, the `ConfigError` explains how to install it.
    """
    need("re2", "A pattern of headers to forward")
    import re2

    options = re2.Options()
    options.log_errors = False  # RE2 would print them on stderr, into the log
    options.case_sensitive = False
    try:
        search: Callable[[str], Any] = re2.compile(pattern, options).search
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"invalid regular expression '{pattern}' (RE2): {text}") from None
    return search
