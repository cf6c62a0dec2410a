"""Fixtures that run the tests of core on this host."""

from __future__ import annotations

import pytest

from headrace_grpcio.frontend import GrpcioFrontend
from tests.core.conftest import loop_guard
from tests.core.headrace_grpc.conftest import connect, grpc_gate, grpc_models, pem, serve_native

__all__ = ["connect", "grpc_gate", "grpc_models", "loop_guard", "pem", "serve_native"]


@pytest.fixture(scope="session")
def host() -> type[GrpcioFrontend]:
    return GrpcioFrontend
