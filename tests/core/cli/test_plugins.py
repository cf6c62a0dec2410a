"""``penstock plugins``, and the options that plugins add, with real distributions on the path."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Start = Callable[..., Any]
Distribute = Callable[[str, str], None]

GOOD = """
from penstock import hookimpl

@hookimpl
def add_options(parser):
    parser.add_argument("--colour", default="red", help="the colour of water")

@hookimpl
def server_started(server):
    print(f"colour {server.options.plugin_options.colour}", flush=True)
"""
BROKEN = "import a_module_that_does_not_exist\n"


def test_every_plugin_is_listed_with_its_parts(penstock: Start, distribute: Distribute) -> None:
    distribute("good", GOOD)
    process = penstock("plugins", "--json")
    found = {one["name"]: one for one in json.loads(process.popen.stdout.read())}
    assert found["good"] == {
        "name": "good", "distribution": "penstock-good", "version": "1.5", "parts": [], "error": None
    }  # fmt: skip
    assert "backend identity" in found["builtins"]["parts"]
    assert process.finish()[0] == 0


def test_a_broken_plugin_is_explained(penstock: Start, distribute: Distribute) -> None:
    distribute("broken", BROKEN)
    process = penstock("plugins")
    text = process.popen.stdout.read()
    assert process.finish()[0] == 1
    assert "broken is broken: ModuleNotFoundError: No module named 'a_module_that_does_not_exist'" in text
    assert "| builtins " in text


def test_the_options_of_a_plugin_are_in_the_help_and_in_the_server(
    penstock: Start, serve: Start, distribute: Distribute
) -> None:
    distribute("good", GOOD)
    helped = penstock("serve", "--help")
    text = helped.popen.stdout.read()
    assert "--colour COLOUR" in text
    assert "the colour of water" in text
    server = serve("--colour=blue")
    assert server.popen.stdout.readline() == "colour blue\n"


def test_a_plugin_left_out_adds_no_options(serve: Start, distribute: Distribute) -> None:
    distribute("good", GOOD)
    code, text = serve("--plugins=other", "--colour=blue").finish()
    assert code == 1
    assert text.endswith("unrecognized option '--colour'\n")


def test_a_broken_plugin_stops_no_server_and_is_logged_once(serve: Start, distribute: Distribute) -> None:
    distribute("broken", BROKEN)
    server = serve()
    server.wait_for("exit_timeout")
    log = "".join(server.seen)
    assert log.count("a_module_that_does_not_exist") == 1


def test_options_that_raise_break_their_plugin_only(serve: Start, distribute: Distribute) -> None:
    source = "from penstock import hookimpl\n\n@hookimpl\ndef add_options(parser):\n    parser.no_such_method()\n"
    distribute("careless", source)
    serve().wait_for("exit_timeout")
