"""Attacks on a real server, with a bystander who must not notice them.

``under_attack(server)`` is the frame of every test here: whatever is done inside it, a caller in another process
is answered rightly and soon, and the memory of the server comes back. ``nox -s attack`` prints the figures of all of
them, and holds health to 50 ms (the other hosts, and crowds, to `OTHERS_MS`), and memory to `KEPT`. A plain run, on a
machine that may be busy with other things, holds health to `PATIENCE_MS` and prints the rest; its tests share a server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

BYSTANDER = Path(__file__).with_name("bystander.py")
#: Health p99 that a plain run allows, in milliseconds; `nox -s attack` sets it to 50.
PATIENCE_MS = 5000.0
#: An attack that is over sooner is watched until there are so many probes: a few in a plain run, and where it is judged
#: so many that a p99 means something.
FEW_PROBES, PROBES = 10, 200
#: Resident memory afterwards, over that before: a fifth, and what an allocator keeps of a small server anyhow.
KEPT, KEPT_BYTES = 1.2, 4 << 20
#: How long the server has to give memory back.
RELEASE_S = 10.0
#: Hosts whose libraries do not share out the time of the event loop, and crowds, which docs/hosts.md tells of: they
#: are held to two seconds, and what a crowd leaves of memory is only shown.
_OTHERS, _CROWD = re.compile(r"[\[-]others\b|_over_grpcio$"), re.compile(r"-together\]$")
OTHERS_MS = 2000.0
HOSTS = {"native": (), "others": ("--http-server=hypercorn", "--grpc-server=grpcio")}

_ATTACKS = Path(__file__).parent
_LEFT_OUT = re.compile(r"\[.*\b(?:others|together)\b.*\]$|_over_grpcio$")

FIGURES = pytest.StashKey[list["Figures"]]()


@dataclass(frozen=True)
class Figures:
    """The effect of one attack on a server: latencies of health in milliseconds, resident memory in bytes.

    ``stolen_ms`` is the time that the hypervisor gave this machine's cores to other machines meanwhile.
    """

    name: str
    p50_ms: float
    p99_ms: float
    worst_ms: float
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    stolen_ms: float

    @property
    def line(self) -> str:
        mib = [round(size / 2**20) for size in (self.before_bytes, self.peak_bytes, self.after_bytes)]
        return (
            f"{self.p50_ms:5.1f} {self.p99_ms:5.1f} {self.worst_ms:6.1f}"
            f"  {mib[0]:6} {mib[1]:6} {mib[2]:6}  {self.stolen_ms:6.0f}  {self.name}"
        )


#: What became of the mutants of each format (test_model_files.py).
MUTANTS = pytest.StashKey[dict[str, Counter[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", type=int, help="how many changed files of each format to load, few unless given")
    parser.addoption("--first-mutant", type=int, default=0, help="the number of the first of them")
    parser.addoption(
        "--health-p99-ms", type=float, help=f"what an attack may cost a bystander, {PATIENCE_MS:g} unless given"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a run of all tests, one attacker at a time comes to our own hosts; `nox -s attack` has all of them."""
    if config.getoption("--health-p99-ms", None) is None:
        left_out = [item for item in items if _LEFT_OUT.search(item.nodeid) and _ATTACKS in item.path.parents]
        kept = set(items).difference(left_out)
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The figures of all attacks, in the order in which they ran."""
    for name, counts in config.stash.get(MUTANTS, {}).items():
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        terminalreporter.line(f"mutants of {name}: {told}")
    figures = config.stash.get(FIGURES, [])
    if not figures:
        return
    terminalreporter.section("attacks")
    terminalreporter.line("     health ms         resident MiB      stolen")
    terminalreporter.line("  p50   p99  worst  before   most  after      ms")
    for each in figures:
        terminalreporter.line(each.line)


@pytest.fixture(scope="session")
def attack_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``echo``, which the bystander asks, ``huge``, an echo of bytes, and ``text``, one of strings."""
    root = tmp_path_factory.mktemp("attacked")
    for name, datatype in (("echo", "FP32"), ("huge", "UINT8"), ("text", "STRING")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(
            f'backend: "identity" '
            f'input {{ name: "IN" data_type: TYPE_{datatype} dims: [-1] }} '
            f'output {{ name: "OUT" data_type: TYPE_{datatype} dims: [-1] }}'
        )
    return root


@pytest.fixture(scope="session")
def share(keep_serving: Callable[..., Headrace], attack_repository: Path) -> Callable[..., Headrace]:
    """The server with these flags, for all tests that ask for it; another once it has ended."""
    servers: dict[tuple[str, ...], Headrace] = {}

    def share(*words: str) -> Headrace:
        if words not in servers or servers[words].process.poll() is not None:
            servers[words] = keep_serving(f"--model-repository={attack_repository}", *words)
        return servers[words]

    return share


@pytest.fixture(scope="session")
def is_judged(pytestconfig: pytest.Config) -> bool:
    """True in `nox -s attack`, which attacks in full. A plain run attacks shorter, and with smaller bodies."""
    return pytestconfig.getoption("--health-p99-ms", None) is not None


@pytest.fixture
def of_its_own() -> None:
    """For a test that takes its server down, or looks at all that it has done."""


@pytest.fixture
def serve_attacked(
    request: pytest.FixtureRequest,
    serve: Callable[..., Headrace],
    share: Callable[..., Headrace],
    attack_repository: Path,
    is_judged: bool,
) -> Iterator[Callable[..., Headrace]]:
    """Starts a server of its own for each test where memory is judged; in a plain run most tests share one."""
    if is_judged or "of_its_own" in request.fixturenames:
        yield partial(serve, f"--model-repository={attack_repository}")
        return
    used: list[tuple[Headrace, int]] = []

    def start(*words: str) -> Headrace:
        used.append((server := share(*words), len(server.lines)))
        return server

    yield start
    for server, lines in used:
        assert "Traceback" not in "".join(server.lines[lines:])


@pytest.fixture
def serve_models(run_headrace: Callable[..., Headrace], attack_repository: Path) -> Callable[..., Headrace]:
    """A server that loads the models of a repository by name, and that which the bystander asks. Its log is not looked
    at: what a process raises that cannot load its instance is in it."""

    def start(repository: Path, *words: str) -> Headrace:
        repositories = [f"--model-repository={each}" for each in (attack_repository, repository)]
        server = run_headrace(*repositories, "--model-control-mode=explicit", "--load-model=echo", *words)
        return server.wait_until_ready()

    return start


@pytest.fixture(params=list(HOSTS))
def attacked(request: pytest.FixtureRequest, serve_attacked: Callable[..., Headrace]) -> Headrace:
    """A server on our hosts of HTTP and gRPC, and on the others."""
    return serve_attacked(*HOSTS[request.param])


@pytest.fixture
def attacked_natively(serve_attacked: Callable[..., Headrace]) -> Headrace:
    """The same on our hosts only, for attacks on what only they have."""
    return serve_attacked()


@pytest.fixture
def under_attack(
    request: pytest.FixtureRequest, wait_until: Callable[..., None]
) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """``with under_attack(server): ...`` judges what the block did to everybody else."""
    # Declared only where this folder is named on the command line.
    asked_ms: float | None = request.config.getoption("--health-p99-ms", None)
    is_crowd = _CROWD.search(request.node.name) is not None
    is_other = is_crowd or _OTHERS.search(request.node.name) is not None
    usual_ms = PATIENCE_MS if asked_ms is None else OTHERS_MS if is_other else asked_ms

    @contextlib.contextmanager
    def frame(server: Headrace, allowed_ms: float = usual_ms, kept_bytes: int = KEPT_BYTES) -> Iterator[None]:
        _warm(server.http)
        before, stolen_ms = server.rss_bytes, _stolen_ms()
        server.forget_peak()
        with subprocess.Popen(
            [sys.executable, str(BYSTANDER), str(server.http)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as bystander:
            assert bystander.stdin is not None
            assert bystander.stdout is not None
            try:
                assert bystander.stdout.readline() == b"watching\n"
                end = time.monotonic() + (PROBES if asked_ms else FEW_PROBES) * 0.005
                yield
                with contextlib.suppress(subprocess.TimeoutExpired):
                    bystander.wait(max(0.0, end - time.monotonic()))
                bystander.stdin.close()
                seen = json.loads(bystander.stdout.read())
            finally:
                bystander.kill()
        stolen_ms = _stolen_ms() - stolen_ms
        limit = int(before * KEPT) + kept_bytes
        patience_s = 0.0 if asked_ms is None else 1.0 if is_crowd else RELEASE_S
        with contextlib.suppress(AssertionError):  # worded below, with the figures
            wait_until(lambda: server.rss_bytes <= limit, "the memory is given back", patience_s)
        latencies_ms = sorted(latency / 1e6 for latency in seen["latencies_ns"])
        figures = Figures(
            request.node.name.removeprefix("test_"),
            latencies_ms[len(latencies_ms) // 2],
            latencies_ms[len(latencies_ms) * 99 // 100],
            latencies_ms[-1],
            before,
            server.peak_rss_bytes,
            server.rss_bytes,
            stolen_ms,
        )
        request.config.stash.setdefault(FIGURES, []).append(figures)
        if asked_ms:
            _show(request.config, figures.line)
        assert not seen["failures"], seen["failures"][:5]
        assert figures.p99_ms <= allowed_ms + stolen_ms, figures
        assert asked_ms is None or is_crowd or figures.after_bytes <= limit, figures

    return frame


def _stolen_ms() -> float:
    """Milliseconds so far, of all cores together, in which this machine would have run and was not let."""
    times = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(times[8]) / os.sysconf("SC_CLK_TCK") * 1000


def _show(config: pytest.Config, line: str) -> None:
    """Write ``line`` to the terminal now: a run of all attacks takes half an hour."""
    reporter, capture = map(config.pluginmanager.get_plugin, ("terminalreporter", "capturemanager"))
    if reporter is not None and capture is not None:
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(line)


def _warm(port: int) -> None:
    """Ask once for what the bystander will ask for, so that what is made once is not counted as kept."""
    for method, path in (("GET", "/v2/health/live"), ("GET", "/v2"), ("GET", "/v2/models/echo/stats")):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path)
        assert connection.getresponse().read() is not None
        connection.close()
