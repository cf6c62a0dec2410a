"""Check which ports may be used together (docs/spec/behaviours.md section 8)."""

from __future__ import annotations

from itertools import combinations

from headrace.config.options import ServerOptions
from headrace.errors import ConfigError

#: The address of the clouds' ports. Triton has no flags for it.
EVERY_ADDRESS = "0.0.0.0"


def check_ports(options: ServerOptions) -> None:
    """Raise `ConfigError` if two endpoints have the same address and port, or one is outside of the range that
    SageMaker permits. Port 0 is any free port."""
    endpoints = [
        ("HTTP", options.allow_http, options.http_address, options.http_port),
        ("GRPC", options.allow_grpc, options.grpc_address, options.grpc_port),
        ("SageMaker", options.allow_sagemaker, EVERY_ADDRESS, options.sagemaker_port),
        ("Vertex AI", options.allow_vertex_ai, EVERY_ADDRESS, options.vertex_ai_port),
        ("metrics", options.allow_metrics, options.metrics_address, options.metrics_port),
    ]
    listening = [(name, address, port) for name, allowed, address, port in endpoints if allowed and port]
    if options.allow_sagemaker and options.sagemaker_safe_port_range:
        low, high = options.sagemaker_safe_port_range
        for name, _, port in listening:
            if name != "SageMaker" and not low <= port <= high:
                raise ConfigError(
                    f"The server cannot listen to {name} requests at port {port}, allowed port range is [{low}, {high}]"
                )
    for (first, address, port), (second, *place) in combinations(listening, 2):
        if [address, port] == place:
            raise ConfigError(
                f"The server cannot listen to {first} requests and {second} requests "
                f"at the same address and port {address}:{port}"
            )
