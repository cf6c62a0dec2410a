"""A server with a secret in every place shows none: in its log at the highest level, its access log and audit log, its
answers, its metrics, and the command lines of its processes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from headrace_cli import main

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: The prefix of all secrets, plain and in base64.
MARK = "S3CRET"
CONFIG = f"""backend: "identity" max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: -1 }} output {{ name: "y" data_type: TYPE_FP32 dims: -1 }}
parameters {{ key: "api_key" value {{ string_value: "{MARK}-parameter" }} }}
"""
IN_PROCESS = 'parameters { key: "isolation" value { string_value: "process" } }'
BODY = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
FILE = f"password = '{MARK}-file'; raise".encode()


@pytest.fixture
def key(tmp_path: Path) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["keys", "add", str(tmp_path / "access.json"), "alice", "--operations", "*"]) == 0
    return out.getvalue().strip()


@pytest.fixture
def server(serve: Callable[..., Headrace], tmp_path: Path, key: str) -> Headrace:
    for name, more in (("m", ""), ("p", IN_PROCESS)):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(CONFIG + more)
    flags = tmp_path / "server.flags"
    flags.write_text(
        "\n".join(
            [
                f"--model-repository={tmp_path / 'models'}",
                "--model-control-mode=explicit",
                "--load-model=*",
                "--model-files-from=any",
                "--log-verbose=3",
                f"--http-restricted-api=trace:x-admin={MARK}-restricted",
                "--trace-config=mode=opentelemetry",
                f"--trace-config=opentelemetry,url=http://user:{MARK}-trace@127.0.0.1:1/v1/traces",
                "--trace-config=opentelemetry,bsp_schedule_delay=10",
                "--trace-config=level=TIMESTAMPS",
                "--trace-config=rate=1",
                f"--backend-config=identity,api_key={MARK}-backend",
                f"--access-keys={tmp_path / 'access.json'}",
                f"--access-log-file={tmp_path / 'access.log'}",
                f"--audit-log-file={tmp_path / 'audit.log'}",
            ]
        )
    )
    flags.chmod(0o600)
    return serve(f"@{flags}")


def requests(key: str) -> Iterator[tuple[str, str, dict[str, str], Any]]:
    """Method, path, headers and body of what brings secrets, most of which fails."""
    mine = {"authorization": f"Bearer {key}"}
    yield "GET", f"/v2/models/m?api_key={MARK}-query", mine, None
    yield "POST", f"/v2/models/none/infer?key={MARK}-query", mine, BODY
    for sent in (f"Bearer {MARK}-bearer", f"Basic {MARK}-basic", f"Bearer {key}x", f"Bearer eyJhbGciOiJ9.eyJ9.{MARK}"):
        yield "GET", "/v2/models/m", {"authorization": sent}, None
    yield "GET", "/v2/models/m", {"x-api-key": f"{MARK}-key"}, None
    for admin in ("guess", "restricted"):
        yield "GET", "/v2/trace/setting", {**mine, "x-admin": f"{MARK}-{admin}"}, None
    config = {"backend": "identity", "parameters": {"password": {"string_value": f"{MARK}-config"}}}
    for document in (config, {**config, "unknown": 1}, {**config, "backend": f"{'python'}"}):
        files = {"config": json.dumps(document), "file:1/model.py": base64.b64encode(FILE).decode()}
        yield "POST", "/v2/repository/models/m/load", mine, {"parameters": files}
    yield "POST", "/v2/models/p/infer", mine, BODY
    yield "POST", "/v2/models/p/infer", mine, {"inputs": []}
    yield "GET", "/v2/models/p/explain", mine, None
    yield "POST", "/v2/repository/index", mine, None


def command_lines(pid: int) -> Mapping[int, str]:
    """The command lines of a process and of its children."""
    children = [each for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]
    return {each: Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ") for each in (pid, *map(int, children))}


def test_no_secret_is_shown_anywhere(server: Headrace, tmp_path: Path, key: str) -> None:
    shown: dict[str, str] = {}
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}", timeout=60) as client:
        for method, path, headers, body in requests(key):
            reply = client.request(method, path, headers=headers, json=body)
            shown[f"{method} {path} {headers} {body}"] = reply.text
    mine = {"authorization": f"Bearer {key}"}
    shown["metrics"] = httpx.get(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics", headers=mine).text
    lines = command_lines(server.process.pid)
    assert len(lines) > 1, "there is a process of a model"
    shown |= {f"process {pid}": line for pid, line in lines.items()}
    server.finish(15)
    shown |= {name: (tmp_path / name).read_text() for name in ("access.log", "audit.log")} | {"log": server.log}
    assert "Server side auto-completed config" in server.log
    assert "refused http model_metadata" in shown["audit.log"]
    secrets = (MARK, key, key.rpartition("_")[2], base64.b64encode(FILE).decode()[:20])
    found = [
        (where, text[max(0, text.find(secret) - 80) :][:160])
        for where, text in shown.items()
        for secret in secrets
        if secret in text
    ]
    assert found == []


@pytest.mark.parametrize(
    "flags",
    [
        [f"--model-repository=s3://user:{MARK}@host/bucket"],
        [f"--trace-config=opentelemetry,url=ftp://user:{MARK}@host"],
    ],
)
def test_a_flag_that_is_refused_is_named_without_its_secret(
    run_headrace: Callable[..., Headrace], tmp_path: Path, flags: list[str]
) -> None:
    server = run_headrace(f"--model-repository={tmp_path}", "--log-verbose=3", *flags)
    assert server.finish() == 1
    assert MARK not in server.log
