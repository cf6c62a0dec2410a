"""``headrace load``, ``unload`` and ``index``, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Server
from headrace_cli import main
from headrace_testing.serving import serve

_CONFIG = """backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    for name, config in (("m", _CONFIG), ("broken", _CONFIG.replace("FP32", "FP33"))):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    with serve(Path(repository), listen=True, model_control_mode="explicit") as server:
        yield server


def run(server: Server, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main([*words, f"--url=http://127.0.0.1:{server.options.http_port}"])
    return code, *capsys.readouterr()


def test_a_model_is_loaded_listed_and_unloaded(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, capsys, "load", "m") == (0, "model 'm' is loaded\n", "")
    assert server.served("m")
    code, page, _ = run(server, capsys, "index")
    assert code == 0
    assert [line.split("|")[1:4] for line in page.splitlines() if "| m " in line] == [
        [" m      ", " 1       ", " READY "]
    ]
    assert "| broken |" in page
    listed = run(server, capsys, "index", "--json", "--ready")[1]
    assert json.loads(listed) == [{"name": "m", "version": "1", "state": "READY"}]
    assert run(server, capsys, "unload", "m") == (0, "model 'm' takes no more requests\n", "")
    assert run(server, capsys, "index", "--ready")[1] == "no models\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("load", "broken"), "FP33"),
        (("load", "nobody"), "failed to load 'nobody'"),
        (("load", "../m"), "failed to load '..%2Fm'"),
        (("unload", "m", "--header=secret"), "expected NAME:VALUE"),
        (("index", "m"), "Unexpected argument: m"),
    ],
)
def test_a_refusal_of_the_server_is_one_line(
    server: Server, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    try:
        code, out, err = run(server, capsys, *words)
    except SystemExit as ended:
        code, out, err = int(str(ended.code)), *capsys.readouterr()
    assert (code, out) == (1, "")
    assert why in err.splitlines()[-1]
