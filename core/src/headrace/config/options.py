"""The options of a server: one frozen dataclass, one field per flag (docs/spec/behaviours.md section 8).

The name of a field is that of the flag, with underscores. Its default is Triton's. Deprecated spellings of a flag have
no field: the command line converts them. ``headrace_cli.flags`` describes each flag, `headrace.config.support` has
which of them have an effect, and ``docs/flags.md`` shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from headrace.config.option_groups import G, OptionGroup
from headrace.distributions import need

LogFormat: TypeAlias = Literal["default", "ISO8601", "json"]
ControlMode: TypeAlias = Literal["none", "poll", "explicit"]
CompressionLevel: TypeAlias = Literal["none", "low", "medium", "high"]
#: The clients that may send files with a load request, over HTTP and gRPC.
ModelFilesFrom: TypeAlias = Literal["loopback", "any", "none"]

#: The categories that ``--http-restricted-api`` and ``--grpc-restricted-protocol`` can restrict.
RESTRICTED_CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)

#: The prefix of the configured key in the metadata of a restricted gRPC call.
GRPC_RESTRICTED_PREFIX = "triton-grpc-protocol-"


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header that a restricted request must carry, and its exact value, which is a secret.

    ``header`` is complete: for gRPC it includes `GRPC_RESTRICTED_PREFIX`.
    """

    header: str
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RateLimitResource:
    """``count`` units of resource ``name`` on GPU ``device``, or on each device if None."""

    name: str
    count: int
    device: int | None = None


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """One ``--trace-config``; ``mode`` is ``triton``, ``opentelemetry``, or empty for a global."""

    mode: str
    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """All options of a server. They do not change after the start."""

    # Server and logging
    id: str = "triton"
    exit_timeout_secs: int = 30
    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_format: LogFormat = "default"
    log_file: str = ""
    #: The distributions or entry points whose plugins are loaded; None loads all that are installed.
    plugins: tuple[str, ...] | None = None
    #: The option groups of plugins (hook ``add_options``) that are set; the server adds the others with defaults.
    plugin_options: Sequence[OptionGroup] = ()

    # Model repository
    model_repository: tuple[str, ...] = ()
    exit_on_error: bool = True
    disable_auto_complete_config: bool = False
    strict_readiness: bool = True
    model_control_mode: ControlMode = "none"
    repository_poll_secs: int = 15
    load_model: tuple[str, ...] = ()
    #: If True, a model with a parameter that its backend does not know is refused.
    strict_parameters: bool = False
    model_config_name: str = ""
    model_files_from: ModelFilesFrom = "loopback"
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    model_namespacing: bool = False
    #: Links of a model may lead out of the model repository.
    allow_external_links: bool = False
    #: Reload models when their files change; those of the Python backend stay in the server's process.
    dev: bool = False
    enable_peer_access: bool = True

    #: The number of server processes that share the ports; 0 for a single server. ``headrace serve`` starts them.
    workers: int = 0

    # HTTP; the limits also apply to the metrics port; 0 is no limit
    allow_http: bool = True
    http_address: str = "0.0.0.0"
    http_port: int = 8000
    reuse_http_port: bool = False
    http_header_forward_pattern: str = ""
    http_thread_count: int = 8
    http_max_input_size: int = 64 * 1024 * 1024
    http_max_connections: int = 4096
    http_max_held_size: int = 0
    http_header_timeout_secs: int = 60
    http_keepalive_timeout_secs: int = 620
    http_min_data_rate: int = 1024
    http_stall_timeout_secs: int = 30
    #: For each restricted category, the header that permits a request.
    http_restricted_api: Mapping[str, Restriction] = field(default_factory=dict)
    #: The host of HTTP: ``native``, or the name of a frontend that a plugin has for it.
    http_server: str = "native"

    # gRPC; times in milliseconds; 0 means no limit for the connection ages
    allow_grpc: bool = True
    grpc_address: str = "0.0.0.0"
    grpc_port: int = 8001
    reuse_grpc_port: bool = False
    grpc_header_forward_pattern: str = ""
    grpc_infer_thread_count: int = 2
    grpc_infer_allocation_pool_size: int = 8
    grpc_max_response_pool_size: int = 2**31 - 1
    grpc_use_ssl: bool = False
    grpc_use_ssl_mutual: bool = False
    grpc_server_cert: str = ""
    grpc_server_key: str = ""
    grpc_root_cert: str = ""
    grpc_infer_response_compression_level: CompressionLevel = "none"
    #: A compressed message may decompress to this many bytes; to more only within a fixed ratio of its own size.
    grpc_max_decompressed_size: int = 64 * 1024 * 1024
    grpc_keepalive_time: int = 7_200_000
    grpc_keepalive_timeout: int = 20_000
    grpc_keepalive_permit_without_calls: bool = False
    grpc_http2_max_pings_without_data: int = 2
    grpc_http2_min_recv_ping_interval_without_data: int = 300_000
    grpc_http2_max_ping_strikes: int = 2
    grpc_max_connection_age: int = 0
    grpc_max_connection_age_grace: int = 0
    #: Limits of the memory that one client may occupy, in bytes per connection and per stream, and of the time.
    grpc_max_unread_size: int = 512 * 1024 * 1024
    grpc_max_stream_size: int = 64 * 1024 * 1024
    grpc_max_received_size: int = 512 * 1024 * 1024
    #: The limit for all connections together; 0 is a quarter of the memory.
    grpc_max_held_size: int = 0
    grpc_unread_timeout_secs: int = 300
    grpc_message_timeout_secs: int = 60
    #: For each restricted category, the metadata key, prefix included, that permits a call.
    grpc_restricted_protocol: Mapping[str, Restriction] = field(default_factory=dict)
    #: The host of gRPC, likewise.
    grpc_server: str = "native"

    # SageMaker and Vertex AI
    allow_sagemaker: bool = False
    sagemaker_port: int = 8080
    sagemaker_safe_port_range: tuple[int, int] | None = None
    sagemaker_thread_count: int = 8
    allow_vertex_ai: bool = False
    vertex_ai_port: int = 8080
    vertex_ai_thread_count: int = 8
    vertex_ai_default_model: str = ""

    # Metrics; an empty address is replaced by that of HTTP
    allow_metrics: bool = True
    allow_gpu_metrics: bool = True
    allow_cpu_metrics: bool = True
    metrics_address: str = ""
    metrics_port: int = 8002
    metrics_interval_ms: int = 2000
    metrics_config: Mapping[str, str] = field(default_factory=dict)

    # Tracing
    trace_config: tuple[TraceSetting, ...] = ()

    # Cache, backends, agents, rate limiter, memory
    cache_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cache_directory: str = "/opt/tritonserver/caches"
    backend_directory: str = "/opt/tritonserver/backends"
    #: The settings of each backend, by its name; "" has the settings for every backend.
    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    repoagent_directory: str = "/opt/tritonserver/repoagents"
    rate_limit: Literal["off", "execution_count"] = "off"
    rate_limit_resource: tuple[RateLimitResource, ...] = ()
    pinned_memory_pool_byte_size: int = 256 * 1024 * 1024
    #: Bytes, by GPU.
    cuda_memory_pool_byte_size: Mapping[int, int] = field(default_factory=dict)
    cuda_virtual_address_size: Mapping[int, int] = field(default_factory=dict)
    min_supported_compute_capability: float = 0.0
    buffer_manager_thread_count: int = 0
    host_policy: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: By GPU, the fraction of its memory beyond which a load is refused.
    model_load_gpu_limit: Mapping[int, float] = field(default_factory=dict)
    allow_client_shm: bool = False

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
