"""What the log says of a server that has loaded: the tables that Triton prints (docs/spec/behaviours.md section 8)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from headrace.config.options import ServerOptions
from headrace.models.parts import backend_settings, find_backend
from headrace.server import Server
from headrace.telemetry import tables

log = logging.getLogger("headrace.startup")


def log_tables(server: Server) -> None:
    """Which backends are in use, how each model fares, and the options."""
    _log("backends", ("Backend", "Path", "Config"), _backends(server))
    log_models(server)
    _log("options", ("Option", "Value"), _options(server))


def log_models(server: Server) -> None:
    """How each model version fares, and why."""
    _log("models", ("Model", "Version", "Status"), _models(server))


def _log(heading: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    log.info("%s", heading, extra={"table": tables.draw(head, rows)})


def _backends(server: Server) -> list[tuple[str, str, str]]:
    options, plugins = server.options, server.plugins
    common = {"auto-complete-config": str(not options.disable_auto_complete_config).lower()}
    rows = []
    for name in sorted({model.config.backend for model in server.served()}):
        part = find_backend(name, plugins.backends, plugins.hook, options)
        rows.append((name, part.location(), json.dumps(common | backend_settings(name, part, options))))
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


def _pools(options: ServerOptions) -> list[tuple[str, str]]:
    pools = sorted(options.cuda_memory_pool_byte_size.items())
    return [
        ("pinned_memory_pool_byte_size", str(options.pinned_memory_pool_byte_size)),
        *((f"cuda_memory_pool_byte_size{{{gpu}}}", str(size)) for gpu, size in pools),
    ]


def _digit(value: bool) -> str:
    return str(int(value))
