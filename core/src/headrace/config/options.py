"""The options of a server: one frozen dataclass, one field per flag (docs/spec/behaviours.md section 8).

A field's name is the flag's with underscores, its default Triton's. Deprecated spellings have no
field of their own; the command line folds them into these. What each flag means stands in
``headrace.cli.flags``, whether it has an effect today in `headrace.config.support`, and both in
``docs/flags.md``.
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
HttpServer: TypeAlias = Literal["auto", "hypercorn", "native"]
#: Who may send files along with a load, over HTTP and gRPC.
ModelFilesFrom: TypeAlias = Literal["loopback", "any", "none"]
GrpcServer: TypeAlias = Literal["auto", "native", "grpcio"]

#: What ``--http-restricted-api`` and ``--grpc-restricted-protocol`` can restrict.
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

#: Stands before the configured key in the metadata of a restricted gRPC call.
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
    """Everything that a server can be told at start. Nothing here changes afterwards."""

    # Server and logging
    id: str = "triton"
    exit_timeout_secs: int = 30
    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_format: LogFormat = "default"
    log_file: str = ""
    #: Distributions or entry points whose plugins are used; None is all that are installed.
    plugins: tuple[str, ...] | None = None
    #: What the option groups of plugins (hook ``add_options``) are set to; a server fills in the others.
    plugin_options: Sequence[OptionGroup] = ()

    # Model repository
    model_repository: tuple[str, ...] = ()
    exit_on_error: bool = True
    disable_auto_complete_config: bool = False
    strict_readiness: bool = True
    model_control_mode: ControlMode = "none"
    repository_poll_secs: int = 15
    load_model: tuple[str, ...] = ()
    #: Refuse a parameter of a model that its backend does not know.
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

    #: Servers that share the ports, of which this is one; 0 for one that is alone. ``headrace serve`` starts so many.
    workers: int = 0

    # HTTP, and the limits of the metrics port, too; 0 is no limit
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
    #: Category to the header that unlocks it.
    http_restricted_api: Mapping[str, Restriction] = field(default_factory=dict)
    http_server: HttpServer = "auto"

    # gRPC; times in milliseconds, 0 is unset for the connection ages
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
    #: Bytes that any compressed message may unpack to; more only if it was as large itself, by a ratio.
    grpc_max_decompressed_size: int = 64 * 1024 * 1024
    grpc_keepalive_time: int = 7_200_000
    grpc_keepalive_timeout: int = 20_000
    grpc_keepalive_permit_without_calls: bool = False
    grpc_http2_max_pings_without_data: int = 2
    grpc_http2_min_recv_ping_interval_without_data: int = 300_000
    grpc_http2_max_ping_strikes: int = 2
    grpc_max_connection_age: int = 0
    grpc_max_connection_age_grace: int = 0
    #: What one client may make the server hold: in bytes per connection and per stream, and for how long.
    grpc_max_unread_size: int = 512 * 1024 * 1024
    grpc_max_stream_size: int = 64 * 1024 * 1024
    grpc_max_received_size: int = 512 * 1024 * 1024
    #: Of all connections; 0 is a quarter of the memory.
    grpc_max_held_size: int = 0
    grpc_unread_timeout_secs: int = 300
    grpc_message_timeout_secs: int = 60
    #: Category to the metadata key, prefix included, that unlocks it.
    grpc_restricted_protocol: Mapping[str, Restriction] = field(default_factory=dict)
    grpc_server: GrpcServer = "auto"

    # SageMaker and Vertex AI
    allow_sagemaker: bool = False
    sagemaker_port: int = 8080
    sagemaker_safe_port_range: tuple[int, int] | None = None
    sagemaker_thread_count: int = 8
    allow_vertex_ai: bool = False
    vertex_ai_port: int = 8080
    vertex_ai_thread_count: int = 8
    vertex_ai_default_model: str = ""

    # Metrics; without an address of their own they listen on that of HTTP
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
    #: Backend name to its settings; those for every backend stand under "".
    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    repoagent_directory: str = "/opt/tritonserver/repoagents"
    rate_limit: Literal["off", "execution_count"] = "off"
    rate_limit_resource: tuple[RateLimitResource, ...] = ()
    pinned_memory_pool_byte_size: int = 256 * 1024 * 1024
    #: GPU to bytes.
    cuda_memory_pool_byte_size: Mapping[int, int] = field(default_factory=dict)
    cuda_virtual_address_size: Mapping[int, int] = field(default_factory=dict)
    min_supported_compute_capability: float = 0.0
    buffer_manager_thread_count: int = 0
    host_policy: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: GPU to the fraction of its memory beyond which a load is refused.
    model_load_gpu_limit: Mapping[int, float] = field(default_factory=dict)
    allow_client_shm: bool = False

    def group(self, kind: type[G]) -> G:
        """What the options of a plugin are set to. Raises `LookupError` for a group that no plugin has added."""
        for group in self.plugin_options:
            if type(group) is kind:
                return group
        raise LookupError(f"no plugin has added the options {kind.__name__}, by the hook add_options")

    def __post_init__(self) -> None:
        """Apply the rules by which one option decides another (docs/spec/behaviours.md section 8)."""
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
    """A search for ``pattern`` in the name of a header, whose case does not count unless it says ``(?-i)``.

    The syntax is RE2's, as Triton's, and a search takes time linear to what is searched.
    Raises `ValueError`, naming the pattern, if it is malformed. The library is imported here, for those only who
    have a pattern; `ConfigError` says how to install it.
    """
    need("re2", "A pattern of headers to forward")
    import re2

    options = re2.Options()
    options.log_errors = False  # on stderr, which is the log's
    options.case_sensitive = False
    try:
        search: Callable[[str], Any] = re2.compile(pattern, options).search
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"invalid regular expression '{pattern}' (RE2): {text}") from None
    return search
