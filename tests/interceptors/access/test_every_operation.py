"""Keys, tokens and certificates, for every operation of every protocol, over real sockets."""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tritonclient import grpc as grpc_client
from tritonclient import http as http_client
from tritonclient.utils import InferenceServerException

from headrace import HttpRoute, Operation
from headrace_access import AccessControl, AccessOptions
from headrace_access.key_file import new_key
from headrace_hosts import file_changes
from headrace_http.plugin_routes import read_route
from headrace_testing.serving import serve
from tests.core.models.test_admission import PATHS, rpcs
from tests.interceptors.access.access_files import ALL, OTHER_RSA, TENANT, extend, keys, make, token, write_issuer

CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
LABS = [{"models": ["own*"], "operations": ["inference", "health"]}]


class Running(NamedTuple):
    """A server, and what its callers may show: a key, a token or a certificate of each principal."""

    server: Any
    folder: Path
    keys: dict[str, str]

    @property
    def ports(self) -> dict[str, int]:
        return {each.protocol or each.name: each.port for each in self.server.frontends}

    @property
    def path(self) -> Path:
        return self.folder / "access.json"


def serving(folder: Path, **options: Any) -> Iterator[Running]:
    for name in ("own_1", "other"):
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(CONFIG)
    made = make(folder / "access.json", nobody=[], admin=ALL, tenant=TENANT)
    extend(
        folder / "access.json", roles={"labs": LABS, "admins": ALL}, certificates={"roles": "organizationalUnitName"}
    )
    write_issuer(folder / "access.json", roles="groups")
    settings = {"listen": True, "metrics_port": 0, "allow_metrics": True, **options}
    groups = [AccessOptions(keys=str(folder / "access.json"))]
    with serve(folder / "models", plugin_options=groups, **settings) as server:
        yield Running(server, folder, made)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    cloud = {"allow_sagemaker": True, "sagemaker_port": 0} if find_spec("headrace_cloud_routes") else {}
    for running in serving(tmp_path_factory.mktemp("plain"), **cloud):
        for port in running.server.frontends:
            if port.name == "sagemaker":
                port.models.urls |= dict.fromkeys(("own_1", "other_1"), "/opt/ml/models/x/model")  # as if loaded
        yield running


# ---------------------------------------------------------------------- certificates


def issue(folder: Path, name: str, unit: str = "") -> None:
    """Write the key and the certificate ``name``, signed by ``ca``; or by itself, if it is ``ca``."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    names += [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit)] if unit else []
    signer: Any = key
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")])
    if name != "ca":
        signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(names))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(name == "ca", None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    pem = serialization.PrivateFormat.PKCS8
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, pem, serialization.NoEncryption())
    )
    (folder / f"{name}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server that requires certificates on every port."""
    folder = tmp_path_factory.mktemp("mutual")
    units = {"lab": "labs", "boss": "admins"}
    for name in ("ca", "localhost", "nobody", "stranger", "admin", "tenant", *units):
        issue(folder, name, units.get(name, ""))
    files: dict[str, Any] = {"metrics_use_ssl": True}
    for port in ("http", "grpc"):
        files |= {f"{port}_{name}": True for name in ("use_ssl", "use_ssl_mutual")}
        files |= {
            f"{port}_server_{kind}": str(folder / f"localhost.{end}") for kind, end in (("cert", "crt"), ("key", "key"))
        }
        files[f"{port}_root_cert"] = str(folder / "ca.crt")
    yield from serving(folder, **files)


class Client(NamedTuple):
    """The clients of one caller: HTTP, metrics port, and a channel with its metadata."""

    http: httpx.Client
    metrics: httpx.Client
    grpc: grpc.Channel
    metadata: Any = ()

    def close(self) -> None:
        self.http.close()
        self.metrics.close()
        self.grpc.close()


def with_header(running: Running, credential: str | None) -> Client:
    headers = {} if credential is None else {"authorization": f"Bearer {credential}"}
    http, metrics = (
        httpx.Client(base_url=f"http://127.0.0.1:{running.ports[name]}", headers=headers)
        for name in ("http", "metrics")
    )
    channel = grpc.insecure_channel(f"127.0.0.1:{running.ports['grpc']}")
    return Client(http, metrics, channel, tuple(headers.items()))


def with_certificate(running: Running, name: str) -> Client:
    folder, ports = running.folder, running.ports
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    http, metrics = (
        httpx.Client(base_url=f"https://localhost:{ports[each]}", verify=context) for each in ("http", "metrics")
    )
    files = [(folder / each).read_bytes() for each in ("ca.crt", f"{name}.key", f"{name}.crt")]
    return Client(
        http, metrics, grpc.secure_channel(f"localhost:{ports['grpc']}", grpc.ssl_channel_credentials(*files))
    )


# ---------------------------------------------------------------------- every operation


def paths(running: Running) -> Iterator[tuple[str, str]]:
    """Yield methods and paths of core and of each route of installed plugins, except health."""
    yield from (where for name, where in PATHS.items() if name not in ("live", "ready", "own"))
    for route in running.server.engine.additions(HttpRoute):
        if route.operation in (Operation.LIVE, Operation.READY):
            continue
        method, path = read_route(type(route))
        for text in (re.sub(r"\[.*?\]", "", path.text), path.text.replace("[", "").replace("]", "")):
            if "{" in text or text == path.text or path.pattern.fullmatch(text):
                yield method, re.sub(r"\{.*?\}", "1" if "versions" in text else "own_1", text)


def outcomes_of(client: Client, running: Running) -> dict[str, int | str]:
    """Return how each operation ends for ``client``: a status of HTTP, or a code of gRPC. Bodies are rubbish."""
    found: dict[str, int | str] = {}
    for method, where in paths(running):
        reply = client.http.request(method, where, content=b"\xff{")
        assert ("www-authenticate" in reply.headers) is (reply.status_code == 401)
        found[f"{method} {where}"] = reply.status_code
    found["GET /metrics"] = client.metrics.get("/metrics").status_code
    for service, method in rpcs(running.server.engine):
        if method.operation in (Operation.LIVE, Operation.READY):
            continue
        where, metadata = f"/{service}/{method.name}", client.metadata
        if method.stream is None:
            call: Any = client.grpc.unary_unary(where, bytes, bytes).future(b"\xff", metadata=metadata, timeout=30)
        else:
            call = client.grpc.stream_stream(where, bytes, bytes)(iter([b"\xff"]), metadata=metadata, timeout=30)
        found[where] = call.code().name
    return found


ADMINS: Any = {"groups": ["admins"]}
#: The client and the outcome of every operation, by the credential of the caller.
CALLERS: dict[str, tuple[Callable[[Running], Client], str]] = {
    "nothing": (lambda server: with_header(server, None), "unknown"),
    "rubbish": (lambda server: with_header(server, "hr_wrong"), "unknown"),
    "a key that is not known": (lambda server: with_header(server, new_key()[0]), "unknown"),
    "a key without rights": (lambda server: with_header(server, server.keys["nobody"]), "refused"),
    "a key of everything": (lambda server: with_header(server, server.keys["admin"]), "allowed"),
    "a token of another key": (lambda server: with_header(server, token(OTHER_RSA, **ADMINS)), "unknown"),
    "an expired token": (lambda server: with_header(server, token(exp=1, **ADMINS)), "unknown"),
    "a token without rights": (lambda server: with_header(server, token(sub="stranger")), "refused"),
    "a token of a principal": (lambda server: with_header(server, token(sub="admin")), "allowed"),
    "a token with a role": (lambda server: with_header(server, token(sub="stranger", **ADMINS)), "allowed"),
    "a certificate of a stranger": (lambda server: with_certificate(server, "stranger"), "refused"),
    "a certificate without rights": (lambda server: with_certificate(server, "nobody"), "refused"),
    "a certificate of a principal": (lambda server: with_certificate(server, "admin"), "allowed"),
    "a certificate with a role": (lambda server: with_certificate(server, "boss"), "allowed"),
}


@pytest.mark.parametrize("name", CALLERS)
def test_every_operation_authenticates_its_caller(name: str, request: pytest.FixtureRequest) -> None:
    make_client, verdict = CALLERS[name]
    running: Running = request.getfixturevalue("mutual" if "certificate" in name else "plain")
    client = make_client(running)
    try:
        found = outcomes_of(client, running)
    finally:
        client.close()
    assert len(found) > 60
    if verdict == "allowed":
        assert not set(found.values()) & {401, 403, "UNAUTHENTICATED", "PERMISSION_DENIED"}
    else:
        expected = {"unknown": (401, "UNAUTHENTICATED"), "refused": (403, "PERMISSION_DENIED")}[verdict]
        assert {name: end for name, end in found.items() if end not in expected} == {}


def test_a_wrong_key_is_refused_also_with_a_right_certificate(mutual: Running) -> None:
    client = with_certificate(mutual, "admin")
    for headers, status in (
        ({}, 200),
        ({"authorization": "Bearer hr_wrong"}, 401),
        ({"x-api-key": "hr_wrong"}, 401),
        ({"authorization": f"Bearer {mutual.keys['nobody']}"}, 403),
        ({"authorization": f"Bearer {token(sub='nobody')}"}, 403),
    ):
        assert client.http.get("/v2", headers=headers).status_code == status
    client.close()


def test_a_certificate_is_accepted_only_if_the_file_allows_it(mutual: Running, changes_at_once: None) -> None:
    client = with_certificate(mutual, "lab")
    before = mutual.path.read_text()
    try:
        assert client.http.get("/v2/models/own_1/ready").status_code == 200
        document = json.loads(before)
        del document["certificates"]
        mutual.path.write_text(json.dumps(document))
        until(client, 401)
    finally:
        mutual.path.write_text(before)
        until(client, 200)
        client.close()


def test_a_certificate_is_authorized_once_per_connection(mutual: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[str] = []
    admit = AccessControl.admit

    def note(access: AccessControl, caller: Any, operation: Any, model: str) -> Any:
        decided.append(f"{caller.transport} {caller.principal} {model}")
        return admit(access, caller, operation, model)

    monkeypatch.setattr(AccessControl, "admit", note)
    document = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [3]}]}
    tensor = grpc_client.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    files = {
        name: str(mutual.folder / file)
        for name, file in (
            ("root_certificates", "ca.crt"),
            ("private_key", "lab.key"),
            ("certificate_chain", "lab.crt"),
        )
    }
    with (
        closing(with_certificate(mutual, "lab")) as lab,
        closing(with_certificate(mutual, "nobody")) as nobody,
        grpc_client.InferenceServerClient(f"localhost:{mutual.ports['grpc']}", ssl=True, **files) as client,
    ):
        for _ in range(3):
            reply = lab.http.post("/v2/models/own_1/infer", json=document)
            assert reply.json()["outputs"][0]["data"] == [3]
            assert client.infer("own_1", [tensor]).as_numpy("y").tolist() == [[1]]
            assert nobody.http.post("/v2/models/own_1/infer", json=document).status_code == 403
            assert lab.http.post("/v2/models/other/infer", json=document).status_code == 403
    assert sorted(decided) == [
        *("grpc lab own_1", "http lab other", "http lab other", "http lab other", "http lab own_1"),
        *["http nobody own_1"] * 3,
    ]


# ---------------------------------------------------------------------- what is not told


def answers_on(client: httpx.Client, model: str, **sent: Any) -> list[Any]:
    """Return all answers on ``model``, without its name."""
    found = []
    for method, where in (
        *(
            ("GET", f"/v2/models/{model}{end}")
            for end in ("", "/config", "/stats", "/ready", "/versions/1", "/traffic")
        ),
        *(("POST", f"/v2/models/{model}/{end}") for end in ("infer", "generate", "versions/7/infer", "nothing")),
        *(("POST", f"/v2/repository/models/{model}/{end}") for end in ("load", "unload")),
        ("DELETE", f"/v2/models/{model}/infer"),
    ):
        reply = client.request(method, where, **sent)
        headers = {name: value for name, value in reply.headers.items() if name not in ("date", "content-length")}
        found.append((reply.status_code, headers, reply.text.replace(model, "N")))
    return found


def answered(port: int, credential: str | None, target: str) -> list[Any]:
    """Return what SageMaker's port answers of two models of the path, with ``target`` in the header."""
    headers = {"X-Amzn-SageMaker-Target-Model": target}
    headers |= {} if credential is None else {"authorization": f"Bearer {credential}"}
    document = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [3]}]}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/models", headers=headers) as client:
        replies = [client.post(f"/{name}/invoke", json=document) for name in ("own_1", "other_1")]
    return [(each.status_code, each.headers.get("www-authenticate"), each.text) for each in replies]


@pytest.mark.skipif(find_spec("headrace_cloud_routes") is None, reason="needs the ports of clouds")
@pytest.mark.parametrize(("credential", "statuses"), [("none", [401, 401]), ("key", [200, 403]), ("token", [200, 403])])
def test_no_target_of_sagemaker_reveals_which_models_exist(
    plain: Running, credential: str, statuses: list[int]
) -> None:
    port = plain.ports["sagemaker"]
    sent = {"none": None, "key": plain.keys["tenant"], "token": token(sub="tenant")}[credential]
    there, absent = answered(port, sent, "other"), answered(port, sent, "never")
    assert there == absent
    assert [status for status, *_ in there] == statuses
    assert sent is None or json.loads(there[0][2])["model_name"] == "own_1"
    (allowed, *_), _ = answered(port, plain.keys["admin"], "other")
    assert allowed == 200
    assert json.loads(answered(port, plain.keys["admin"], "other")[1][2])["model_name"] == "other"


def logged(caplog: pytest.LogCaptureFixture, model: str) -> list[str]:
    return [each.getMessage().replace(model, "N") for each in caplog.records if each.name.startswith("headrace")]


@pytest.mark.parametrize("credential", ["none", "key", "token"])
def test_no_refusal_reveals_which_models_exist(
    plain: Running, credential: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent = {"none": None, "key": plain.keys["tenant"], "token": token(sub="tenant")}[credential]
    client = with_header(plain, sent)
    with caplog.at_level("DEBUG"):
        caplog.clear()
        there, log_of_one = answers_on(client.http, "other"), logged(caplog, "other")
        caplog.clear()
        absent, log_of_none = answers_on(client.http, "never"), logged(caplog, "never")
    assert there == absent
    assert log_of_one == log_of_none
    assert {status for status, _, _ in there} <= {401, 403, 404}
    codes = []
    for name in ("other", "never"):
        with grpc_client.InferenceServerClient(f"127.0.0.1:{plain.ports['grpc']}") as asks:
            answers = []
            for ask in (asks.is_model_ready, asks.get_model_metadata, asks.get_model_config, asks.load_model):
                with pytest.raises(InferenceServerException) as caught:
                    ask(name, headers=dict(client.metadata))
                answers.append((caught.value.status(), str(caught.value.message()).replace(name, "N")))
            codes.append(answers)
    assert codes[0] == codes[1]
    client.close()


def test_the_stock_clients_send_keys_and_tokens(plain: Running) -> None:
    x = http_client.InferInput("x", [1, 1], "FP32")
    x.set_data_from_numpy(np.ones((1, 1), np.float32))
    y = grpc_client.InferInput("x", [1, 1], "FP32")
    y.set_data_from_numpy(np.ones((1, 1), np.float32))
    for credential in (plain.keys["tenant"], token(sub="tenant"), token(sub="x", groups=["labs"])):
        headers = {"authorization": f"Bearer {credential}"}
        with http_client.InferenceServerClient(f"127.0.0.1:{plain.ports['http']}") as client:
            assert client.infer("own_1", [x], headers=dict(headers)).as_numpy("y").tolist() == [[1]]
            with pytest.raises(InferenceServerException, match="may not do 'infer' on model 'other'"):
                client.infer("other", [x], headers=dict(headers))
        with grpc_client.InferenceServerClient(f"127.0.0.1:{plain.ports['grpc']}") as client:
            assert client.infer("own_1", [y], headers=headers).as_numpy("y").tolist() == [[1]]
            assert client.is_server_live()


def test_each_request_of_a_stream_is_authorized(plain: Running) -> None:
    y = grpc_client.InferInput("x", [1, 1], "FP32")
    y.set_data_from_numpy(np.ones((1, 1), np.float32))
    answers: list[Any] = []
    arrived = threading.Semaphore(0)

    def note(result: Any, error: Any) -> None:
        answers.append(error or result.as_numpy("y").tolist())
        arrived.release()

    with grpc_client.InferenceServerClient(f"127.0.0.1:{plain.ports['grpc']}") as client:
        client.start_stream(note, headers={"authorization": f"Bearer {plain.keys['tenant']}"})
        for name in ("own_1", "other", "own_1"):
            client.async_stream_infer(name, [y])
            assert arrived.acquire(timeout=30)
        client.stop_stream()
    assert answers[0] == answers[2] == [[1]]
    assert "'tenant' may not do 'infer' on model 'other'" in str(answers[1])


# ---------------------------------------------------------------------- odd headers


def test_odd_headers_are_read_or_refused(plain: Running) -> None:
    key, other = plain.keys["admin"], plain.keys["tenant"]
    for lines, status in (
        ([f"authorization: bearer {key}"], 200),
        ([f"AUTHORIZATION:BEARER    {key}  "], 200),
        ([f"Authorization: Bearer\t{key}"], 401),
        ([f"Authorization: {key}"], 401),
        ([f"Authorization: Basic {key}"], 401),
        (["Authorization: Bearer"], 401),
        (["Authorization:"], 401),
        ([f"Authorization: Bearer {key}", f"Authorization: Bearer {other}"], 401),
        ([f"Authorization: Bearer {key}", f"Authorization: Bearer {key}"], 401),
        ([f"Authorization: Bearer {key} {key}"], 401),
        ([f"Authorization: Bearer {key}", "X-Api-Key: wrong"], 200),
        (["Authorization: Basic x", f"X-Api-Key: {key}"], 401),
        ([f"X-Api-Key:  {key} "], 200),
        (["Authorization: Bearer \xff\xfe"], 401),
        ([f"Authorization: Bearer {key}\0"], 400),
        ([f"Authorization : Bearer {key}"], 400),
        (["Authorization: Bearer", f" {key}"], 400),
        (["Authorization: Bearer " + "x" * 7000], 401),
        (["Authorization: Bearer " + "x" * 100_000], 431),
    ):
        head = "\r\n".join(["GET /v2 HTTP/1.1", "Host: localhost", "Connection: close", *lines, "", ""])
        with socket.create_connection(("127.0.0.1", plain.ports["http"]), timeout=30) as connection:
            connection.sendall(head.encode("latin-1"))
            answer = connection.makefile("rb").read()
        assert (int(answer.split()[1]), key.encode() in answer) == (status, False), (lines, answer)


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        (["bearer {key}"], "OK"),
        (["BEARER   {key} "], "OK"),
        (["{key}"], "UNAUTHENTICATED"),
        (["Bearer {key}", "Bearer {other}"], "UNAUTHENTICATED"),
        (["Bearer {key}", "Bearer {key}"], "UNAUTHENTICATED"),
        (["x-api-key:{key}"], "OK"),
        (["x-api-key:{key}", "x-api-key:{other}"], "UNAUTHENTICATED"),
        (["x-api-key:{key}", "x-api-key:{key}"], "UNAUTHENTICATED"),
        (["Bearer x", "Bearer x", "x-api-key:{key}"], "UNAUTHENTICATED"),
    ],
)
def test_odd_metadata_is_read_or_refused(plain: Running, metadata: list[str], code: str) -> None:
    named = {"key": plain.keys["admin"], "other": plain.keys["tenant"]}
    pairs = [each.format(**named).rpartition(":") for each in metadata]
    sent = tuple((name or "authorization", value) for name, _, value in pairs)
    with grpc.insecure_channel(f"127.0.0.1:{plain.ports['grpc']}") as channel:
        for where in ("ServerMetadata", "RepositoryIndex"):
            call: Any = channel.unary_unary(f"/inference.GRPCInferenceService/{where}", bytes, bytes).future(
                b"", metadata=sent, timeout=30
            )
            assert call.code().name == code
        message = grpc_client.service_pb2.ModelInferRequest(model_name="own_1", raw_input_contents=[bytes(4)])
        message.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        infer: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", bytes, bytes)
        for answers_on, ends in (((("x-api-key", named["key"]),), "OK"), (sent, code)):  # the first one is cached
            call = infer.future(message.SerializeToString(), metadata=answers_on, timeout=30)
            assert call.code().name == ends


# ---------------------------------------------------------------------- files that change


@pytest.fixture
def changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_changes, "CHECK_S", 0.0)


def until(client: Client, status: int, **headers: str) -> None:
    for _ in range(2000):
        if client.http.get("/v2/models/own_1/ready", headers=headers).status_code == status:
            return
    raise AssertionError(f"never answered {status}")


def test_a_changed_file_is_used_and_a_broken_one_is_not(
    plain: Running, changes_at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    path, client = plain.path, with_header(plain, plain.keys["admin"])
    before = path.read_text()

    def require_former_keys(text: str) -> None:
        """Check that the former keys stay in use, and that the log has the reason."""
        for _ in range(2000):
            assert client.http.get("/v2").status_code == 200
            if text in caplog.text:
                return
        raise AssertionError(f"never logged {text}")

    until(client, 200)
    assert keys("add", str(path), "bob").returncode == 0
    bob = keys("add", str(path), "bob", "--note", "laptop").stdout.strip()
    until(client, 200, authorization=f"Bearer {bob}")
    assert keys("revoke", str(path), bob).returncode == 0
    until(client, 401, authorization=f"Bearer {bob}")
    path.write_text("{")
    require_former_keys("is no JSON")
    path.unlink()
    require_former_keys("cannot be read: No such file or directory")
    os.mkfifo(path)
    for _ in range(20):  # no file is read, as when there is none
        assert client.http.get("/v2").status_code == 200
    path.unlink()
    with path.open("wb") as file:
        file.truncate(100_000_000)
    require_former_keys("has more than 16777216 bytes")
    assert "the former keys stay in use: access file" in caplog.text
    path.write_text(before)
    until(client, 401, authorization=f"Bearer {bob}")
    until(client, 200)
    client.close()
