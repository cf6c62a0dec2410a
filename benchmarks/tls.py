"""Compare TLS on our ports with nginx and stunnel in front of plain ones: ``python benchmarks/tls.py``.

Requests to an identity model go over HTTP/1.1 with small bodies and 1 MiB, over gRPC, and on a new connection for each
request, with 16 callers; without resumption, with one. Prints the CPU time of the servers per request, including a
proxy: the minimum of alternating rounds. Needs Debian's nginx-light, stunnel4, wrk, nghttp2-client and openssl.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import machine
from load import binary_body
from servers import listening
from tritonclient.grpc import service_pb2 as pb

CALLERS = 16
_CONFIG = """backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
_NGINX = """daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr crit;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_max_body_size 0; client_body_buffer_size 2m; keepalive_requests 1000000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; proxy_buffers 64 32k; proxy_max_temp_file_size 0;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  ssl_certificate {folder}/server.crt; ssl_certificate_key {folder}/server.key; ssl_protocols TLSv1.2 TLSv1.3;
  upstream http {{ server 127.0.0.1:{http}; keepalive 64; }}
  upstream grpc {{ server 127.0.0.1:{grpc}; keepalive 64; }}
  server {{ listen 127.0.0.1:{tls_http} ssl;
    location / {{ proxy_pass http://http; proxy_http_version 1.1; proxy_set_header Connection ""; }} }}
  server {{ listen 127.0.0.1:{tls_grpc} ssl http2; location / {{ grpc_pass grpc://grpc; }} }}
}}
"""
_STUNNEL = """foreground = yes
debug = 3
pid =
cert = {folder}/server.crt
key = {folder}/server.key
sslVersionMin = TLSv1.2
[http]
accept = 127.0.0.1:{tls_http}
connect = 127.0.0.1:{http}
[grpc]
accept = 127.0.0.1:{tls_grpc}
connect = 127.0.0.1:{grpc}
"""


@dataclass(frozen=True, slots=True)
class Port:
    """An endpoint of TLS, and its processes."""

    name: str
    http: int
    grpc: int
    pids: Sequence[int]

    def cpu_s(self) -> float:
        return sum(machine.read(pid).tree_s for pid in self.pids)


def certificate(folder: Path, kind: str) -> None:
    """Write ``server.crt`` and ``server.key`` with a key of ``kind``."""
    curve = ["-pkeyopt", "ec_paramgen_curve:prime256v1"] if kind == "ec" else []
    files = ["-keyout", str(folder / "server.key"), "-out", str(folder / "server.crt")]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", kind, *curve, "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def ports(folder: Path) -> Iterator[list[Port]]:
    """Start a server with TLS, and both proxies in front of one without."""
    serve = [sys.executable, "-m", "headrace_cli", "serve", f"--model-repository={folder / 'models'}"]
    serve += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false", "--log-info=false"]
    files = {"server-cert": folder / "server.crt", "server-key": folder / "server.key", "use-ssl": "true"}
    tls = [f"--{protocol}-{name}={value}" for protocol in ("http", "grpc") for name, value in files.items()]
    with contextlib.ExitStack() as stack:
        free = iter(machine.free_ports(8))

        def start(command: list[str], http: int, grpc: int) -> int:
            return stack.enter_context(listening(command, http, grpc))

        def headrace(*flags: str) -> tuple[int, int, int]:
            http, grpc = next(free), next(free)
            return http, grpc, start([*serve, f"--http-port={http}", f"--grpc-port={grpc}", *flags], http, grpc)

        http, grpc, pid = headrace(*tls)
        found = [Port("headrace", http, grpc, (pid,))]
        http, grpc, plain = headrace()
        for name, template, words in (
            ("nginx", _NGINX, ["nginx", "-p", str(folder), "-c"]),
            ("stunnel", _STUNNEL, ["stunnel4"]),
        ):
            tls_http, tls_grpc = next(free), next(free)
            settings = folder / f"{name}.conf"
            settings.write_text(
                template.format(folder=folder, http=http, grpc=grpc, tls_http=tls_http, tls_grpc=tls_grpc)
            )
            found.append(Port(name, tls_http, tls_grpc, (start([*words, str(settings)], tls_http, tls_grpc), plain)))
        yield found


def http_load(folder: Path, port: Port, floats: int, seconds: float, is_new: bool) -> int:
    """Send load to the HTTP port. Return the number of answered requests."""
    body = binary_body("model", {"x": (1, floats)})
    headers = body.headers | ({"Connection": "close"} if is_new else {})
    lines = [f'wrk.headers["{name}"]="{value}"' for name, value in headers.items()]
    (folder / "payload").write_bytes(body.data)
    lines += ['wrk.method="POST"', f'wrk.body=io.open("{folder / "payload"}","rb"):read("*a")']
    (folder / "post.lua").write_text("\n".join(lines))
    url = f"https://localhost:{port.http}{body.path}"
    text = _output(["wrk", "-t1", f"-c{CALLERS}", f"-d{seconds:.0f}s", "-s", str(folder / "post.lua"), url])
    if failed := re.search(r"Non-2xx.*", text):
        raise RuntimeError(f"{port.name}: {failed[0]}")
    return int(re.findall(r"(\d+) requests in", text)[0])


def grpc_load(folder: Path, port: Port, floats: int, seconds: float, is_new: bool) -> int:
    """Send load to the gRPC port. Return the number of answered requests."""
    request = pb.ModelInferRequest(model_name="model", raw_input_contents=[bytes(4 * floats)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, floats])
    message = request.SerializeToString()
    (folder / "message").write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    url = f"https://localhost:{port.grpc}/inference.GRPCInferenceService/ModelInfer"
    kind = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    load = ["h2load", f"-c{CALLERS}", "-m1", f"-D{seconds:.0f}", "-d", str(folder / "message"), *kind, url]
    text = _output(load)
    found = re.findall(r"(\d+) succeeded, (\d+) failed", text)
    if not found or int(found[0][1]):
        raise RuntimeError(f"{port.name}: {found}")
    return int(found[0][0])


def handshake_load(folder: Path, port: Port, floats: int, seconds: float, is_new: bool) -> int:
    """Send one request per connection, one after the other, without resumption. Return their number."""
    where = ["-connect", f"127.0.0.1:{port.http}", "-www", "/v2/health/live"]
    text = _output(["openssl", "s_time", *where, "-new", "-time", f"{seconds:.0f}"])
    return int(re.findall(r"(\d+) connections in \d+ real seconds", text)[0])


CASES = {
    "HTTP/1.1, 64 bytes": (http_load, 16, False),
    "HTTP/1.1, 1 MiB": (http_load, 1 << 18, False),
    "gRPC, 64 bytes": (grpc_load, 16, False),
    "gRPC, 1 MiB": (grpc_load, 1 << 18, False),
    "HTTP/1.1, a connection each, sessions resumed": (http_load, 16, True),
    "HTTP/1.1, a connection each, full handshakes": (handshake_load, 0, True),
}


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--key", default="rsa:2048", help="rsa:2048 or ec")
    parser.add_argument("--cases", default="", help="only the cases with this word")
    options = parser.parse_args()
    print(f"Python {platform.python_version()} {platform.python_compiler()}, {ssl.OPENSSL_VERSION}, {options.key}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models/model/1").mkdir(parents=True)
        (folder / "models/model/config.pbtxt").write_text(_CONFIG)
        certificate(folder, options.key)
        with ports(folder) as found:
            print("| CPU of servers per request, µs |" + "".join(f" {port.name} |" for port in found))
            print("|---|" + "---|" * len(found))
            for case, (load, floats, is_new) in CASES.items():
                if options.cases not in case:
                    continue
                least = dict.fromkeys((port.name for port in found), float("inf"))
                for _ in range(options.rounds):
                    for port in found:
                        if load is grpc_load and port.name == "stunnel":
                            continue  # has no ALPN
                        before = port.cpu_s()
                        count = load(folder, port, floats, options.seconds, is_new)
                        least[port.name] = min(least[port.name], (port.cpu_s() - before) / count * 1e6)
                print(
                    f"| {case} |" + "".join(f" {least[port.name]:.0f} |".replace("inf", "") for port in found),
                    flush=True,
                )


if __name__ == "__main__":
    main()
