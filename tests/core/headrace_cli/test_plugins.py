"""``headrace plugins``, and the options that plugins add, with real distributions on the path."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

Start = Callable[..., Any]
Distribute = Callable[[str, str], None]

GOOD = """
from dataclasses import dataclass, field
from headrace import OptionGroup, hookimpl

@dataclass(frozen=True)
class Good(OptionGroup):
    name = "good"
    colour: str = field(default="red", metadata={"help": "the colour of water"})

@hookimpl
def add_options():
    return [Good]

@hookimpl
def server_started(server):
    print(f"colour {server.options.group(Good).colour}", flush=True)
"""
BROKEN = "import a_module_that_does_not_exist\n"


def test_every_plugin_is_listed_with_its_parts(headrace: Start, distribute: Distribute) -> None:
    distribute("good", GOOD)
    process = headrace("plugins", "--json")
    plugins = {one["name"]: one for one in json.loads(process.popen.stdout.read())}
    assert plugins["good"] == {
        "name": "good", "distribution": "headrace-good", "version": "1.5", "parts": ["options --good-..."],
        "error": None, "withheld": [], "unmarked": [], "hardware": [], "conflicts": [],
    }  # fmt: skip
    assert "backend identity" in plugins["builtins"]["parts"]
    assert process.finish()[0] == 0


def test_the_parts_of_a_plugin_are_wrapped_between_parts(headrace: Start) -> None:
    process = headrace("plugins")
    rows = [line for line in process.popen.stdout.read().splitlines() if line.startswith("|")]
    assert process.finish()[0] == 0
    assert max(map(len, rows)) <= 150
    parts = ", ".join(row.split("|")[-2].strip().removesuffix(",") for row in rows)
    assert "interceptor restricted-apis, interceptor forwarded-headers, " in parts


ON_GPUS = """
from headrace import Backend, Instance, InferRequest, StreamInstance, dtypes, hookimpl

class Timid(Backend):
    name = "timid"
    devices = ("gpu",)
    dtypes = (dtypes.FP32, dtypes.BYTES)
    instance_classes = (Instance, StreamInstance)
    hardware = "it has never run on a GPU"
    def load(self, model):
        raise NotImplementedError
    def share(self, model):
        return {}

@hookimpl
def register_backends():
    return [Timid]
"""


def test_a_backends_hardware_is_shown(headrace: Start, distribute: Distribute) -> None:
    distribute("timid", ON_GPUS)
    process = headrace("plugins")
    text = process.popen.stdout.read()
    assert process.finish()[0] == 0
    assert "backend timid: it has never run on a GPU\n" in text


def test_the_table_of_backends_has_their_declarations(headrace: Start, distribute: Distribute) -> None:
    distribute("timid", ON_GPUS)
    process = headrace("plugins", "--backends")
    rows = process.popen.stdout.read().splitlines()
    assert process.finish()[0] == 0
    assert [row for row in rows if "`timid`" in row] == [
        "| `timid` | GPU | FP32, BYTES | rows, single requests | yes | yes | no | it has never run on a GPU |"
    ]
    assert [row for row in rows if "`identity`" in row] == ["| `identity` | CPU | all | rows | no | no | no | - |"]


def test_a_broken_plugin_is_explained(headrace: Start, distribute: Distribute) -> None:
    distribute("broken", BROKEN)
    process = headrace("plugins")
    text = process.popen.stdout.read()
    assert process.finish()[0] == 1
    reason = "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'"
    assert f"plugin 'broken' of headrace-broken 1.5 is broken: {reason}" in text
    assert "| builtins " in text


def test_the_options_of_a_plugin_are_in_the_help_and_in_the_server(
    headrace: Start, serve: Start, distribute: Distribute
) -> None:
    distribute("good", GOOD)
    helped = headrace("serve", "--help")
    text = helped.popen.stdout.read()
    assert "--good-colour=<string>" in text
    assert "the colour of water" in text
    server = serve("--good-colour=blue")
    assert server.popen.stdout.readline() == "colour blue\n"


def test_a_plugin_left_out_adds_no_options(serve: Start, distribute: Distribute) -> None:
    distribute("good", GOOD)
    distribute("plain", "")
    code, text = serve("--plugins=plain", "--good-colour=blue").finish()
    assert code == 1
    assert text.endswith("unrecognized option '--good-colour'\n")


def test_a_flag_of_a_broken_plugin_is_refused_with_the_reason(serve: Start, distribute: Distribute) -> None:
    distribute("good", f"import nowhere\n{GOOD}")
    code, text = serve("--good-colour=blue").finish()
    assert code == 1
    assert "unrecognized option '--good-colour'\nplugin 'good' of " in text
    assert text.endswith("is broken: ModuleNotFoundError: No module named 'nowhere'\n")


def test_a_broken_plugin_stops_no_server_and_is_logged_once(serve: Start, distribute: Distribute) -> None:
    distribute("broken", BROKEN)
    server = serve()
    server.wait_for("exit_timeout")
    log = "".join(server.seen)
    assert log.count("a_module_that_does_not_exist") == 1


def test_options_that_raise_break_their_plugin_only(serve: Start, distribute: Distribute) -> None:
    source = "from headrace import hookimpl\n\n@hookimpl\ndef add_options():\n    return [no_such_group]\n"
    distribute("careless", source)
    serve().wait_for("exit_timeout")


TWIN = """
from headrace import hookimpl
from headrace.backends.identity import Identity

class Twin(Identity):
    name = "twin"

@hookimpl
def register_backends():
    return [Twin]
"""


def test_two_plugins_that_claim_one_name_are_not_ok(headrace: Start, distribute: Distribute) -> None:
    distribute("one", TWIN)
    distribute("two", TWIN)
    process = headrace("plugins")
    text = process.popen.stdout.read()
    assert process.finish()[0] == 1
    assert re.search(r"^\| one .*\| conflict +\|", text, re.MULTILINE)
    assert re.search(r"^\| two .*\| conflict +\|", text, re.MULTILINE)
    assert re.search(r"^\| builtins .*\| ok +\|", text, re.MULTILINE)
    assert "backend 'twin' is registered by both 'one' of headrace-one 1.5 and 'two' of headrace-two 1.5" in text


def test_a_plugin_whose_options_raise_is_listed_as_broken(headrace: Start, distribute: Distribute) -> None:
    distribute("careless", "from headrace import hookimpl\n@hookimpl\ndef add_options():\n    return [no_such_group]\n")
    process = headrace("plugins")
    assert "| broken |" in process.popen.stdout.read()
    assert process.finish()[0] == 1


def test_a_function_that_lacks_hookimpl_is_listed_and_logged(
    headrace: Start, serve: Start, distribute: Distribute
) -> None:
    distribute("careless", "def add_options():\n    raise AssertionError('this is no hook')\n")
    process = headrace("plugins")
    text = process.popen.stdout.read()
    assert process.finish()[0] == 1
    fault = (
        "plugin 'careless' of headrace-careless 1.5 has a function 'add_options' without @hookimpl, which is not called"
    )
    assert re.search(r"^\| careless .*\| unmarked hook +\|", text, re.MULTILINE)
    assert text.endswith(f"{fault}\n")
    server = serve()
    server.wait_for("exit_timeout")
    assert "".join(server.seen).count(fault) == 1


def test_a_second_frontend_of_a_name_stops_the_server(serve: Start, distribute: Distribute) -> None:
    source = TWIN.replace(
        "headrace.backends.identity import Identity",
        "headrace_http.metrics_frontend import MetricsFrontend as Identity",
    )
    distribute("two", source.replace('"twin"', '"http"').replace("register_backends", "register_frontends"))
    code, text = serve().finish()
    assert code == 1
    assert "error: creating server: Internal - frontend 'http' is registered by both 'http' of headrace " in text
