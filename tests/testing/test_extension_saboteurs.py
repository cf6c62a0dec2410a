"""One broken extension per check. That check must fail. The template is the sound one."""

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
#: A WebSocket route. ``{}`` is its body.
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
#: Broken WebSocket routes: the check that must fail, and the body of the route. They run on a host with WebSockets.
SOCKETS = {
    "disables the interceptors": (
        "socket_is_refused",
        f"{ECHO}\n\n    def __init__(self, engine):\n        super().__init__(engine)\n        engine.admission = None",
    ),
    "fails at a malformed message": ("malformed_socket_message", ECHO.replace("(message)", "(json.loads(message))")),
    "runs on": (
        "socket_ends",
        """for _ in range(60):
            try:
                await __import__("asyncio").sleep(0.05)
            except BaseException:
                pass""",
    ),
}
#: The check that must fail, a text of the template, and its replacement.
SABOTEURS = {
    "adds nothing": (
        "adds_something",
        '    announces = ("sound",)\n    adds = (SoundRoute, SoundMethod)\n    metrics = (',
        "    not_metrics = (",
    ),
    "shadows an operation of the server": (
        "operations_do_not_shadow",
        'ExtensionOperation("sound")',
        'ExtensionOperation("infer")',
    ),
    "adds a path twice": (
        "no_other_plugin_adds",
        "adds = (SoundRoute, SoundMethod)",
        'adds = (SoundRoute, type("Again", (SoundRoute,), {}), SoundMethod)',
    ),
    "imports an internal module": (
        "imports_only_exports",
        "import numpy as np\n",
        "import numpy as np\nimport headrace.server\n",
    ),
    "imports the frontend": (
        "imports_only_exports",
        "import numpy as np\n",
        "import numpy as np\nimport headrace_http\n",
    ),
    "answers wrongly": (
        "answers_repeated_requests",
        "else np.asarray(tensor)).tolist()",
        "else np.asarray(tensor) + 1).tolist()",
    ),
    "answers once": (
        "answers_repeated_requests",
        "        self.requests += 1\n",
        '        self.requests += 1\n        if self.requests > 2:\n            raise InvalidArgument("enough")\n',
    ),
    "blocks the event loop": (
        "block_the_event_loop",
        "        self.requests += 1\n",
        '        self.requests += 1\n        __import__("time").sleep(0.3)\n',
    ),
    "keeps the first server": (
        "two_servers",
        "        specs = self.engine",
        "        type(self).first = self = getattr(type(self), 'first', self)\n        specs = self.engine",
    ),
    "fails at a malformed body": (
        "malformed_request",
        "except (ValueError, RecursionError) as error:",
        "except ZeroDivisionError as error:",
    ),
    "fails at a malformed message": (
        "malformed_request",
        "document = parse(request)",
        "document = json.loads(request)",
    ),
    "fails at an unknown model": (
        "unknown_model",
        "        specs = self.engine.resolve(model, version).inputs",
        "        known = {one.name: one for one in self.engine.index()}\n"
        "        specs = known[model] and self.engine.resolve(model, version).inputs",
    ),
    "disables the interceptors": (
        "interceptor_refuses",
        "    requests = 0\n",
        "    requests = 0\n\n    def __init__(self, engine):\n        super().__init__(engine)\n"
        "        engine.admission = None\n",
    ),
    "fails at an unknown location": (
        "unknown_location",
        "    adds = (SoundRoute, SoundMethod)\n",
        DRAWER,
    ),
    "measures an undeclared metric": ("measures_the_declared", '{"headrace_sound_requests_total"', '{"headrace_sound"'),
    "counts down": ("measures_the_declared", "self.requests += 1", "self.requests -= 1"),
    "does not close": (
        "closes_twice",
        "    def measure",
        '    def close(self) -> None:\n        del self.__dict__["requests"]\n\n    def measure',
    ),
}


class Sound(ExtensionConformance):
    plugin, extension = "sound_extension", "sound"

    def ask(self, served: ServedExtension) -> None:
        status, _, body = served.http("POST", "/v2/models/doubles/sound", b'{"x": [[1, 2]]}')
        assert (status, json.loads(body)) == (200, {"y": [[2, 4]]})
        request = {"model": "doubles", "inputs": {"x": [[3, 4]]}}
        (answer,) = served.grpc("/headrace.Sound/Ask", json.dumps(request).encode())
        assert json.loads(answer) == {"y": [[6, 8]]}


CHECKS = sorted(name for name in dir(Sound) if name.startswith("test_"))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs the template as the plugin ``sound_extension``, with one text replaced."""

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
    parameters = check.__code__.co_varnames[1 : check.__code__.co_argcount]
    folder = tmp_path / "one"
    folder.mkdir()
    arguments = {"tmp_path": folder} if "tmp_path" in parameters else {}
    if "served" not in parameters:
        check(**arguments)
        return
    other = tmp_path / "served"
    other.mkdir()
    with checks.serving(other) as served:
        check(served=served, **arguments)


@pytest.mark.parametrize("name", CHECKS)
def test_the_template_passes_every_check(install: Callable[..., None], name: str, tmp_path: Path) -> None:
    install()
    run(name, tmp_path)


@pytest.mark.parametrize("saboteur", SABOTEURS)
def test_the_check_fails(install: Callable[..., None], saboteur: str, tmp_path: Path) -> None:
    words, before, after = SABOTEURS[saboteur]
    (check,) = [name for name in CHECKS if words in name]
    install(before, after)
    with pytest.raises(AssertionError):
        run(check, tmp_path)


def test_sockets_need_a_host_that_has_them(install: Callable[..., None], tmp_path: Path) -> None:
    install(ADDS, SOCKET.format(ECHO))
    with pytest.raises(AssertionError, match="WebSockets need a host that has them"):
        run("test_a_malformed_socket_message_is_the_clients_error", tmp_path)


def test_every_check_has_a_saboteur() -> None:
    caught = {name for words, *_ in (*SABOTEURS.values(), *SOCKETS.values()) for name in CHECKS if words in name}
    assert sorted(set(CHECKS) - caught) == ["test_the_server_announces_it"]  # core announces it
