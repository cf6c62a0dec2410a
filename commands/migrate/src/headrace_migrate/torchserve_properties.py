"""TorchServe's ``config.properties``: which flags of ``headrace serve`` do the same.

Source: TorchServe's page "Advanced configuration".
"""

from __future__ import annotations

import re
import shlex

from headrace import ConfigError, parse_options
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
_ADDRESS = re.compile(r"https?://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+)(?::(?P<port>[^/]*))?/?")
#: Before the flags of one property: no port of another is the same.
_ALONE = ("--model-repository=models", "--http-port=0", "--grpc-port=0", "--metrics-port=0")
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
        try:
            new = _flags_of(name, value)
        except ConfigError as error:
            detail = f"not taken over: {error.message.splitlines()[-1]}"
            report.add(number, "property", line, Verdict.DIFFERS, detail, "docs/flags.md")
            continue
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
    try:
        parse_options(flags)
    except ConfigError as error:
        detail = f"the server does not start: {error.message.splitlines()[-1]}"
        report.add(0, "properties", "all together", Verdict.DIFFERS, detail, "docs/flags.md")
    return f"headrace serve {shlex.join(flags)}\n"


def _flags_of(name: str, value: str) -> list[str]:
    """Return the flags that do the same. Raises `ConfigError` if no flag has such a value."""
    if name in (*_FLAGS, *_ADDRESSES) and not value:
        raise ConfigError("it has no value")
    if name in _FLAGS:
        flags = [f"--{_FLAGS[name]}={value}"]
        flags += ["--http-use-ssl=true"] if name == "certificate_file" else []
    elif name in _ADDRESSES:
        found = _ADDRESS.fullmatch(value)
        if found is None:
            raise ConfigError("expected http://HOST:PORT or https://HOST:PORT")
        host, port = found["host"].strip("[]"), found["port"]
        flags = [f"--{_ADDRESSES[name]}-address={host}"]
        flags += [] if port is None else [f"--{_ADDRESSES[name]}-port={port}"]
    else:
        return []
    parse_options([*_ALONE, *flags])
    return flags
