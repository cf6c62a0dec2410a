"""Both commands pass the kit."""

from __future__ import annotations

from headrace_testing import CommandConformance


class TestCheck(CommandConformance):
    plugin, command = "headrace_inspect", "check"
    good, bad = ("--no-load", "examples/models"), ("nowhere",)


class TestExplain(CommandConformance):
    plugin, command = "headrace_inspect", "explain"
    bad = ("mlp", "--url=http://127.0.0.1:9")
