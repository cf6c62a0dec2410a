"""The datagrams that systemd expects of a service of ``Type=notify``: ready, alive, stopping.

Source: the manual pages sd_notify(3) and sd_watchdog_enabled(3).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket

log = logging.getLogger("headrace.service")


class Notifications:
    """The messages of one server to systemd. Event loop only.

    While the server runs, a timer of the event loop sends a keep-alive twice in each interval of the watchdog. If the
    loop is blocked for longer, systemd ends the process by SIGABRT and restarts it.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self, status: str) -> None:
        """Say that the server takes requests, with ``status``, which ``systemctl status`` shows."""
        self._send(f"READY=1\nSTATUS={status}")
        if interval_s := watchdog_s():
            self._keep_alive(interval_s / 2)

    def stop(self) -> None:
        """Notify that the server stops. Keep-alives continue, because requests in flight are still answered."""
        self._send("STOPPING=1\nSTATUS=stopping")

    def _keep_alive(self, interval_s: float) -> None:
        self._send("WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._keep_alive, interval_s)

    def _send(self, text: str) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        if not address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), f"\0{address[1:]}" if address[0] == "@" else address)
        except OSError as error:
            log.warning("systemd does not take '%s' at NOTIFY_SOCKET '%s': %s", text, address, error.strerror)


def watchdog_s() -> float:
    """Return the interval of systemd's watchdog for this process, in seconds; 0 if there is none."""
    microseconds, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or process not in ("", str(os.getpid())):
        return 0
    return int(microseconds) / 1e6
