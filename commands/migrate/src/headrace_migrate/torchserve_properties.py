"""TorchServe's ``config.properties``: which flags of ``headrace serve`` do the same.

Source: TorchServe's page "Advanced configuration".
"""

from __future__ import annotations

import shlex
from urllib.parse import urlsplit

from headrace_migrate.report import BadInput, Report, Verdict

_PAGE = "docs/migrating.md#torchserve"
#: Properties with one flag that has their value.
_FLAGS = {
    "grpc_inference_port": "grpc-port",
    "max_request_size": "http-max-input-size",
    "model_store": "model-repository",
    "private_key_file": "http-server-key",
    "certificate_file": "http-server-cert",
}
_ADDRESSES = {"inference_address": "http", "metrics_address": "metrics"}
_IN_CONFIG = ("batch_size", "max_batch_delay", "default_workers_per_model", "job_queue_size", "models")
_THREADS = ("number_of_netty_threads", "netty_client_threads", "async_logging", "vmargs", "prefer_direct_buffer")


def read_properties(text: str, report: Report) -> str:
    """Report on each property. Return the command line of ``headrace serve``. Raises `BadInput`."""
    flags, found = list[str](), 0
    for number, line in enumerate(text.replace("\\\n", "  ").splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals:
            raise BadInput(f"{report.source}:{number}: '{line[:40]}' is no property")
        found += 1
        new = _flags_of(name, value)
        flags += new
        if new:
            report.add(number, "property", line, Verdict.CHANGED, f"now {' '.join(new)}", "docs/flags.md")
        elif name in _IN_CONFIG:
            detail = "a setting of each model: write it into config.pbtxt"
            report.add(number, "property", line, Verdict.DIFFERS, detail, "docs/batches.md")
        elif name in _THREADS:
            report.add(number, "property", line, Verdict.DIFFERS, "no effect", "docs/flags.md#http")
        elif name == "management_address":
            detail = "models are loaded and unloaded on the HTTP port: --model-control-mode=explicit"
            report.add(number, "property", line, Verdict.DIFFERS, detail, "docs/control.md")
        else:
            report.add(number, "property", line, Verdict.NOT_THERE, "nothing does the same", _PAGE)
    if not found:
        raise BadInput(f"{report.source}: no property is in it")
    if "--model-repository" not in {flag.partition("=")[0] for flag in flags}:
        flags.insert(0, "--model-repository=models")
    return f"headrace serve {shlex.join(flags)}\n"


def _flags_of(name: str, value: str) -> list[str]:
    if name in _FLAGS:
        new = [f"--{_FLAGS[name]}={value}"]
        return [*new, "--http-use-ssl=true"] if name == "certificate_file" else new
    if name in _ADDRESSES:
        try:
            parts = urlsplit(value)
            host, port = parts.hostname, parts.port
        except ValueError:
            return []
        flags = [f"--{_ADDRESSES[name]}-address={host}"] if host else []
        return [*flags, f"--{_ADDRESSES[name]}-port={port}"] if port else flags
    return []
