"""The usage of ``tritonserver``, in Triton's groups and form. The texts are those of ``headrace serve --help``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from headrace import FlagHelp

_HEAD = "Usage: tritonserver [options]\n  --help\n\tPrint usage"
#: Triton's groups, and its order of the flags in each.
GROUPS = {
    "Server": "id exit-timeout-secs",
    "Logging": "log-verbose log-info log-warning log-error log-format log-file",
    "Model Repository": (
        "model-store model-repository exit-on-error disable-auto-complete-config strict-readiness model-control-mode "
        "repository-poll-secs load-model model-config-name model-load-thread-count model-load-retry-count "
        "model-namespacing enable-peer-access"
    ),
    "HTTP": (
        "allow-http http-address http-port reuse-http-port http-header-forward-pattern http-thread-count "
        "http-max-input-size http-restricted-api"
    ),
    "GRPC": (
        "allow-grpc grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern grpc-infer-thread-count "
        "grpc-infer-allocation-pool-size grpc-max-response-pool-size grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert "
        "grpc-server-key grpc-root-cert grpc-infer-response-compression-level grpc-keepalive-time "
        "grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data "
        "grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age "
        "grpc-max-connection-age-grace grpc-restricted-protocol"
    ),
    "Sagemaker": "allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count",
    "Vertex": "allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model",
    "Metrics": (
        "allow-metrics allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms "
        "metrics-config"
    ),
    "Tracing": "trace-config",
    "Backend": "backend-directory backend-config",
    "Repository Agent": "repoagent-directory",
    "Response Cache": "cache-config cache-directory",
    "Rate Limiter": "rate-limit rate-limit-resource",
    "Memory/Device Management": (
        "pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size "
        "min-supported-compute-capability buffer-manager-thread-count host-policy model-load-gpu-limit allow-client-shm"
    ),
    "DEPRECATED": (
        "strict-model-config response-cache-byte-size trace-file trace-level trace-rate trace-count trace-log-frequency"
    ),
}
#: The group of the flags that Triton does not have.
OTHERS = "Headrace"
#: Triton's notation of the arguments of most flags.
_KINDS = {
    **dict.fromkeys(("<bool>",), "<boolean>"),
    **dict.fromkeys(("<n>", "<s>", "<ms>", "<bytes>", "<port>", "<level>"), "<integer>"),
    **dict.fromkeys(("<path>", "<name>", "<address>", "<regex>", "<format>", "<mode>", "<value>"), "<string>"),
}
_WIDTH = 72


def render(flags: Sequence[FlagHelp]) -> str:
    """Return the usage with all ``flags``."""
    by_name = {flag.name: flag for flag in flags}
    groups = {title: names.split() for title, names in GROUPS.items()}
    grouped = {name for names in groups.values() for name in names}
    deprecated = groups.pop("DEPRECATED")
    groups |= {OTHERS: [name for name in by_name if name not in grouped], "DEPRECATED": deprecated}
    return "\n\n".join([_HEAD, *(_group(title, [by_name[name] for name in names]) for title, names in groups.items())])


def _group(title: str, flags: Sequence[FlagHelp]) -> str:
    return "\n".join([f"{title}:", *map(_flag, flags)])


def _flag(flag: FlagHelp) -> str:
    head = f"  --{flag.name} {_KINDS.get(flag.argument, flag.argument)}".rstrip()
    return "\n".join([head, *(f"\t{line}" for line in textwrap.wrap(flag.text, _WIDTH))])
