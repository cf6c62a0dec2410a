"""Log lines at start: which ports are open to other machines, and the tables that Triton prints.

Source of the tables: docs/spec/behaviours.md section 8.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence

from headrace.config.option_parts import DeviceOptions
from headrace.config.options import ServerOptions
from headrace.config.secret_settings import shown
from headrace.frontends.access import is_loopback
from headrace.models.configuring import backend_settings, find_backend
from headrace.server import Server
from headrace.telemetry import logs
from headrace_cli.port_checks import EVERY_ADDRESS

log = logging.getLogger("headrace.startup")

_FILES = {
    "loopback": "but not with files of their own, which only this machine may send",
    "any": "and with files of their own, which are code that the server runs",
    "none": "but not with files of their own",
}


def log_tables(server: Server) -> None:
    """Log three tables: the backends in use, the models with their states, and the options."""
    _log("backends", ("Backend", "Path", "Config"), _backends(server))
    log_models(server)
    _log("options", ("Option", "Value"), _options(server))


def log_models(server: Server) -> None:
    """Log a table of the model versions with their states and reasons."""
    _log("models", ("Model", "Version", "Status"), _models(server))


def _log(heading: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    log.info("%s", heading, extra={"table": logs.draw_table(head, rows)})


def _backends(server: Server) -> list[tuple[str, str, str]]:
    options, plugins = server.options, server.plugins
    common = {"auto-complete-config": str(not options.disable_auto_complete_config).lower()}
    rows = []
    for name in sorted({model.config.backend for model in server.served()} - {""}):
        part = find_backend(name, plugins.backends, plugins.hook, options)
        settings = {key: shown(key, value) for key, value in backend_settings(name, part, options).items()}
        rows.append((name, part.location(), json.dumps(common | settings)))
    return rows


def _models(server: Server) -> list[tuple[str, str, str]]:
    return [
        (entry.name, entry.version or "-", ": ".join(filter(None, (entry.state, entry.reason))))
        for entry in server.index()
    ]


def _options(server: Server) -> list[tuple[str, str]]:
    options, metadata = server.options, server.metadata()
    return [
        ("server_id", metadata.name),
        ("server_version", metadata.version),
        ("server_extensions", " ".join(metadata.extensions)),
        *((f"model_repository_path[{i}]", path) for i, path in enumerate(options.model_repository)),
        ("model_control_mode", f"MODE_{options.model_control_mode.upper()}"),
        *((f"startup_models_{i}", name) for i, name in enumerate(options.load_model)),
        ("strict_model_config", _digit(options.disable_auto_complete_config)),
        ("model_config_name", options.model_config_name),
        ("rate_limit", options.rate_limit.upper()),
        *_pools(options),
        ("min_supported_compute_capability", str(options.min_supported_compute_capability)),
        ("strict_readiness", _digit(options.strict_readiness)),
        ("exit_timeout", str(options.exit_timeout_secs)),
        ("cache_enabled", _digit(bool(options.cache_config))),
    ]


def _pools(options: DeviceOptions) -> list[tuple[str, str]]:
    pools = sorted(options.cuda_memory_pool_byte_size.items())
    return [
        ("pinned_memory_pool_byte_size", str(options.pinned_memory_pool_byte_size)),
        *((f"cuda_memory_pool_byte_size{{{gpu}}}", str(size)) for gpu, size in pools),
    ]


def _digit(value: bool) -> str:
    return str(int(value))


def log_openness(options: ServerOptions) -> None:
    """Log one line if other machines can reach the server; a warning if they can load models without a key."""
    doors = (
        (options.allow_http, "HTTP", options.http_address, options.http_restricted_api),
        (options.allow_grpc, "gRPC", options.grpc_address, options.grpc_restricted_protocol),
        (options.allow_sagemaker, "SageMaker", EVERY_ADDRESS, options.http_restricted_api),
        (options.allow_vertex_ai, "Vertex AI", EVERY_ADDRESS, options.http_restricted_api),
    )
    open_doors = [
        (protocol, address, restricted)
        for allowed, protocol, address, restricted in doors
        if allowed and not (address == "localhost" or is_loopback(address))
    ]
    if not open_doors:
        return
    is_risky = any(_lets_load(options, restricted) for _, _, restricted in open_doors)
    summary_text = "; ".join(f"{protocol} on {address}: {_rights(options, r)}" for protocol, address, r in open_doors)
    log.log(logging.WARNING if is_risky else logging.INFO, "open to other machines: %s", summary_text)


def _lets_load(options: ServerOptions, restricted: Collection[str]) -> bool:
    return options.model_control_mode == "explicit" and "model-repository" not in restricted


def _rights(options: ServerOptions, restricted: Collection[str]) -> str:
    """Return the permissions of any client over one protocol."""
    rights = "inference with its key" if "inference" in restricted else "inference"
    if options.model_control_mode != "explicit":
        return rights
    if _lets_load(options, restricted):
        return f"{rights}, loading and unloading models by name, {_FILES[options.model_files_from]}"
    files = "" if options.model_files_from == "none" else ", also with files of their own,"
    return f"{rights}, loading and unloading models{files} with the key of model-repository"
