"""The queries of the Grafana dashboard and the alerts, in a real Prometheus that reads a real server."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.http
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from tests.deploy.conftest import debian_program

if TYPE_CHECKING:
    from tests.conftest import Headrace

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/headrace.json").read_text(encoding="utf-8"))
RULES = [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
#: Metrics that need a GPU.
NEEDS_GPU = "nv_gpu_"
#: Grafana's variables, as it would replace them.
VARIABLES = {"$__rate_interval": "1m", "$job": ".+", "$instance": ".+", "$model": ".+"}
CONFIG = """
backend: "identity" max_batch_size: 8 %s
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "x" data_type: TYPE_FP32 dims: 1 }
"""
IN_THREAD = 'parameters { key: "isolation" value { string_value: "thread" } }'
#: A model with the metrics of those that generate text.
TEXT = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        kinds = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.HISTOGRAM
        self.kept = []
        for kind, names in zip(kinds, ("input_tokens output_tokens", "streams cache_usage_ratio",
                                       "queue_time_ms time_to_first_token_ms time_between_tokens_ms")):
            for name in names.split():
                family = pb_utils.MetricFamily("nv_llm_" + name, "", kind)
                more = {"buckets": [1, 10]} if kind == pb_utils.MetricFamily.HISTOGRAM else {}
                self.kept += [family, family.Metric({"model": "text", "version": "1"}, **more)]
"""
PROMETHEUS = """
global: {scrape_interval: 200ms, evaluation_interval: 200ms}
rule_files: [%s]
scrape_configs:
  - {job_name: headrace, static_configs: [{targets: ["127.0.0.1:%d"]}]}
  - {job_name: native, static_configs: [{targets: ["127.0.0.1:%d"]}]}
"""


def query(port: int, expression: str) -> Any:
    """Return the result of ``expression`` from the Prometheus at ``port``."""
    words = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{words}", timeout=20) as reply:
        return json.load(reply)["data"]["result"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for name, config in (("plain", ""), ("cached", "response_cache { enable: true }")):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(CONFIG % config)
    (models / "text/1").mkdir(parents=True)
    (models / "text/1/model.py").write_text(TEXT)
    (models / "text/config.pbtxt").write_text(CONFIG.replace("identity", "python") % IN_THREAD)
    return models


@pytest.fixture(scope="module")
def server(keep_serving: Callable[..., Headrace], models: Path) -> Headrace:
    return keep_serving(f"--model-repository={models}", "--cache-config=local,size=1048576")


@pytest.fixture(scope="module")
def native(keep_serving: Callable[..., Headrace], models: Path) -> Headrace:
    """Return a server with native histograms, which has answered requests."""
    server = keep_serving(f"--model-repository={models}", "--metrics-config=native_histograms=true")
    x = tritonclient.http.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        for _ in range(50):
            client.infer("plain", [x])
    return server


@pytest.fixture(scope="module")
def prometheus(server: Headrace, native: Headrace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Return the port of a Prometheus that has read the metrics under load, twice at least."""
    folder = tmp_path_factory.mktemp("prometheus")
    ports = [each.ports["Metrics Service"] for each in (server, native)]
    (folder / "prometheus.yml").write_text(PROMETHEUS % (ALERTS, *ports))
    command = [
        debian_program("prometheus", "prometheus"),
        f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0", "--enable-feature=native-histograms",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next((line for line in process.stderr if "Listening on" in line), "address=none:0")
            rest = threading.Thread(target=process.stderr.read)  # otherwise the pipe of its log becomes full
            rest.start()
            port = int(line.rpartition(":")[2])
            ask_until_read(server, port)
            yield port
        finally:
            process.terminate()
    rest.join()


def ask_until_read(server: Headrace, port: int) -> None:
    """Send good and bad requests until Prometheus has a rate of both, for 30 s at most."""
    read = 'rate(nv_inference_count{model="cached"}[1m]) > 0 and rate(nv_cache_num_hits_per_model[1m]) > 0'
    x = tritonclient.http.InferInput("x", [1, 1], "FP32")
    ends = time.monotonic() + 30
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        number = 0.0
        while time.monotonic() < ends:
            number += 1
            for model in ("plain", "cached"):
                x.set_data_from_numpy(np.full((1, 1), number // 4, np.float32))
                client.infer(model, [x])
            with pytest.raises(InferenceServerException):
                client.infer("plain", [tritonclient.http.InferInput("y", [1, 1], "FP32")])
            try:
                if number % 20 == 0 and query(port, read):
                    return
            except OSError:  # it does not listen yet
                continue
    raise AssertionError("Prometheus has read nothing")


def test_promtool_accepts_the_alerts() -> None:
    checked = subprocess.run(
        [debian_program("prometheus", "promtool"), "check", "rules", str(ALERTS)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(RULES)} rules found" in checked.stdout


#: For each alert, 30 min of values at its limit and 30 min beyond it, one every 15 s.
LIMITS: dict[str, Sequence[tuple[str, str, str]]] = {
    "HeadraceDown": [("up{%s}", "1x60 0x2 1x60", "1x60 0x60")],
    "HeadraceRequestsFail": [
        ("nv_inference_request_success{%s}", "0+990x120", "0+980x120"),
        ('nv_inference_request_failure{%s,reason="CANCELED"}', "0+500x120", "0+500x120"),
        ('nv_inference_request_failure{%s,reason="REJECTED"}', "0x120", "0+10x120"),
        ('nv_inference_request_failure{%s,reason="BACKEND"}', "0+10x120", "0+10x120"),
    ],
    "HeadraceRequestsWait": [
        ('nv_inference_queue_histogram_us_bucket{%s,le="524288"}', "0+980x120", "0+100x120"),
        ('nv_inference_queue_histogram_us_bucket{%s,le="1048576"}', "0+1000x120", "0+980x120"),
        ('nv_inference_queue_histogram_us_bucket{%s,le="2097152"}', "0+1000x120", "0+1000x120"),
        ('nv_inference_queue_histogram_us_bucket{%s,le="+Inf"}', "0+1000x120", "0+1000x120"),
    ],
    "HeadraceInstanceRestarts": [("nv_model_instance_restart_count{%s}", "5x60 6x10 7x50", "5x60 6x10 7x10 8x40")],
    "HeadraceMemory": [
        ("nv_cpu_memory_used_bytes{%s}", "95x120", "96x120"),
        ("nv_cpu_memory_total_bytes{%s}", "100x120", "100x120"),
    ],
    "HeadraceGpuMemory": [
        ("nv_gpu_memory_used_bytes{%s}", "97x120", "98x120"),
        ("nv_gpu_memory_total_bytes{%s}", "100x120", "100x120"),
    ],
    "HeadraceCacheFails": [("nv_cache_num_failures_per_model{%s}", "7x120", "0+1x120")],
    "HeadraceLogLinesLost": [("headrace_log_lines_lost{%s}", "3x120", "3x100 4x20")],
}


def test_each_alert_fires_beyond_its_limit_and_not_at_it(tmp_path: Path) -> None:
    """The alerts are computed between two readings, where Prometheus extrapolates the increase of a counter."""
    assert LIMITS.keys() == {rule["alert"] for rule in RULES}
    series = [
        {"series": name % f'job="headrace",instance="{instance}",model="m"', "values": values}
        for names in LIMITS.values()
        for name, on, beyond in names
        for instance, values in (("on", on), ("beyond", beyond))
    ]
    query = {
        "expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})',
        "eval_time": "28m50s",
        "exp_samples": [{"labels": f'{{alertname="{alert}",instance="beyond"}}', "value": 1} for alert in LIMITS],
    }
    case = {"interval": "15s", "input_series": series, "promql_expr_test": [query]}
    tests = {"rule_files": [str(ALERTS)], "evaluation_interval": "10s", "tests": [case]}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    checked = subprocess.run(
        [debian_program("prometheus", "promtool"), "test", "rules", str(tmp_path / "tests.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("title", "expression"),
    [
        pytest.param(panel["title"], target["expr"], id=f"{panel['title']} {target['refId']}")
        for panel in PANELS
        for target in panel["targets"]
    ],
)
def test_a_panel_shows_what_the_server_exports(prometheus: int, title: str, expression: str) -> None:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, "Grafana has no such variable"
    found = query(prometheus, expression)
    assert bool(found) is (NEEDS_GPU not in expression), f"'{title}' is empty"


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_reads_what_the_server_exports(prometheus: int, rule: dict[str, Any]) -> None:
    """Each alert has a value without its threshold."""
    measured = re.sub(r"\s(==|>)\s[\d.e]+\s*$", "", rule["expr"])
    assert measured != rule["expr"], "an alert has a threshold"
    assert bool(query(prometheus, measured)) is (NEEDS_GPU not in measured)


def test_a_healthy_server_fires_no_alert(prometheus: int) -> None:
    """Half of the requests of `plain` have a wrong input and do not count."""
    assert {found["metric"]["alertname"] for found in query(prometheus, "ALERTS")} <= {"HeadraceRequestsFail"}


def test_panels_do_not_overlap_and_have_distinct_ids_and_titles() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["description"], panel["title"]
    for one, other in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


def test_the_page_explains_each_alert() -> None:
    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(Headrace\w+)`", page)) == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("name", ["nv_inference_request_histogram_us", "nv_inference_batch_size_histogram"])
def test_a_native_histogram_equals_the_text_format(prometheus: int, native: Headrace, name: str) -> None:
    """Prometheus reads protobuf here: the same counts, in one series with the buckets that are in use."""
    with urllib.request.urlopen(f"http://127.0.0.1:{native.ports['Metrics Service']}/metrics", timeout=20) as reply:
        families = {each.name: each for each in text_string_to_metric_families(reply.read().decode())}
    samples = [each for each in families[name].samples if each.labels["model"] == "plain"]
    total = {each.name.removeprefix(name): each.value for each in samples if "le" not in each.labels}
    below = {float(each.labels["le"]): each.value for each in samples if "le" in each.labels}
    [found] = query(prometheus, f'{name}{{job="native",model="plain"}}')
    read = found["histogram"][1]
    assert (float(read["count"]), float(read["sum"])) == (total["_count"], total["_sum"])
    assert total["_count"] == 50
    used = [(float(upper), float(count)) for _, _, upper, count in read["buckets"]]
    bounds = sorted(below)
    assert used == [
        (bound, below[bound] - lower)
        for bound, lower in zip(bounds, [0, *map(below.__getitem__, bounds)], strict=False)
        if below[bound] > lower
    ]
    assert not query(prometheus, f'{name}_bucket{{job="native"}}')
    assert query(prometheus, 'nv_inference_count{job="native",model="plain"}')[0]["value"][1] == "50"
    [quantile] = query(prometheus, f'histogram_quantile(0.5, {name}{{job="native",model="plain"}})')
    assert max(bounds[0] / 2, used[0][0] / 2) <= float(quantile["value"][1]) <= used[-1][0]


def test_without_the_setting_the_same_prometheus_reads_buckets(prometheus: int) -> None:
    assert query(prometheus, 'nv_inference_request_histogram_us_bucket{job="headrace",le="1024"}')
    assert not query(prometheus, 'nv_inference_request_histogram_us{job="headrace"}')
