"""Two endpoints never share a place, and SageMaker's range binds all others."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.options import ServerOptions
from headrace.errors import ConfigError
from headrace_cli.port_checks import check_ports


@pytest.mark.parametrize(
    ("ports", "text"),
    [
        ({"http_port": 8001}, "HTTP requests and GRPC requests at the same address and port 0.0.0.0:8001"),
        ({"allow_sagemaker": True, "sagemaker_port": 8000}, "HTTP requests and SageMaker requests at the same"),
        ({"allow_sagemaker": True, "allow_vertex_ai": True}, "SageMaker requests and Vertex AI requests at the same"),
        ({"allow_vertex_ai": True, "vertex_ai_port": 8002}, "Vertex AI requests and metrics requests at the same"),
        ({"allow_sagemaker": True, "sagemaker_safe_port_range": (8001, 8002)},
         r"HTTP requests at port 8000, allowed port range is \[8001, 8002\]"),
        ({"allow_sagemaker": True, "sagemaker_safe_port_range": (8000, 8001)},
         r"metrics requests at port 8002, allowed port range is \[8000, 8001\]"),
    ],
)  # fmt: skip
def test_impossible_ports_are_refused_in_tritons_words(ports: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_ports(ServerOptions(**ports))


@pytest.mark.parametrize("ports", [
    {},
    {"http_port": 8001, "allow_grpc": False},
    {"http_port": 8001, "http_address": "127.0.0.1"},
    {"sagemaker_port": 8000, "sagemaker_safe_port_range": (1, 2)},  # without SageMaker
    {"allow_sagemaker": True, "sagemaker_safe_port_range": (8000, 8002)},  # its own port may be outside
    {"allow_sagemaker": True, "sagemaker_safe_port_range": (8000, 8002), "http_port": 0},
])  # fmt: skip
def test_everything_else_is_allowed(ports: dict[str, Any]) -> None:
    check_ports(ServerOptions(**ports))
