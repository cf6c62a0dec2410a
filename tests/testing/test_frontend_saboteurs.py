"""One broken frontend per check. That check must fail. The template is the sound one."""

from __future__ import annotations

import concurrent.futures
import importlib
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_testing import FrontendConformance

TEMPLATE = Path(__file__).parents[2] / "frontends/_template/src/headrace_template_frontend/__init__.py"
#: The check that must fail, a text of the template, and its replacement.
SABOTEURS = {
    "answers wrongly": (
        "get_their_own_answers",
        "np.asarray(tensor).tolist() for",
        "(np.asarray(tensor) + 1).tolist() for",
    ),
    "closes after one request": ("get_their_own_answers", "while line :=", "if line :="),
    "does not name the model": ("unknown_model_is_named", '{"error": error.message}', '{"error": "no"}'),
    "cuts the rows": ("wrong_shape", ".datatype.numpy) for", ".datatype.numpy)[:, :2] for"),
    "hides the peer": ("passes_the_interceptors", 'writer.get_extra_info("peername")[0]', '""'),
    "serves one connection at a time": (
        "an_idle_connection",
        "            while line :=",
        "            while len(self._callers) > 1 and reader is self._callers[list(self._callers)[1]]:\n"
        "                await asyncio.sleep(0.01)\n"
        "            while line :=",
    ),
    "blocks the event loop": (
        "block_the_event_loop",
        "            while line := await reader.readline():\n",
        '            while line := await reader.readline():\n                __import__("time").sleep(0.3)\n',
    ),
    "ignores a port in use": (
        "port_in_use",
        'raise Unavailable(f"sound: cannot listen on {address}:{port}: {error}") from error',
        "return",
    ),
    "does not name the port": ("port_in_use", "{address}:{port}: {error}", ""),
    "drops requests in flight": ("answers_requests_in_flight", "await asyncio.gather(*self._callers)", "pass"),
    "waits for idle connections": ("closes_idle_connections", "reader.feed_eof()", "pass"),
    "keeps the port": ("frees_the_port", "self._listener.close()", "pass"),
    "imports an internal module": (
        "imports_only_exports",
        "import numpy as np\n",
        "import numpy as np\nimport headrace.server\n",
    ),
}


class Sound(FrontendConformance):
    plugin, frontend = "sound_frontend", "sound"
    stops_in_s, hanging_s = 1, 1

    def options(self, port: int) -> dict[str, Any]:
        group = sys.modules[self.plugin].SoundOptions(enabled=True, address="127.0.0.1", port=port)
        return {"plugin_options": [group]}

    def infer(self, connection: socket.socket, model: str, x: Any) -> Any:
        connection.sendall(json.dumps({"model": model, "inputs": {"x": x.tolist()}}).encode() + b"\n")
        answer = json.loads(connection.makefile("rb").readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return np.array(answer["y"], np.float32)


CHECKS = [name for name in dir(Sound) if name.startswith("test_")]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs the template as a plugin, with one text replaced."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(old: str = "", new: str = "", module: str = "sound_frontend") -> None:
        text = TEMPLATE.read_text().replace("template", "sound").replace("Template", "Sound")
        assert old in text
        (tmp_path / f"{module}.py").write_text(text.replace(old, new, 1) if old else text)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[headrace]\n{module} = {module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()
        importlib.import_module(module)

    return install


def run(name: str, repository: Path) -> None:
    check = getattr(Sound(), name)
    if "imports_only" in name:
        check()
        return
    if "no_other_plugin" in name:
        check(repository)
        return
    with Sound().serving(repository) as served:
        check(served)


@pytest.mark.parametrize("name", CHECKS)
def test_a_sound_frontend_passes(install: Callable[..., None], headrace_repository: Path, name: str) -> None:
    install()
    run(name, headrace_repository)


@pytest.mark.parametrize("saboteur", SABOTEURS)
def test_the_check_fails(install: Callable[..., None], headrace_repository: Path, saboteur: str) -> None:
    named, old, new = SABOTEURS[saboteur]
    (name,) = [check for check in CHECKS if named in check]
    install(old, new)
    late = concurrent.futures.TimeoutError  # before Python 3.11, it is not the built-in one
    with pytest.raises((AssertionError, pytest.fail.Exception, OSError, TimeoutError, late, RuntimeError, ValueError)):
        run(name, headrace_repository)


def test_a_second_frontend_of_the_name_is_caught(install: Callable[..., None], headrace_repository: Path) -> None:
    install()
    install(module="twin_frontend")
    with pytest.raises(AssertionError, match="twin_frontend"):
        run("test_no_other_plugin_has_a_frontend_of_that_name", headrace_repository)


def test_a_frontend_that_no_server_finds_is_caught(install: Callable[..., None], tmp_path: Path) -> None:
    class Hidden(Sound):
        frontend = "hidden"

    install()
    with pytest.raises(AssertionError, match="no server can have frontend 'hidden': no plugin provides frontend"):
        Hidden().test_no_other_plugin_has_a_frontend_of_that_name(tmp_path)


def test_every_check_has_a_saboteur() -> None:
    caught = {check for named, _, _ in SABOTEURS.values() for check in CHECKS if named in check}
    assert set(CHECKS) - caught == {"test_no_other_plugin_has_a_frontend_of_that_name"}
