"""``headrace check --security`` agrees with a running server for each operation and caller."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from headrace import Model, SecurityReview, Server, ServerOptions, read_config
from headrace.models.configuring import make_backend
from headrace.models.executor_choice import choose_executor
from headrace_cli import main
from headrace_inspect import security_report
from tests.core.models.test_admission import PATHS

if TYPE_CHECKING:
    from tests.conftest import Headrace

CONFIG = """backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
#: The outcomes of a refused operation, besides 401 and 403.
REFUSALS = ("This protocol is restricted", "explicit model load / unload is not allowed", "shared memory is disabled")
#: The methods and paths of the operations that this test requests over HTTP.
ASKED = {name: place for name, place in PATHS.items() if name not in ("own", "generate")} | {
    "generate": ("POST", "/v2/models/m/generate"),
    "traffic": ("GET", "/v2/models/m/traffic"),
    "traffic_change": ("PUT", "/v2/models/m/traffic"),
    "openapi": ("GET", "/openapi.json"),
    "dashboard": ("GET", "/dashboard"),
    "dashboard_models": ("GET", "/dashboard/models.json"),
    "dashboard_log": ("GET", "/dashboard/log.json"),
    "openai_models": ("GET", "/v1/models"),
    "chat_completions": ("POST", "/v1/chat/completions"),
    "completions": ("POST", "/v1/completions"),
    "responses": ("POST", "/v1/responses"),
    "embeddings": ("POST", "/v1/embeddings"),
    "rerank": ("POST", "/v1/rerank"),
    "transcriptions": ("POST", "/v1/audio/transcriptions"),
}


def write_models(folder: Path) -> Path:
    (folder / "models" / "m" / "1").mkdir(parents=True)
    (folder / "models" / "m" / "config.pbtxt").write_text(CONFIG)
    return folder / "models"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("security")


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    """The keys of two principals: one may infer, the other may do everything."""
    found = {}
    for name, operations in (("alice", "inference,metadata"), ("root", "*")):
        out = io.StringIO()
        with redirect_stdout(out):
            assert main(["keys", "add", str(folder / "access.json"), name, "--operations", operations]) == 0
        found[name] = out.getvalue().strip()
    return found


@pytest.fixture(scope="module")
def pem(folder: Path) -> Path:
    """A certificate that is its own authority, for server and client, and its key."""
    openssl = shutil.which("openssl")
    assert openssl
    files = ["-keyout", str(folder / "a.key"), "-out", str(folder / "a.crt")]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run([openssl, "req", "-x509", *kind, *names, *files], check=True, capture_output=True)
    return folder / "a.crt"


@pytest.fixture(scope="module")
def words(folder: Path, keys: dict[str, str], pem: Path) -> list[str]:
    """A command line with something of everything: keys, a header, a client certificate, what is closed and open."""
    return [
        f"--model-repository={write_models(folder)}",
        f"--access-keys={folder / 'access.json'}",
        "--access-open=health,statistics,metrics",
        "--security-closed=trace,log_settings,reflection",
        "--model-control-mode=explicit",
        "--load-model=m",
        "--http-restricted-api=model-repository,shared-memory:x-admin=s3cret",
        "--grpc-use-ssl=true",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={pem}",
        f"--grpc-server-key={pem.with_suffix('.key')}",
        f"--grpc-root-cert={pem}",
    ]


@pytest.fixture(scope="module")
def server(words: list[str], keep_serving: Callable[..., Headrace]) -> Headrace:
    return keep_serving(*words)


def may(who: str, headers: Mapping[str, str], keys: Mapping[str, str], has_certificate: bool = True) -> bool:
    """True if a caller with ``headers`` is one of ``who``."""
    principal = next((name for name, key in keys.items() if headers.get("authorization") == f"Bearer {key}"), "")
    for condition in who.split(" and "):
        kind, _, rest = condition.partition(" ")
        is_met = {
            "anybody": True,
            "nobody": False,
            "callers": rest.split()[-1:] and rest.split()[-1].strip("'") in headers,  # with the header 'x-admin'
            "principals:": principal in rest.split(", "),
            "clients": has_certificate,
        }[kind]
        if not is_met:
            return False
    return True


def callers(keys: Mapping[str, str]) -> Iterator[dict[str, str]]:
    for admin in ({}, {"x-admin": "s3cret"}):
        yield admin
        for key in (*keys.values(), "hr_00000000_" + "x" * 43):
            yield {**admin, "authorization": f"Bearer {key}"}


def test_the_review_agrees_with_the_rights_of_each_caller(
    server: Headrace, words: list[str], keys: dict[str, str], pem: Path
) -> None:
    review = SecurityReview.of_command_line(words)
    ports = {port.transport: port for port in review.ports}
    report = {
        transport: {str(each): review.allowed_callers(each, port) for each in port.operations}
        for transport, port in ports.items()
    }
    assert report["http"].keys() == ASKED.keys()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}", timeout=60) as client:
        for headers in callers(keys):
            for operation, (method, path) in ASKED.items():
                reply = client.request(method, path, headers=headers)
                refused = reply.status_code in (401, 403) or any(text in reply.text for text in REFUSALS)
                who = report["http"][operation]
                assert refused != may(who, headers, keys), (operation, headers, who, reply.status_code, reply.text)
            page = httpx.get(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics", headers=headers)
            assert (page.status_code != 200) != may(report["metrics"]["metrics"], headers, keys)
    operations = set()
    with channel(server, ports["grpc"].tls is not None, pem) as opened:
        for headers in callers(keys):
            for method in grpc_methods():
                who = report["grpc"][str(method.operation)]
                path, metadata = f"/{method.service}/{method.name}", tuple(headers.items())
                if method.stream is None:
                    call: Any = opened.unary_unary(path, bytes, bytes).future(b"", timeout=30, metadata=metadata)
                else:
                    call = opened.stream_stream(path, bytes, bytes)(iter([]), timeout=30, metadata=metadata)
                refused = call.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
                refused = refused or any(text in call.details() for text in REFUSALS)
                assert refused != may(who, headers, keys), (path, headers, who, call.code(), call.details())
                operations.add(str(method.operation))
    assert operations == report["grpc"].keys()
    if ports["grpc"].tls is not None:
        assert report["grpc"]["live"] == "clients with a certificate"
        with channel(server, True, pem, has_certificate=False) as opened:
            call = opened.unary_unary("/inference.GRPCInferenceService/ServerLive", bytes, bytes).future(
                b"", timeout=10
            )
            assert call.code() is grpc.StatusCode.UNAVAILABLE


def grpc_methods() -> list[Any]:
    from headrace import Server, ServerOptions
    from headrace_grpc.rpc_table import rpcs

    return rpcs(Server(ServerOptions(model_repository=("x",))).engine)


def channel(server: Headrace, is_tls: bool, pem: Path, has_certificate: bool = True) -> grpc.Channel:
    place = f"localhost:{server.grpc}"
    if not is_tls:
        return grpc.insecure_channel(place)
    own = (pem.with_suffix(".key").read_bytes(), pem.read_bytes()) if has_certificate else (None, None)
    return grpc.secure_channel(place, grpc.ssl_channel_credentials(pem.read_bytes(), *own))


# ---------------------------------------------------------------------- the command


@pytest.fixture
def models(tmp_path: Path) -> str:
    return f"--model-repository={write_models(tmp_path)}"


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["check", "--security", *words])
    return code, *capsys.readouterr()


def test_a_server_without_flags_is_open(capsys: pytest.CaptureFixture[str], models: str) -> None:
    code, out, _ = check(capsys, "--", "tritonserver", models, "--http-port=9000")
    assert code == 1
    assert "HTTP on 0.0.0.0:9000\n  OPEN  no TLS: every machine that reaches the address\n" in out
    assert "  ok    load, unload, shared_memory_register, shared_memory_unregister: nobody\n" in out
    assert out.endswith("things are open that --security-profile=public closes\n")


def test_a_public_server_is_closed_also_in_json(
    capsys: pytest.CaptureFixture[str], models: str, keys: dict[str, str], folder: Path, pem: Path
) -> None:
    key = pem.with_suffix(".key")
    files = [f"--{name}={value}" for kind in ("http", "grpc") for name, value in
             ((f"{kind}-use-ssl", "true"), (f"{kind}-server-cert", pem), (f"{kind}-server-key", key))]  # fmt: skip
    words = ["--", models, "--security-profile=public", *files, f"--access-keys={folder / 'access.json'}"]
    code, out, _ = check(capsys, *words)
    assert (code, out.splitlines()[-1]) == (0, "no things are open that --security-profile=public closes"), out
    assert "infer, model_metadata, server_metadata" in out
    assert ": principals: alice, root\n" in out
    assert "s3cret" not in out
    key.chmod(0o644)
    try:
        code, out, _ = check(capsys, "--json", *words)
    finally:
        key.chmod(0o600)
    (found,) = [line for line in json.loads(out) if line["is_open"] and line["where"] == str(key)][:1]
    assert (code, found["what"]) == (1, "the private key can be read or written (mode 0644)")
    assert found["who"] == "its group and all users"


def test_a_port_that_forwards_to_the_metrics_page_serves_it(models: str, keys: dict[str, str], folder: Path) -> None:
    words = [models, "--metrics-address=127.0.0.1", f"--access-keys={folder / 'access.json'}"]
    opened = ["--allow-vertex-ai=true", "--access-open=live,metrics"]  # its header x-vertex-ai-triton-redirect: metrics
    found = [line for line in SecurityReview.of_command_line([*words, *opened]).exposures() if "metrics" in line.what]
    assert [(line.where, line.is_open) for line in found] == [
        ("metrics on 127.0.0.1:8002", False),
        ("vertex_ai on 0.0.0.0:8080", True),
    ]


def test_a_host_with_fewer_limits_is_named(models: str) -> None:
    hosts = [models, "--http-server=hypercorn", "--grpc-server=grpcio", "--grpc-address=127.0.0.1"]
    lines = SecurityReview.of_command_line([*hosts, "--metrics-address=127.0.0.1"]).exposures()
    assert [line.what for line in lines if line.where == "limits" and line.is_open] == ["--http-server=hypercorn"]


def test_a_host_without_a_handshake_limit_is_named(models: str) -> None:
    for tls, is_reported in ((("--grpc-use-ssl=true",), True), ((), False)):
        lines = SecurityReview.of_command_line([models, "--grpc-server=grpcio", *tls]).exposures()
        (line,) = [line for line in lines if line.what == "--grpc-server=grpcio"]
        assert ("the number of TLS handshakes" in line.who) is is_reported


#: Configs by backend whose models run code of their files, and that code.
CODE = {
    "python": [("", "model.py"), ('default_model_filename: "a.py"', "a.py")],
    "pytorch": [
        ('runtime: "model.py"', "model.py"),
        ('parameters { key: "trust" value { string_value: "yes" } }', "model.pt (parameter 'trust')"),
        ("", ""),
    ],
    "tensorflow": [
        ('platform: "tensorflow_savedmodel" parameters { key: "trust" value { string_value: "true" } }',
         "model.savedmodel (parameter 'trust')"),
        ('model_operations { op_library_filename: "libops.so" }', "libops.so"),
        ("", ""),
    ],
    "onnxruntime": [('model_operations { op_library_filename: "libops.so" }', "libops.so"), ("", "")],
}  # fmt: skip


@pytest.mark.parametrize("backend", CODE)
@pytest.mark.parametrize("isolation", ["", "thread", "process"])
def test_models_that_run_code_of_the_repository_are_named(tmp_path: Path, backend: str, isolation: str) -> None:
    isolation_text = f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}' if isolation else ""
    for number, (config, _) in enumerate(CODE[backend]):
        (tmp_path / f"m{number}" / "1").mkdir(parents=True)
        (tmp_path / f"m{number}" / "config.pbtxt").write_text(f'backend: "{backend}" {config} {isolation_text}')
    server = Server(ServerOptions(model_repository=(str(tmp_path),)))
    if backend not in server.plugins.backends.names():
        pytest.skip(f"needs the backend '{backend}'")
    lines = {line.what: line for line in SecurityReview(server).exposures() if line.where == "models"}
    assert set(lines) == {f"m{number}, {code}" for number, (_, code) in enumerate(CODE[backend]) if code}
    # The oracle: what a load chooses.
    made = make_backend(backend, server.plugins.backends, server.plugins.hook, server.options)
    for name, line in lines.items():
        folder = tmp_path / name.partition(",")[0]
        model = Model(folder.name, 1, folder / "1", read_config(folder / "config.pbtxt"))
        choice = choose_executor(made, model, server.plugins.executors)
        assert line.is_open is choice.kind.runs_in_server
        place = "the server's process" if line.is_open else "a process of its own"
        assert line.who == f"runs code of the repository in {place}"


@pytest.mark.parametrize("program", [[], ["headrace", "serve"], ["tritonserver"], ["/opt/bin/tritonserver"]])
def test_the_program_before_the_flags_is_left_out(program: list[str]) -> None:
    assert security_report._flags([*program, "--id=serve", "serve"]) == ["--id=serve", "serve"]


def test_files_writable_by_others_are_named(capsys: pytest.CaptureFixture[str], models: str, tmp_path: Path) -> None:
    (tmp_path / "models").chmod(0o777)
    code, out, _ = check(capsys, "--", models, "--http-address=127.0.0.1", "--allow-grpc=false")
    assert code == 1
    assert "models, which are code, can be written (mode 0777): its group and all users" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--", "--bad"], "unrecognized option '--bad'"),
        ([], "--model-repository must be specified"),
        (["--", "--model-repository=x", "--http-restricted-api=s3cret"], "--http-restricted-api"),
    ],
)
def test_flags_that_serve_refuses_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    code, out, err = check(capsys, *words)
    assert (code, out) == (1, "")
    assert text in err


def test_a_review_does_not_change_the_log(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert security_report.review([models], is_json=True) == 1
    assert logging.root.manager.disable == logging.NOTSET
