"""Refuses options that do not work with several servers on one port (``--workers``).

Models that need one server for all of their requests are refused when they are loaded: `headrace.models.loader`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from headrace.config.option_parts import CONTROL_MODES
from headrace.config.options import ServerOptions
from headrace.errors import ConfigError


def refuse(options: ServerOptions) -> None:
    """Raise `ConfigError` for the first of ``options`` that does not work with workers."""
    for what, why in _impossible(options):
        raise ConfigError(f"--workers={options.workers} is refused{what}: {why}")


def _impossible(options: ServerOptions) -> Iterator[tuple[str, str]]:
    if not hasattr(socket, "SO_REUSEPORT"):
        yield "", "this system lets no two processes listen on one port"
    if not (options.allow_http or options.allow_grpc):
        yield "", "there is no port to share, because --allow-http and --allow-grpc are false"
    if options.dev:
        yield " together with --dev", "a debugger stops one server, and the other workers go on"
    if options.workers > 1 and options.model_control_mode not in CONTROL_MODES:
        yield (
            f" together with --model-control-mode={options.model_control_mode}",
            "each worker would load models of its own, and all together would use more memory than they may",
        )
    if options.rate_limit != "off" and options.workers > 1:
        yield (
            f" together with --rate-limit={options.rate_limit}",
            "each worker has a rate limiter of its own, and all together would use more than there is of a resource",
        )
    if options.metrics_config.get("summary_latencies") == "true":
        yield (
            " together with --metrics-config=summary_latencies=true",
            "quantiles of several workers give no quantile of all; the histograms, which are always there, add up",
        )


def warning(options: ServerOptions) -> str:
    """Return a log line that lists the parts that each worker has for itself."""
    own = ["models", "dynamic batches", "limits of queues and connections", "statistics"]
    if "local" in options.cache_config:
        own.append("response cache")
    count = options.workers
    return (
        f"--workers={count}: each of {count} servers has {', '.join(own[:-1])} and {own[-1]} of its own, and a client "
        "reaches the one that has its connection"
    )
