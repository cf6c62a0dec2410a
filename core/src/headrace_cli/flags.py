"""The table of all flags of ``headrace serve``, with their parsers and help texts.

The flags, their groups and their order are those of docs/spec/behaviours.md section 8. The defaults are in
`headrace.config.options.ServerOptions`; which flags have an effect is in `headrace.config.support`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.option_parts import GRPC_RESTRICTED_PREFIX, RESTRICTED_CATEGORIES, TraceSetting
from headrace_cli import flag_values
from headrace_cli.flag_values import boolean, choice, count, int32, port, setting, size, text


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. ``read`` parses its text; without it the flag has no argument.

    ``gather`` combines the values of a flag that may be repeated; without it the last one counts.
    ``field`` is the field of `ServerOptions` that the flag sets, if it has another name.
    ``deprecated`` names the flag that replaces this one. If that flag has several settings,
    ``setting`` is the replacing one, as Triton writes it.
    """

    name: str
    argument: str
    help: str
    example: str
    read: Callable[[str], Any] | None = text
    gather: Callable[[Sequence[Any]], Any] | None = None
    field: str = ""
    deprecated: str = ""
    setting: str = ""

    @property
    def option(self) -> str:
        """The field of `ServerOptions` that this flag sets."""
        return self.field or self.name.replace("-", "_")


def _trace(mode: str, key: str) -> Callable[[str], TraceSetting]:
    return lambda value: TraceSetting(mode, key, value, is_deprecated=True)


def _local_cache(value: str) -> tuple[str, str, str]:
    return "local", "size", str(size(value))


def _old_trace(name: str, mode: str, key: str, example: str, value: str) -> Flag:
    instead = f"--trace-config={mode + ',' if mode else ''}{key}="
    return Flag(name, "<value>", f"Same as {instead}<value>.", example, _trace(mode, key), flag_values.traces,
                "trace_config", "trace-config", f"{mode + ',' if mode else ''}{key}=<{value}>")  # fmt: skip


_FORWARD = (
    "Request headers whose name matches this regular expression (RE2) become request parameters. Upper and lower "
    "case are equal, unless it has `(?-i)`. Needs headrace[re2]."
)
_HTTP_RESTRICTED = f"APIs that need the header <key> with exactly <value>: {', '.join(RESTRICTED_CATEGORIES)}."
_GRPC_RESTRICTED = f"The same for gRPC, where the metadata key is {GRPC_RESTRICTED_PREFIX}<key>."
_NAMED_SETTING = "<name>,<key>=<value>"

# One row per flag, one line where it fits: this is a table.
# fmt: off
GROUPS: dict[str, tuple[Flag, ...]] = {
    "Server and logs": (
        Flag("id", "<name>", "Name of this server in its metadata.", "digits-1", flag_values.utf8),
        Flag("exit-timeout-secs", "<s>", "Time for requests in flight to finish after SIGTERM or SIGINT.", "60", int32),
        Flag("log-verbose", "<level>", "Level of extra messages, 0 or false for none. From 1 on, errors sent to "
             "clients have full file paths.", "1", flag_values.level),
        Flag("log-info", "<bool>", "Log informational messages.", "false", boolean),
        Flag("log-warning", "<bool>", "Log warnings.", "false", boolean),
        Flag("log-error", "<bool>", "Log errors.", "false", boolean),
        Flag("log-format", "<format>", "Form of the log: default, ISO8601, or json for one object per line.", "json",
             choice("log-format", "default", "ISO8601", "json")),
        Flag("log-file", "<path>", "Append the log to this file instead of stderr.", "/var/log/headrace.log"),
        Flag("workers", "<n>|auto", "Number of server processes that share the HTTP and gRPC ports, for models that "
             "keep no state between requests: auto is one per core, 0 is one server without a supervisor.", "4",
             flag_values.processes),
        Flag("memory-budget", "<bytes>", "Most bytes of requests, responses and the response cache that the server "
             "holds; beyond it, large requests wait, and are then refused. 0 is half of the memory that the process "
             "may use.", "2147483648", size),
        Flag("memory-wait-secs", "<s>", "Longest time that a large request waits for memory.", "5", flag_values.count),
        Flag("plugins", "<name>,...", "Use only these plugins, named as `headrace plugins` lists them.", "onnxruntime",
             flag_values.names),
    ),
    "Model repository": (
        Flag("model-repository", "<path>", "Directory that holds one directory per model, or a storage's URL.",
             "/srv/models", flag_values.not_empty("model-repository"), flag_values.collect),
        Flag("model-store", "<path>", "Same as --model-repository.", "/srv/models",
             flag_values.not_empty("model-store"), flag_values.collect, "model_repository"),
        Flag("exit-on-error", "<bool>", "Exit if any model fails to load at start; false serves the others.", "false",
             boolean),
        Flag("disable-auto-complete-config", "", "Use configs as written; do not complete them from the model "
             "files.", "",
             None),
        Flag("strict-model-config", "<bool>", "Same as --disable-auto-complete-config when true.", "true", boolean,
             field="disable_auto_complete_config", deprecated="disable-auto-complete-config"),
        Flag("listen-while-loading", "<bool>", "Open the ports before the models are loaded; false opens them after.",
             "false", boolean),
        Flag("strict-readiness", "<bool>", "The server is ready only if every model is.", "false", boolean),
        Flag("model-control-mode", "<mode>", "Who loads models: none (all, at start), poll, explicit, or the mode of "
             "a plugin, such as on-demand.", "none", str.lower),
        Flag("repository-poll-secs", "<s>", "Interval of the checks of the repository in mode poll; 0 for none.", "30",
             int32),
        Flag("load-model", "<name>", "Model to load at start in mode explicit; '*' alone is all of them.", "digits",
             gather=flag_values.collect),
        Flag("model-config-name", "<name>", "Use configs/<name>.pbtxt of each model that has one.", "h100",
             flag_values.not_empty("model-config-name")),
        Flag("model-files-from", "<whom>", "Who may send files with a load, which are code: loopback (clients on "
             "this machine, or with the key of a restricted model-repository), any or none.", "any",
             choice("model-files-from", "loopback", "any", "none")),
        Flag("strict-parameters", "<bool>", "Refuse models with parameters that their backend does not know.",
             "true", boolean),
        Flag("model-load-thread-count", "<n>", "Models that load at the same time.", "8", int32),
        Flag("model-load-retry-count", "<n>", "Further attempts at loading a version that failed.", "2", int32),
        Flag("model-namespacing", "<bool>", "Allow models of one name in several repositories.", "true", boolean),
        Flag("allow-external-links", "<bool>", "Follow links that lead out of the model repository.", "true", boolean),
        Flag("dev", "", "Reload a model when its files change, and keep Python models in the server's process, where "
             "breakpoint() works.", "", None),
        Flag("enable-peer-access", "<bool>", "Copy between GPUs directly.", "false", boolean),
    ),
    "HTTP": (
        Flag("allow-http", "<bool>", "Serve HTTP.", "false", boolean),
        Flag("http-address", "<address>", "Address to listen on.", "127.0.0.1"),
        Flag("http-port", "<port>", "Port to listen on, 1 to 65535; 0 is a free one.", "9000", port),
        Flag("reuse-http-port", "<bool>", "Share the port with other servers (SO_REUSEPORT).", "true", boolean),
        Flag("http-header-forward-pattern", "<regex>", _FORWARD, "^x-tenant", flag_values.pattern),
        Flag("http-thread-count", "<n>", "Threads that handle HTTP.", "8", int32),
        Flag("http-max-input-size", "<bytes>", "Largest request body or JSON part.", "134217728",
             flag_values.positive("http-max-input-size", flag_values.INT64)),
        Flag("http-max-connections", "<n>", "Most open connections of the HTTP port, and of the metrics port; beyond "
             "it, the connection that was idle longest is closed. 0 is unlimited.", "10000", flag_values.count),
        Flag("http-max-held-size", "<bytes>", "Most bytes of requests over 64 KiB and of unread answers, for all "
             "connections of the HTTP port, and of the metrics port; beyond it, connections are closed, slow ones "
             "and large ones first. 0 is no limit but --memory-budget.", "2147483648", size),
        Flag("http-header-timeout-secs", "<n>", "Longest time for the head of a request to arrive; 0 is unlimited.",
             "20", flag_values.count),
        Flag("http-keepalive-timeout-secs", "<n>", "Longest time between two requests of a connection; 0 is "
             "unlimited.", "75", flag_values.count),
        Flag("http-min-data-rate", "<bytes/s>", "Lowest rate for sending the body of a request and for reading an "
             "answer; 0 is unlimited.", "240", flag_values.count),
        Flag("http-stall-timeout-secs", "<n>", "A connection that stays below that rate for this time is closed; 0 "
             "is unlimited.", "60", flag_values.count),
        Flag("http-restricted-api", "<api>,...:<key>=<value>", _HTTP_RESTRICTED, "model-repository:admin=letmein",
             flag_values.restriction("http-restricted-api", "api"), flag_values.restrictions("api")),
        Flag("http-use-ssl", "<bool>", "Use TLS on the HTTP port and ports of plugins, with the files below.", "true",
             boolean),
        Flag("http-use-ssl-mutual", "<bool>", "Use TLS and require a certificate from the client.", "true", boolean),
        Flag("http-server-cert", "<path>", "PEM file of the server's certificate, and of those between it and its "
             "authority.", "server.crt"),
        Flag("http-server-key", "<path>", "PEM file of the server's key, without a password.", "server.key"),
        Flag("http-root-cert", "<path>", "PEM file of the authorities that sign the clients' certificates.", "ca.crt"),
        Flag("http-server", "<server>",
             "Host of the HTTP endpoint: native, or hypercorn (needs headrace[hypercorn]), or that of another plugin.",
             "hypercorn", flag_values.not_empty("http-server")),
    ),
    "gRPC": (
        Flag("allow-grpc", "<bool>", "Serve gRPC.", "false", boolean),
        Flag("grpc-address", "<address>", "Address to listen on.", "127.0.0.1"),
        Flag("grpc-port", "<port>", "Port to listen on, 1 to 65535; 0 is a free one.", "9001", port),
        Flag("reuse-grpc-port", "<bool>", "Share the port with other servers (SO_REUSEPORT).", "true", boolean),
        Flag("grpc-header-forward-pattern", "<regex>", _FORWARD, "^x-tenant", flag_values.pattern),
        Flag("grpc-infer-thread-count", "<n>", "Threads that handle inference, 2 to 128.", "4",
             flag_values.grpc_threads),
        Flag("grpc-infer-allocation-pool-size", "<n>", "Requests kept for reuse.", "16", int32),
        Flag("grpc-max-response-pool-size", "<n>", "Responses kept for reuse.", "16",
             flag_values.positive("grpc-max-response-pool-size", flag_values.INT32)),
        Flag("grpc-use-ssl", "<bool>", "Use TLS, with the three files below.", "true", boolean),
        Flag("grpc-use-ssl-mutual", "<bool>", "Use TLS and require a certificate from the client.", "true", boolean),
        Flag("grpc-server-cert", "<path>", "PEM file of the server's certificate.", "server.crt"),
        Flag("grpc-server-key", "<path>", "PEM file of the server's key.", "server.key"),
        Flag("grpc-root-cert", "<path>", "PEM file of the authorities that sign the clients' certificates.", "ca.crt"),
        Flag("grpc-infer-response-compression-level", "<level>", "Compression of answers: none, low, medium or high.",
             "medium", choice("grpc_infer_response_compression_level", "none", "low", "medium", "high",
             ignore_case=True)),
        Flag("grpc-max-decompressed-size", "<bytes>", "Largest decompressed size of a message; 32 times its "
             "compressed size is always allowed.", "1073741824", flag_values.positive("grpc-max-decompressed-size",
             flag_values.INT32)),
        Flag("grpc-keepalive-time", "<ms>", "Idle time before a keepalive ping.", "60000", int32),
        Flag("grpc-keepalive-timeout", "<ms>", "Time for the client to answer a ping.", "10000", int32),
        Flag("grpc-keepalive-permit-without-calls", "<bool>", "Ping connections without calls, too.", "true", boolean),
        Flag("grpc-http2-max-pings-without-data", "<n>", "Pings sent between two frames of data; 0 is unlimited.", "0",
             int32),
        Flag("grpc-http2-min-recv-ping-interval-without-data", "<ms>", "Shortest time between pings of a client.",
             "60000", int32),
        Flag("grpc-http2-max-ping-strikes", "<n>", "Early pings that a client may send before its connection is "
             "closed; 0 is unlimited.", "0",
             int32),
        Flag("grpc-max-connection-age", "<ms>", "Age at which connections are closed; 0 is unlimited.", "3600000",
             count),
        Flag("grpc-max-connection-age-grace", "<ms>", "Time for the calls of such a connection to finish.", "30000",
             count),
        Flag("grpc-max-unread-size", "<bytes>", "Most bytes of unread answers per connection; beyond it, new calls "
             "wait, and a further answer is replaced by an error.", "1073741824",
             flag_values.positive("grpc-max-unread-size", flag_values.INT64)),
        Flag("grpc-max-stream-size", "<bytes>", "Most bytes of requests and unread answers of one stream; beyond it, "
             "the server does not read the stream.", "268435456", flag_values.positive("grpc-max-stream-size",
             flag_values.INT64)),
        Flag("grpc-max-received-size", "<bytes>", "Most bytes of requests over 256 KiB that arrive or are in flight, "
             "per connection; beyond it, further ones wait.", "1073741824",
             flag_values.positive("grpc-max-received-size", flag_values.INT64)),
        Flag("grpc-max-held-size", "<bytes>", "Most bytes of requests over 64 KiB and of unread answers, for all "
             "connections; beyond it, connections are closed, slow ones and large ones first. 0 is no limit but "
             "--memory-budget.", "2147483648", size),
        Flag("grpc-unread-timeout-secs", "<s>", "Longest time for a client to read its waiting answers; then its "
             "connection is closed.", "60", flag_values.positive("grpc-unread-timeout-secs", flag_values.INT32)),
        Flag("grpc-message-timeout-secs", "<s>", "A call ends if its request message arrives at less than 1 KiB/s "
             "for this time.", "20", flag_values.positive("grpc-message-timeout-secs", flag_values.INT32)),
        Flag("grpc-restricted-protocol", "<protocol>,...:<key>=<value>", _GRPC_RESTRICTED,
             "model-repository:admin=letmein",
             flag_values.restriction("grpc-restricted-protocol", "protocol", GRPC_RESTRICTED_PREFIX),
             flag_values.restrictions("protocol")),
        Flag("grpc-server", "<server>",
             "Host of the gRPC endpoint: native, or grpcio (needs headrace[grpcio]), or that of another plugin.",
             "grpcio", flag_values.not_empty("grpc-server")),
    ),
    "SageMaker and Vertex AI": (
        Flag("allow-sagemaker", "<bool>", "Serve SageMaker's requests: headrace-cloud-routes.", "false", boolean),
        Flag("sagemaker-port", "<port>", "Port to listen on, 1 to 65535; 0 is a free one.", "8080", port),
        Flag("sagemaker-safe-port-range", "<first>-<last>", "Ports that other endpoints may use.", "8000-8002",
             flag_values.port_range),
        Flag("sagemaker-thread-count", "<n>", "Threads that handle the endpoint.", "8", int32),
        Flag("allow-vertex-ai", "<bool>", "Serve Vertex AI's requests: headrace-cloud-routes.", "false", boolean),
        Flag("vertex-ai-port", "<port>", "Port to listen on, 1 to 65535; 0 is a free one.", "8080", port),
        Flag("vertex-ai-thread-count", "<n>", "Threads that handle the endpoint.", "8", int32),
        Flag("vertex-ai-default-model", "<name>", "Model for requests that name none.", "digits"),
    ),
    "Metrics": (
        Flag("allow-metrics", "<bool>", "Serve Prometheus metrics.", "false", boolean),
        Flag("allow-gpu-metrics", "<bool>", "Include metrics of the GPUs.", "false", boolean),
        Flag("allow-cpu-metrics", "<bool>", "Include metrics of the CPU and its memory.", "false", boolean),
        Flag("metrics-address", "<address>", "Address to listen on; by default that of HTTP.", "127.0.0.1"),
        Flag("metrics-port", "<port>", "Port to listen on, 1 to 65535; 0 is a free one.", "9002", port),
        Flag("metrics-use-ssl", "<bool>", "Use TLS on the metrics port, too, with the files of HTTP.", "true", boolean),
        Flag("metrics-interval-ms", "<ms>", "Interval of the readings of CPU and GPUs.", "1000",
             flag_values.milliseconds),
        Flag("metrics-config", "<key>=<value>", "counter_latencies, histogram_latencies, summary_latencies, "
             "histograms, native_histograms as true or false; summary_quantiles; include, exclude: patterns of names.",
             "summary_latencies=true", flag_values.metrics_setting, dict),
    ),
    "Tracing": (
        Flag("trace-config", "[<mode>,]<key>=<value>", "level, rate, count or mode for all; file for triton; url for "
             "opentelemetry.", "level=TIMESTAMPS", flag_values.trace, flag_values.traces),
        _old_trace("trace-file", "triton", "file", "trace.json", "filepath"),
        _old_trace("trace-level", "", "level", "TIMESTAMPS", "OFF|TIMESTAMPS|TENSORS"),
        _old_trace("trace-rate", "", "rate", "1000", "rate value"),
        _old_trace("trace-count", "", "count", "100", "count value"),
        _old_trace("trace-log-frequency", "triton", "log-frequency", "10", "log frequency value"),
    ),
    "Backends, caches, agents and memory": (
        Flag("backend-config", "[<backend>,]<key>=<value>", "A setting of one backend, or of all.",
             "onnxruntime,default-max-batch-size=8", setting("backend-config", "backend name", needs_owner=False),
             flag_values.nest),
        Flag("backend-directory", "<path>", "Directory with one directory per python-based backend.", "/opt/backends"),
        Flag("cache-config", _NAMED_SETTING, "A setting of the response cache.", "local,size=1048576",
             setting("cache-config", "cache name"), flag_values.one_cache),
        Flag("cache-directory", "<path>", "Where Triton looks for caches.", "/opt/caches"),
        Flag("response-cache-byte-size", "<bytes>", "Same as --cache-config=local,size=<bytes>.", "1048576",
             _local_cache, flag_values.one_cache, "cache_config", "cache-config"),
        Flag("repoagent-directory", "<path>", "Where Triton looks for repository agents.", "/opt/repoagents"),
        Flag("rate-limit", "<mode>", "Limit executions by resources: off or execution_count.", "off",
             choice("rate-limit", "off", "execution_count", ignore_case=True)),
        Flag("rate-limit-resource", "<name>:<count>[:<device>]", "Number of units of a resource.", "R1:10:0",
             flag_values.resource, flag_values.collect),
        Flag("pinned-memory-pool-byte-size", "<bytes>", "Pinned memory for copies to GPUs; 0 for none.", "0", size),
        Flag("cuda-memory-pool-byte-size", "<gpu>:<bytes>", "Memory of a GPU for tensors.", "0:67108864",
             flag_values.pair(count, size, ":"), dict),
        Flag("cuda-virtual-address-size", "<gpu>:<bytes>", "Address space of a GPU for growing state.", "0:1073741824",
             flag_values.pair(count, size, ":"), dict),
        Flag("min-supported-compute-capability", "<version>", "GPUs below it are not used.", "7.5", flag_values.real),
        Flag("buffer-manager-thread-count", "<n>", "Threads that copy tensors.", "2", count),
        Flag("host-policy", "<policy>,<key>=<value>", "numa-node or cpu-cores of the instances under a policy.",
             "gpu_0,numa-node=0", flag_values.host_policy, flag_values.nest),
        Flag("model-load-gpu-limit", "<gpu>:<fraction>",
             "Refuse loads onto a GPU if more than this share of its memory is in use.", "0:0.8",
             flag_values.pair(count, flag_values.fraction, ":"), dict),
        Flag("allow-client-shm", "<bool>", "Clients may register shared memory: headrace-shm.", "false", boolean),
    ),
}
# fmt: on

FLAGS = {flag.name: flag for group in GROUPS.values() for flag in group}
