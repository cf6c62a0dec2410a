"""What the pages on parts show after the kit: the commands that serve the part, and the client that calls it."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.plugins import Plugins
from headrace_cli.command_line import read_options
from headrace_testing.serving import serve

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "write-a-backend",
    "write-a-cache",
    "write-a-frontend",
    "write-a-repository-agent",
    "write-a-scheduler",
    "write-a-storage",
    "write-an-extension",
    "write-an-interceptor",
]
InstallPage = Callable[[str], Path]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize("name", PAGES)
def test_the_client_of_a_page_prints_what_the_page_shows(
    name: str, install_page: InstallPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / f"{name}.md").read_text()
    folder = install_page(page)
    monkeypatch.chdir(folder)
    ((file, config),) = re.findall(r"`(models/\S+)`:\n\n```\n(.*?)```", page, re.DOTALL)
    Path(file).parent.mkdir(parents=True)
    Path(file).write_text(config)
    (commands,) = [block for block in blocks(page, "sh") if "headrace serve" in block]
    *before, served = commands.replace(".venv/bin/python", sys.executable).splitlines()
    subprocess.run(["bash", "-ec", "\n".join(before)], check=True)
    words = shlex.split(served.replace("$PWD", str(folder)))[2:]
    (client,) = [block for block in blocks(page, "py") if "localhost:" in block or '("localhost"' in block]
    if "8004" in client:
        words.append(f"--lines-port={(port := free_port())}")
        client = client.replace("8004", str(port))
    options, _ = read_options(words, {}, tuple(Plugins.discover().options))
    given: dict[str, Any] = {"cache_config": options.cache_config, "plugin_options": options.plugin_options}
    repository: Any = options.model_repository[0]  # a path, or the URL of a storage
    printed = io.StringIO()
    with (
        serve(repository, listen=True, **given) as server,
        contextlib.redirect_stdout(printed),
    ):
        exec(client.replace("localhost:8000", f"127.0.0.1:{server.options.http_port}"), {})
    shown = re.findall(r"print\(.*\)  # (.*)", client)
    assert shown
    assert [text for text in shown if text not in printed.getvalue()] == []


def test_the_shorter_interceptors_of_the_page_do_what_it_says(
    install_page: InstallPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "write-an-interceptor.md").read_text()
    module, *_ = blocks(page, "python")
    source = "\n".join(blocks(page, "py")[1:]).replace("return [Tokens]", "return [Tokens, Record]")
    install_page(page.replace(module, source))
    (tmp_path / "models/echo/1").mkdir(parents=True)
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }'
    (tmp_path / "models/echo/config.pbtxt").write_text(f'backend: "identity" max_batch_size: 8 {tensors}')
    http = pytest.importorskip("tritonclient.http")
    with serve(tmp_path / "models", listen=True) as server:
        caller = http.InferenceServerClient(f"127.0.0.1:{server.options.http_port}")
        x = http.InferInput("x", [1, 1], "FP32")
        x.set_data_from_numpy(np.ones((1, 1), np.float32))
        asked = caller.get_model_metadata, lambda name, headers: caller.infer(name, [x], headers=headers)
        outcomes = []
        for token in ("", "Bearer gu3st", "Bearer t0ps3cret"):
            for ask in asked:
                try:
                    ask("echo", headers={"Authorization": token})
                    outcomes.append("ok")
                except http.InferenceServerException as error:
                    outcomes.append(error.status())
        caller.close()
    assert outcomes == ["401", "401", "403", "ok", "ok", "ok"]
    monkeypatch.delitem(sys.modules, "headrace_keys_interceptor", raising=False)
    install = source.replace("return [Tokens, Record]", "return [Remember]")
    (tmp_path / "site/headrace_keys_interceptor.py").write_text(install)
    with serve(tmp_path / "models", listen=True) as server:
        caller = http.InferenceServerClient(f"127.0.0.1:{server.options.http_port}")
        caller.infer("echo", [x], headers={"Authorization": "Bearer t0ps3cret"})
        caller.close()
        (remember,) = server.engine.admission.interceptors  # type: ignore[union-attr]
        assert remember.permits[b"Bearer t0ps3cret"] == {"echo": "alice"}  # type: ignore[index]
