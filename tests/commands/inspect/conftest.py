"""The processes of the command line and the plugins that core's own tests start and install."""

from __future__ import annotations

from tests.core.headrace_cli.conftest import distribute, headrace, repository, site

__all__ = ["distribute", "headrace", "repository", "site"]
