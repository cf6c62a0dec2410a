"""The text of systemd units (systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.socket(5))."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerUnit:
    """A server as a service. ``words`` is its command line. ``user`` is empty for a user that systemd makes."""

    words: Sequence[str]
    user: str = ""
    uses_gpu: bool = False
    exit_timeout_s: int = 30
    watchdog_s: int = 30
    has_workers: bool = False


_SERVICE = """\
# {command}
[Unit]
Description=Headrace inference server
After=network-online.target
Wants=network-online.target

[Service]
# Ready when the models are loaded, which may take long.
Type=notify
{notify}TimeoutStartSec=infinity
ExecStart={command}
# --exit-timeout-secs, and 10 s to close.
TimeoutStopSec={stop_s}
# SIGTERM goes to the server only: it ends the processes of its models.
KillMode=mixed
{watchdog}Restart=on-failure
RestartSec=2

{user}StateDirectory=headrace
CacheDirectory=headrace
Environment=HOME=/var/lib/headrace XDG_CACHE_HOME=/var/cache/headrace
UMask=0077
LimitNOFILE=65536

# What a server does not need. MemoryDenyWriteExecute is not among it: engines compile code.
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
{devices}ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""

_SOCKETS = """\
# systemd listens from the start of the machine on, and starts headrace.service at the first connection.
[Unit]
Description=Ports of the Headrace inference server

[Socket]
{listeners}
Backlog=1024

[Install]
WantedBy=sockets.target
"""


def render_service(service: ServerUnit) -> str:
    """Return the text of ``headrace.service``."""
    return _SERVICE.format(
        command=" ".join(map(quote, service.words)),
        notify="NotifyAccess=all\n" if service.has_workers else "",
        stop_s=service.exit_timeout_s + 10,
        watchdog=f"WatchdogSec={service.watchdog_s}\n" if service.watchdog_s else "",
        user=f"User={service.user}\n" if service.user else "DynamicUser=yes\n",
        devices="" if service.uses_gpu else "PrivateDevices=yes\n",
    )


def render_sockets(ports: Mapping[str, tuple[str, int]]) -> str:
    """Return the text of ``headrace.socket`` for addresses and ports by name."""
    shown = {
        name: f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        for name, (address, port) in ports.items()
    }
    return _SOCKETS.format(listeners="\n".join(f"# {name}\nListenStream={place}" for name, place in shown.items()))


def quote(word: str) -> str:
    """Return ``word`` as ExecStart reads it back: quoted if it must be, without specifiers and variables."""
    text = word.replace("%", "%%").replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"' if not text or set(text) & set(" \t'\";") else text
