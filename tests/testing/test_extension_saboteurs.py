"""One broken extension for each check, which has to catch it. The template is the sound one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_testing import ExtensionConformance, ServedExtension

TEMPLATE = Path(__file__).parents[2] / "extensions/_template/src/headrace_template_extension/__init__.py"
DRAWER = """    Drawer = type("Drawer", (__import__("headrace").TensorLocation,), {
        "name": "drawer", "source": lambda self, parameters, tensor: {"mine": b"1"}[parameters["drawer"]]})
    adds = (SoundRoute, SoundMethod, Drawer)
"""
ADDS = "    adds = (SoundRoute, SoundMethod)\n"
#: A WebSocket, whose route is to be written.
SOCKET = """
    async def converse(self, call, socket):
        await socket.accept()
        {}

    Talk = type("Talk", (__import__("headrace").WebSocketRoute,), {{
        "name": "GET /sound/{{name}}", "operation": OPERATION, "converse": converse}})
    adds = (SoundRoute, SoundMethod, Talk)
"""
ECHO = """async for message in socket:
            await socket.send(message)"""
#: What is broken in a WebSocket: the check that catches it, and what stands in its route or beside it. They are tested
#: with the host that has WebSockets.
SOCKETS = {
    "switches the interceptors off": (
        "socket_is_refused",
        f"{ECHO}\n\n    def __init__(self, engine):\n        super().__init__(engine)\n        engine.admission = None",
    ),
    "fails at nonsense": ("nonsense_in_a_socket", ECHO.replace("(message)", "(json.loads(message))")),
    "goes on": (
        "socket_ends",
        """for _ in range(60):
            try:
                await __import__("asyncio").sleep(0.05)
            except BaseException:
                pass""",
    ),
}
#: The check that catches it, and what is broken: a text of the template, and what stands there instead.
SABOTEURS = {
    "adds nothing": (
        "adds_something",
        '    announces = ("sound",)\n    adds = (SoundRoute, SoundMethod)\n    metrics = (',
        "    not_metrics = (",
    ),
    "calls its operation like one of the server's": (
        "operations_are_its_own",
        'ExtensionOperation("sound")',
        'ExtensionOperation("infer")',
    ),
    "adds a path twice": (
        "no_other_plugin_adds_the_same",
        "adds = (SoundRoute, SoundMethod)",
        'adds = (SoundRoute, type("Again", (SoundRoute,), {}), SoundMethod)',
    ),
    "looks inside": ("imports_of_headrace", "import numpy as np\n", "import numpy as np\nimport headrace.server\n"),
    "looks inside the frontend": (
        "imports_of_headrace",
        "import numpy as np\n",
        "import numpy as np\nimport headrace_http\n",
    ),
    "answers with something else": (
        "answers_again_and_again",
        "else np.asarray(tensor)).tolist()",
        "else np.asarray(tensor) + 1).tolist()",
    ),
    "answers once": (
        "answers_again_and_again",
        "        self.asked += 1\n",
        '        self.asked += 1\n        if self.asked > 2:\n            raise InvalidArgument("enough")\n',
    ),
    "keeps the first server": (
        "two_servers",
        "        specs = self.engine",
        "        type(self).first = self = getattr(type(self), 'first', self)\n        specs = self.engine",
    ),
    "fails at nonsense": (
        "no_request_is_the_callers_fault",
        "except (ValueError, RecursionError) as error:",
        "except ZeroDivisionError as error:",
    ),
    "fails at a message that is nonsense": (
        "no_request_is_the_callers_fault",
        "asked = parse(request)",
        "asked = json.loads(request)",
    ),
    "fails at an unknown model": (
        "model_that_is_not_there",
        "        specs = self.engine.resolve(model, version).inputs",
        "        known = {one.name: one for one in self.engine.index()}\n"
        "        specs = known[model] and self.engine.resolve(model, version).inputs",
    ),
    "switches the interceptors off": (
        "interceptor_refuses",
        "    asked = 0\n",
        "    asked = 0\n\n    def __init__(self, engine):\n        super().__init__(engine)\n"
        "        engine.admission = None\n",
    ),
    "fails at an unknown location": (
        "location_that_is_not_there",
        "    adds = (SoundRoute, SoundMethod)\n",
        DRAWER,
    ),
    "measures what it has not declared": ("metrics_are_those", '{"headrace_sound_asked_total"', '{"headrace_sound"'),
    "counts down": ("metrics_are_those", "self.asked += 1", "self.asked -= 1"),
    "does not close": (
        "closes_without_having_been_asked",
        "    def measure",
        '    def close(self) -> None:\n        del self.__dict__["asked"]\n\n    def measure',
    ),
}


class Sound(ExtensionConformance):
    plugin, extension = "sound_extension", "sound"

    def ask(self, served: ServedExtension) -> None:
        status, _, body = served.http("POST", "/v2/models/doubles/sound", b'{"x": [[1, 2]]}')
        assert (status, json.loads(body)) == (200, {"y": [[2, 4]]})
        asked = {"model": "doubles", "inputs": {"x": [[3, 4]]}}
        (answer,) = served.grpc("/headrace.Sound/Ask", json.dumps(asked).encode())
        assert json.loads(answer) == {"y": [[6, 8]]}


CHECKS = sorted(name for name in dir(Sound) if name.startswith("test_"))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the template, with one text in the place of another, the installed plugin ``sound_extension``."""

    def write(before: str = "", after: str = "") -> None:
        source = TEMPLATE.read_text().replace("template", "sound").replace("Template", "Sound")
        assert before in source, f"the template has no {before!r}"
        site = tmp_path / "site"
        info = site / "sound_extension-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sound-extension\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[headrace]\nsound = sound_extension\n")
        (site / "sound_extension.py").write_text(source.replace(before, after, 1) if before else source)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, "sound_extension", raising=False)
        importlib.invalidate_caches()

    return write


def run(name: str, tmp_path: Path, kit: type[Sound] = Sound) -> None:
    """Run the check ``name`` of the kit."""
    checks: Any = kit()
    check = getattr(checks, name)
    wanted = check.__code__.co_varnames[1 : check.__code__.co_argcount]
    folder = tmp_path / "one"
    folder.mkdir()
    given = {"tmp_path": folder} if "tmp_path" in wanted else {}
    if "served" not in wanted:
        check(**given)
        return
    other = tmp_path / "served"
    other.mkdir()
    with checks.serving(other) as served:
        check(served=served, **given)


@pytest.mark.parametrize("name", CHECKS)
def test_the_template_passes_every_check(install: Callable[..., None], name: str, tmp_path: Path) -> None:
    install()
    run(name, tmp_path)


@pytest.mark.parametrize("saboteur", SABOTEURS)
def test_a_broken_extension_is_caught(install: Callable[..., None], saboteur: str, tmp_path: Path) -> None:
    words, before, after = SABOTEURS[saboteur]
    (check,) = [name for name in CHECKS if words in name]
    install(before, after)
    with pytest.raises(AssertionError):
        run(check, tmp_path)


def test_a_socket_is_tested_on_a_host_that_has_them(install: Callable[..., None], tmp_path: Path) -> None:
    install(ADDS, SOCKET.format(ECHO))
    with pytest.raises(AssertionError, match=r"options\(\) returns {'http_server': 'hypercorn'}"):
        run("test_nonsense_in_a_socket_is_the_clients_fault", tmp_path)


def test_every_check_catches_somebody() -> None:
    caught = {name for words, *_ in (*SABOTEURS.values(), *SOCKETS.values()) for name in CHECKS if words in name}
    assert sorted(set(CHECKS) - caught) == ["test_the_server_announces_it"]  # which core sees to
