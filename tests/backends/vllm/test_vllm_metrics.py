"""The metrics that take the place of prometheus-client's, in a server; `test_with_engine` has vLLM's own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from headrace import Backend, Instance, Model, Server, Services, Tensors
from headrace.registry import PluginInfo
from headrace_vllm.vllm_metrics import ServerMetric, ServerMetrics


class Measuring(Backend):
    name = "measuring"

    def load(self, model: Model) -> Measured:
        assert model.services is not None
        return Measured(model.services)


class Measured(Instance):
    def __init__(self, services: Services) -> None:
        made = self.made = ServerMetrics(services, {"model": "m", "version": "1"})
        names = ["model_name", "engine"]
        running = ServerMetric(
            made, "gauge", name="vllm:running", documentation="d", labelnames=names, multiprocess_mode="mostrecent"
        )
        running.labels("n", 0).set(3)
        tokens = ServerMetric(made, "counter", name="vllm:tokens", documentation="d", labelnames=["engine"])
        for value in (2, 0, 1.5):
            tokens.labels(engine="0").inc(value)
        ServerMetric(made, "counter", "vllm:done_total").inc()
        seconds = ServerMetric(
            made, "histogram", name="vllm:s", documentation="d", labelnames=["engine"], buckets=[1, 2]
        )
        seconds.labels(0).observe(1.5)
        adapters = ServerMetric(made, "gauge", name="vllm:adapters", documentation="d", labelnames=["running"])
        adapters.labels(running="a,b").set_to_current_time()
        assert adapters.labels(running="a,b") is adapters.labels("a,b")  # asked for at each step

    def execute(self, inputs: Tensors) -> Tensors:
        return inputs

    def close(self) -> None:
        self.made.release()


def test_names_labels_and_bounds_are_those_of_vllms_own_page(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    io = 'name: "x" data_type: TYPE_FP32 dims: [ 1 ]'
    (tmp_path / "m" / "config.pbtxt").write_text(
        f'backend: "measuring"\ninput {{ {io} }}\noutput {{ {io} }}\ninstance_group {{ kind: KIND_CPU }}'
    )
    server = Server(tmp_path, plugins=())
    server.plugins.backends.add(Measuring, PluginInfo("measuring", "tests", "0"))

    async def read() -> dict[tuple[Any, ...], float]:
        async with server:
            return {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in server.engine.collect()
                for sample in family.samples
                if sample.name.startswith("vllm:")
            }

    ours = (("model", "m"), ("version", "1"))
    engine = ("engine", "0")
    found = asyncio.run(read())
    noted = found.pop(("vllm:adapters", ("model", "m"), ("running", "a,b"), ("version", "1")))
    assert time.time() - 60 < noted < time.time()
    assert found == {
        ("vllm:running", engine, ("model", "m"), ("model_name", "n"), ("version", "1")): 3,
        ("vllm:tokens_total", engine, *ours): 3.5,
        ("vllm:done_total", *ours): 1,
        ("vllm:s_count", engine, *ours): 1,
        ("vllm:s_sum", engine, *ours): 1.5,
        ("vllm:s_bucket", engine, ("le", "1"), *ours): 0,
        ("vllm:s_bucket", engine, ("le", "2"), *ours): 1,
        ("vllm:s_bucket", engine, ("le", "+Inf"), *ours): 1,
    }
