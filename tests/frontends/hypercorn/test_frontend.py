"""What holds for every host of HTTP."""

from tests.core.headrace_http.test_frontend import *  # noqa: F403
