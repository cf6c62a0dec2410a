"""The tests of every gRPC host, with the stock clients."""

from tests.core.headrace_grpc.test_frontend import *  # noqa: F403
