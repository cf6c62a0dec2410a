"""All commands pass the kit."""

from __future__ import annotations

from headrace_testing import CommandConformance


class TestCheck(CommandConformance):
    plugin, command = "headrace_inspect", "check"
    good, bad = ("--no-load", "examples/models"), ("nowhere",)


class TestExplain(CommandConformance):
    plugin, command = "headrace_inspect", "explain"
    bad = ("mlp", "--url=http://127.0.0.1:9")


class TestLoad(CommandConformance):
    plugin, command = "headrace_inspect", "load"
    bad = ("mlp", "--url=http://127.0.0.1:9")


class TestUnload(CommandConformance):
    plugin, command = "headrace_inspect", "unload"
    bad = ("mlp", "--url=http://127.0.0.1:9")


class TestIndex(CommandConformance):
    plugin, command = "headrace_inspect", "index"
    bad = ("--url=http://127.0.0.1:9",)
