"""What holds for every host of gRPC, with the stock clients."""

from tests.core.headrace_grpc.test_frontend import *  # noqa: F403
