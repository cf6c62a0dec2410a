"""What the log says at start about who can reach what."""

from __future__ import annotations

import logging
from collections.abc import Collection

from headrace.config.options import ServerOptions
from headrace.frontends.uploads import is_loopback

log = logging.getLogger("headrace.startup")

_FILES = {
    "loopback": "but not with files of their own, which are taken from this machine only",
    "any": "and with files of their own, which are code that the server runs",
    "none": "but not with files of their own",
}


def log_openness(options: ServerOptions) -> None:
    """One line, if anybody but the machine itself may ask the server; a warning if that includes loads."""
    doors = (
        (options.allow_http, "HTTP", options.http_address, options.http_restricted_api),
        (options.allow_grpc, "gRPC", options.grpc_address, options.grpc_restricted_protocol),
    )
    open_doors = [
        (protocol, address, restricted)
        for allowed, protocol, address, restricted in doors
        if allowed and not (address == "localhost" or is_loopback(address))
    ]
    if not open_doors:
        return
    is_risky = any(_lets_load(options, restricted) for _, _, restricted in open_doors)
    told = "; ".join(f"{protocol} on {address}: {_rights(options, r)}" for protocol, address, r in open_doors)
    log.log(logging.WARNING if is_risky else logging.INFO, "open to other machines: %s", told)


def _lets_load(options: ServerOptions, restricted: Collection[str]) -> bool:
    return options.model_control_mode == "explicit" and "model-repository" not in restricted


def _rights(options: ServerOptions, restricted: Collection[str]) -> str:
    """What anybody may do over one protocol."""
    rights = "inference with its key" if "inference" in restricted else "inference"
    if options.model_control_mode != "explicit":
        return rights
    if _lets_load(options, restricted):
        return f"{rights}, loading and unloading models by name, {_FILES[options.model_files_from]}"
    files = "" if options.model_files_from == "none" else ", also with files of their own,"
    return f"{rights}, loading and unloading models{files} with the key of model-repository"
