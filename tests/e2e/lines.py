"""Connections to servers of several processes, and which process has each. Linux only."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import DEADLINE_S

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: Connections that are opened until each process has one; that it takes more has a chance of 2^-63.
MOST = 64


class Line:
    """A connection that is kept, and the process ``owner`` that has accepted it, one of those called ``title``."""

    def __init__(self, server: Headrace, title: str) -> None:
        self.http = http.client.HTTPConnection("127.0.0.1", server.http, timeout=DEADLINE_S)
        self.http.request("GET", "/v2/health/live")
        assert self._status() == 200
        (self.owner,) = [pid for pid in processes_of(server, title) if self._inode() in sockets_of(pid)]

    def ask(self, model: str) -> None:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.5]}
        self.http.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))

    def answer(self) -> list[float]:
        response = self.http.getresponse()
        document: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, document
        values: list[float] = document["outputs"][0]["data"]
        return values

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON."""
        self.http.request("GET", path)
        response = self.http.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body else None

    def _status(self) -> int:
        response = self.http.getresponse()
        response.read()
        return response.status

    def _inode(self) -> str:
        """Return the peer's address of the connection from our port."""
        assert self.http.sock is not None
        ours, theirs = self.http.sock.getsockname()[1], self.http.sock.getpeername()[1]
        for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = row.split()
            if (words[1].endswith(f":{theirs:04X}"), words[2].endswith(f":{ours:04X}")) == (True, True):
                return words[9]
        raise AssertionError("the connection is not there")


def processes_of(server: Headrace, title: str) -> list[int]:
    """The processes of ``server`` that are called ``title`` and a number, in the order of their numbers."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            named = re.search(rf"{title} (\d+)".encode(), (folder / "cmdline").read_bytes())
            if named and int(parent) == server.process.pid:
                found[int(named[1])] = int(folder.name)
    return [found[number] for number in sorted(found)]


def sockets_of(pid: int) -> set[str]:
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            named = re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
        if named:
            found.add(named[1])
    return found


def accepted_sockets(port: int) -> set[str]:
    """Return the accepted sockets at ``port`` on this machine."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"}


class Lines(list[Line]):
    """All connections of a test to ``server``, whose processes are called ``title``."""

    def __init__(self, server: Headrace, title: str) -> None:
        super().__init__()
        self._server, self._title = server, title

    def to(self, owner: int) -> Line:
        """One more, to the process ``owner``."""
        for _ in range(MOST):
            self.append(Line(self._server, self._title))
            if self[-1].owner == owner:
                return self[-1]
        raise AssertionError(f"{MOST} connections, and none to process {owner}")

    def one_each(self) -> list[Line]:
        """To each of the two processes, in the order of their numbers."""
        return [self.to(pid) for pid in processes_of(self._server, self._title)]

    def close(self) -> None:
        for line in self:
            line.http.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
