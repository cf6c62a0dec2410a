"""Routes of plugins, and answers that are sent while they are made."""

from tests.core.headrace_http.test_plugin_routes import *  # noqa: F403
