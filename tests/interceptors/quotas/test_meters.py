"""Requests that a `Use` counts without admission: it decides as admission does, and nothing of them is left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient import grpc as grpc_client
from tritonclient.utils import InferenceServerException

from headrace import Caller, Operation, ResourceExhausted, ServerOptions, Watch
from headrace_access import AccessOptions
from headrace_quotas import QuotaOptions, Quotas
from headrace_testing.serving import serve
from tests.interceptors.access.access_files import make
from tests.interceptors.quotas.test_limits import BODY, CONFIG, in_flight

_LIMITS = {"requests_per_second": 4, "in_flight": 3, "input_bytes_per_second": 500}
#: The version of the requests.
VIEW: Any = object()


class QuotasUnderTest:
    """An interceptor with its own clock. Requests go to admission, or with ``by_meters`` to its meters first."""

    def __init__(self, path: Path, by_meters: bool) -> None:
        self.now_s, self._by_meters = 1000.0, by_meters
        self.quotas = Quotas(ServerOptions(plugin_options=[QuotaOptions(file=str(path))]), lambda: self.now_s)
        self.quotas._is_ticking = True  # without an event loop
        self.in_flight_ends: list[Callable[[], None]] = []
        self.begins = 0

    def ask(self, principal: str, model: str, size_bytes: int) -> str:
        """Return what becomes of an inference."""
        use = self.quotas.table.uses.get((principal, model))
        if use is not None:
            use.gate.metered_view = VIEW
        if self._by_meters and use is not None and self.quotas.table.uses[principal, model].begin(VIEW, size_bytes):
            self.begins += 1
            self.in_flight_ends.append(use.end)
            return "admitted"
        caller = Caller("http", "192.0.2.1", principal=principal, body_bytes=size_bytes)
        try:
            watch = self.quotas.admit(caller, Operation.INFER, model)
        except ResourceExhausted as error:
            return f"{error.message}, {error.retry_after_s}"
        assert isinstance(watch, Watch)
        caller.watch(watch)
        self.in_flight_ends.append(caller.end)
        return "admitted"

    def state(self) -> list[Any]:
        """Return what is counted: in flight, by account, and in the counters."""
        found: list[Any] = [in_flight(self.quotas)]
        for use in self.quotas.table.uses.values():
            for account in (use.total, use.own):
                if account is not None:
                    found += [account.in_flight, max(account.full_s, self.now_s)]
                    found += [max(account.input_bytes.full_s, self.now_s)] if account.input_bytes else []
            found += [use.in_flight, use.counters.admitted, use.counters.input_bytes]
        return found


@pytest.mark.parametrize("seed", range(4))
def test_a_meter_decides_and_counts_as_admission_does(seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("headrace_quotas.quotas_interceptor._PROMPT_REFUSALS", 10**9)  # none waits
    path, random = tmp_path / "quotas.json", Random(seed)
    path.write_text(json.dumps({"defaults": {**_LIMITS, "models": {"b": {**_LIMITS, "in_flight": 2}}}}))
    tested = [QuotasUnderTest(path, by_meters=False), QuotasUnderTest(path, by_meters=True)]
    reasons = set()
    for _ in range(400):
        if random.random() < 0.4 and tested[0].in_flight_ends:
            number = random.randrange(len(tested[0].in_flight_ends))
            for each in tested:
                each.in_flight_ends.pop(number)()
        request = random.choice("pq"), random.choice("ab"), random.choice((10, 100, 900))
        found = [each.ask(*request) for each in tested]
        assert found[0] == found[1]
        assert tested[0].state() == pytest.approx(tested[1].state())
        reasons.add(found[0].partition(" inferences")[0])
        for each in tested:
            each.now_s += 0.05
    assert tested[1].begins > 50
    assert len(reasons) > 3
    for each in tested:
        while each.in_flight_ends:
            each.in_flight_ends.pop()()
        assert in_flight(each.quotas) == 0


def test_take_back_undoes_begin(tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    path.write_text(json.dumps({"defaults": {**_LIMITS, "models": {"*": _LIMITS}}}))
    tested = QuotasUnderTest(path, by_meters=True)
    tested.ask("p", "m", 10)
    tested.ask("p", "m", 20)
    before = tested.state()
    meter = tested.quotas.table.uses["p", "m"]
    for _ in range(5):
        assert meter.begin(VIEW, 30)
        assert tested.state() != before
        meter.take_back(30)
        assert tested.state() == pytest.approx(before)


def test_a_version_that_is_new_or_has_tokens_goes_through_admission(tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    path.write_text(json.dumps({"sharing": {"*": {}}}))
    tested = QuotasUnderTest(path, by_meters=False)
    tested.ask("p", "m", 10)
    use, view = tested.quotas.table.uses["p", "m"], FakeView()
    for is_known, has_tokens in ((False, False), (True, True)):
        if is_known:
            use.gate.observe(view, has_tokens)  # type: ignore[arg-type]
        assert not use.begin(view, 10)  # type: ignore[arg-type]
    use.gate.observe(view, False)  # type: ignore[arg-type]
    assert use.begin(view, 10)  # type: ignore[arg-type]
    assert not use.begin(VIEW, 10)
    use.gate.recompute()  # until the next request
    assert not use.begin(view, 10)  # type: ignore[arg-type]


class FakeView:
    """A version with room for one request."""

    version, max_batch_size = 1, 0

    occupancy = SimpleNamespace(last_ns=10_000_000)

    def capacity(self) -> int:
        return 1


def test_a_full_gate_passes_the_request_to_admission(tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    path.write_text(json.dumps({"sharing": {"*": {"in_flight": 2}}}))
    tested = QuotasUnderTest(path, by_meters=True)
    for principal in "pq":
        tested.ask(principal, "m", 10)
        tested.in_flight_ends.pop()()
    uses = [tested.quotas.table.uses[principal, "m"] for principal in "pq"]
    uses[0].gate.metered_view = VIEW
    assert [use.begin(VIEW, 1) for use in (*uses, *uses)] == [True, True, False, False]
    assert uses[0].finish > 0  # others use the model: each request has its cost
    assert in_flight(tested.quotas) == 2
    uses[0].end()
    assert uses[1].begin(VIEW, 1)


# ---------------------------------------------------------------------- over sockets


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("metered")
    (folder / "models/m/1").mkdir(parents=True)
    (folder / "models/m/config.pbtxt").write_text(CONFIG + "response_cache { enable: true }")
    rule = [{"models": ["*"], "operations": ["inference"]}]
    keys = make(folder / "access.json", few=rule, many=rule)
    quotas = {"principals": {"few": {"requests_per_second": 0.001}}, "sharing": {"*": {}}}
    (folder / "quotas.json").write_text(json.dumps(quotas))
    options: list[Any] = [AccessOptions(keys=str(folder / "access.json"))]
    options += [QuotaOptions(file=str(folder / "quotas.json"))]
    cache = {"local": {"size": "1048576"}}
    with serve(folder / "models", listen=True, plugin_options=options, cache_config=cache) as server:
        yield server, keys


def test_inferences_pass_without_admission_and_end(
    serving: tuple[Any, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, keys = serving
    admitted: list[str] = []
    admit = Quotas.admit

    def note(quotas: Quotas, caller: Caller, *arguments: Any) -> Any:
        admitted.append(caller.transport)
        return admit(quotas, caller, *arguments)

    monkeypatch.setattr(Quotas, "admit", note)
    quotas = next(each for each in server.engine.admission.interceptors if isinstance(each, Quotas))
    ports = {each.protocol or each.name: each.port for each in server.frontends}
    url = f"http://127.0.0.1:{ports['http']}/v2/models/m/infer"
    headers = {"authorization": f"Bearer {keys['many']}"}
    tensor = grpc_client.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with (
        httpx.Client(headers=headers) as http,
        grpc_client.InferenceServerClient(f"127.0.0.1:{ports['grpc']}") as client,
    ):
        for _ in range(5):
            assert http.post(url, json=BODY).json()["outputs"][0]["data"] == [1]
            assert client.infer("m", [tensor], headers=headers).as_numpy("y").tolist() == [[1]]
        assert len(admitted) < 4, admitted  # the first one; the gate settles once per second, or sooner at first
        before, counters = len(admitted), quotas.table.uses["many", "m"].counters
        counted = counters.admitted
        assert counted == 10
        for content in (b"{", b'{"inputs": []}', json.dumps(BODY | {"outputs": [{"name": "no"}]}).encode()):
            refused = http.post(url, content=content)
            assert refused.status_code >= 400
            assert "failed inside" not in refused.text
        with pytest.raises(InferenceServerException):
            client.infer("m", [tensor], headers=headers, outputs=[grpc_client.InferRequestedOutput("no")])
        assert counters.admitted == counted + 4  # each once
        assert len(admitted) - before <= 3
        assert in_flight(quotas) == 0
        few = {"authorization": f"Bearer {keys['few']}"}
        assert http.post(url, json=BODY, headers=few).status_code == 200
        for _ in range(2):
            refused = http.post(url, json=BODY, headers=few)
            assert refused.status_code == 429
            assert 900 < int(refused.headers["retry-after"]) <= 1000
        with pytest.raises(InferenceServerException, match="RESOURCE_EXHAUSTED"):
            client.infer("m", [tensor], headers=few)
        assert in_flight(quotas) == 0
