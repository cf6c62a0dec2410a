"""The tests of every gRPC host, with RPCs of the tests."""

from tests.core.headrace_grpc.test_hosts import *  # noqa: F403
