"""The tests of every HTTP host."""

from tests.core.headrace_http.test_frontend import *  # noqa: F403
