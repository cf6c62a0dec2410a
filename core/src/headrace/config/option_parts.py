"""The options of a server, by the part that reads them. `headrace.config.options.ServerOptions` has them all.

A part that needs a few options takes their class: a `ServerOptions` is one. The name of a field is that of its flag,
with underscores, and its default is Triton's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

LogFormat: TypeAlias = Literal["default", "ISO8601", "json"]
#: The control modes of core; a plugin may add others.
CONTROL_MODES = ("none", "poll", "explicit")
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
    """One ``--trace-config``, or a deprecated flag such as ``--trace-rate``. ``mode`` is empty for a global."""

    mode: str
    key: str
    value: str
    is_deprecated: bool = False


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The log. Read by `headrace.telemetry.logs`."""

    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_format: LogFormat = "default"
    log_file: str = ""


@dataclass(frozen=True, kw_only=True)
class RepositoryOptions:
    """The model repositories. Read by `headrace.storage` and by the code that opens a model."""

    model_repository: tuple[str, ...] = ()
    #: Links of a model may lead out of the model repository.
    allow_external_links: bool = False
    model_namespacing: bool = False


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """The control of loads. Read by `headrace.models.control`, and by the loads of a server."""

    #: One of `CONTROL_MODES`, or the name of a plugin's.
    model_control_mode: str = "none"
    repository_poll_secs: int = 15
    load_model: tuple[str, ...] = ()
    model_files_from: ModelFilesFrom = "loopback"
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    #: Reload models when their files change; those of the Python backend stay in the server's process.
    dev: bool = False
    #: Open the ports before the models are loaded at start. Read by ``headrace serve``.
    listen_while_loading: bool = True


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """The completion and check of configs, and the settings of backends. Read by `headrace.models.configuring`."""

    model_config_name: str = ""
    disable_auto_complete_config: bool = False
    #: If True, a model with a parameter that its backend does not know is refused.
    strict_parameters: bool = False
    backend_directory: str = "/opt/tritonserver/backends"
    #: The settings of each backend, by its name; "" has the settings for every backend.
    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: By GPU, the fraction of its memory beyond which a load is refused.
    model_load_gpu_limit: Mapping[int, float] = field(default_factory=dict)
    enable_peer_access: bool = True


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The memory of requests and responses of all ports. Read by `headrace_hosts`."""

    #: In bytes; 0 is half of the memory that the process may use.
    memory_budget: int = 0
    #: The longest time that a large request waits for memory.
    memory_wait_secs: int = 30


@dataclass(frozen=True, kw_only=True)
class HttpLimitOptions:
    """The limits of one HTTP caller, also on the metrics port. 0 is no limit. Read by `headrace_http`."""

    http_max_input_size: int = 64 * 1024 * 1024
    http_max_connections: int = 4096
    http_max_held_size: int = 0
    http_header_timeout_secs: int = 60
    http_keepalive_timeout_secs: int = 620
    http_min_data_rate: int = 1024
    http_stall_timeout_secs: int = 30


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """The HTTP port. Read by `headrace_http`, by another host, and by the interceptors of core."""

    allow_http: bool = True
    http_address: str = "0.0.0.0"
    http_port: int = 8000
    reuse_http_port: bool = False
    http_header_forward_pattern: str = ""
    http_thread_count: int = 8
    #: For each restricted category, the header that permits a request.
    http_restricted_api: Mapping[str, Restriction] = field(default_factory=dict)
    #: The host of HTTP: ``native``, or the name of a frontend that a plugin has for it.
    http_server: str = "native"


@dataclass(frozen=True, kw_only=True)
class HttpTlsOptions:
    """TLS of the HTTP port and of the ports of plugins, and whether metrics have it, too. Read by `TlsFiles`."""

    http_use_ssl: bool = False
    http_use_ssl_mutual: bool = False
    http_server_cert: str = ""
    http_server_key: str = ""
    http_root_cert: str = ""
    metrics_use_ssl: bool = False


@dataclass(frozen=True, kw_only=True)
class GrpcTlsOptions:
    """TLS of the gRPC port. Read by `TlsFiles`."""

    grpc_use_ssl: bool = False
    grpc_use_ssl_mutual: bool = False
    grpc_server_cert: str = ""
    grpc_server_key: str = ""
    grpc_root_cert: str = ""


@dataclass(frozen=True, kw_only=True)
class GrpcLimitOptions:
    """The memory that one client of gRPC may occupy, in bytes, and the time. Read by `headrace_grpc`."""

    #: A compressed message may decompress to this many bytes; to more only within a fixed ratio of its own size.
    grpc_max_decompressed_size: int = 64 * 1024 * 1024
    #: Limits of the memory that one client may occupy, in bytes per connection and per stream, and of the time.
    grpc_max_unread_size: int = 512 * 1024 * 1024
    grpc_max_stream_size: int = 64 * 1024 * 1024
    grpc_max_received_size: int = 512 * 1024 * 1024
    #: The limit for all connections together; 0 is ``memory_budget``.
    grpc_max_held_size: int = 0
    grpc_unread_timeout_secs: int = 300
    grpc_message_timeout_secs: int = 60


@dataclass(frozen=True, kw_only=True)
class GrpcConnectionOptions:
    """Pings and ages of connections, in ms; 0 is no limit for an age. Read by the hosts of gRPC."""

    grpc_keepalive_time: int = 7_200_000
    grpc_keepalive_timeout: int = 20_000
    grpc_keepalive_permit_without_calls: bool = False
    grpc_http2_max_pings_without_data: int = 2
    grpc_http2_min_recv_ping_interval_without_data: int = 300_000
    grpc_http2_max_ping_strikes: int = 2
    grpc_max_connection_age: int = 0
    grpc_max_connection_age_grace: int = 0


@dataclass(frozen=True, kw_only=True)
class GrpcPoolOptions:
    """Thread and pool sizes of Triton, which have no effect."""

    grpc_infer_thread_count: int = 2
    grpc_infer_allocation_pool_size: int = 8
    grpc_max_response_pool_size: int = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class GrpcOptions:
    """The gRPC port. Read by `headrace_grpc`, by another host, and by the interceptors of core."""

    allow_grpc: bool = True
    grpc_address: str = "0.0.0.0"
    grpc_port: int = 8001
    reuse_grpc_port: bool = False
    grpc_header_forward_pattern: str = ""
    grpc_infer_response_compression_level: CompressionLevel = "none"
    #: For each restricted category, the metadata key, prefix included, that permits a call.
    grpc_restricted_protocol: Mapping[str, Restriction] = field(default_factory=dict)
    #: The host of gRPC, likewise.
    grpc_server: str = "native"


@dataclass(frozen=True, kw_only=True)
class CloudOptions:
    """SageMaker and Vertex AI. Read by the distribution ``headrace-cloud-routes``."""

    allow_sagemaker: bool = False
    sagemaker_port: int = 8080
    sagemaker_safe_port_range: tuple[int, int] | None = None
    sagemaker_thread_count: int = 8
    allow_vertex_ai: bool = False
    vertex_ai_port: int = 8080
    vertex_ai_thread_count: int = 8
    vertex_ai_default_model: str = ""


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """The metrics port. Read by `headrace_http.metrics_frontend`. An empty address is that of HTTP."""

    allow_metrics: bool = True
    allow_gpu_metrics: bool = True
    allow_cpu_metrics: bool = True
    metrics_address: str = ""
    metrics_port: int = 8002
    metrics_interval_ms: int = 2000
    metrics_config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """The rate limiter and the response cache. Read by `headrace.server`."""

    rate_limit: Literal["off", "execution_count"] = "off"
    rate_limit_resource: tuple[RateLimitResource, ...] = ()
    cache_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Memory of devices, and the host. Most have no effect."""

    pinned_memory_pool_byte_size: int = 256 * 1024 * 1024
    #: Bytes, by GPU.
    cuda_memory_pool_byte_size: Mapping[int, int] = field(default_factory=dict)
    cuda_virtual_address_size: Mapping[int, int] = field(default_factory=dict)
    min_supported_compute_capability: float = 0.0
    buffer_manager_thread_count: int = 0
    host_policy: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    allow_client_shm: bool = False


@dataclass(frozen=True, kw_only=True)
class DirectoryOptions:
    """Directories of Triton, which have no effect."""

    cache_directory: str = "/opt/tritonserver/caches"
    repoagent_directory: str = "/opt/tritonserver/repoagents"
