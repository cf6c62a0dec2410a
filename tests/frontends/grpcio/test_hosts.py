"""What holds for every host of gRPC, with RPCs of a test."""

from tests.core.headrace_grpc.test_hosts import *  # noqa: F403
