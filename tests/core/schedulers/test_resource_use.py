"""The report of a server about the resources that its models share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace import Server
from headrace.config.option_parts import RateLimitResource
from headrace_http import text_format
from headrace_testing.serving import on_loop
from tests.core.conftest import GATED, Gated, WriteModel

#: Ends only what hangs.
HANGING_S = 90
X = {"x": np.ones((1, 2), np.float32)}
NAME = "headrace_rate_limiter"


def limited(units: int) -> str:
    return f"""{GATED} instance_group {{ kind: KIND_CPU rate_limiter {{ resources [
        {{ name: "memory" count: {units} }}, {{ name: "license" global: true count: 1 }} ] }} }}"""


def test_explain_and_the_metrics_page_show_used_and_awaited_resources(
    make_server: Callable[..., Server], write_model: WriteModel, gated: type[Gated]
) -> None:
    write_model("one", limited(2))
    write_model("two", limited(3))
    write_model("free", GATED)
    gated.gate.clear()
    resources = (RateLimitResource("memory", 4), RateLimitResource("license", 1))

    async def scene(server: Server) -> tuple[dict[str, Any], str]:
        """Return the report while ``one`` runs and ``two`` waits."""
        inferences = []
        try:
            for name, state in (("one", "used_by"), ("two", "wanted_by")):
                inferences.append(asyncio.ensure_future(server.infer_async(name, X)))
                while not server.explain(name)["resources"][0][state]:
                    await asyncio.sleep(0)
            return server.explain("two"), text_format.text(server.engine.collect())
        finally:
            gated.gate.set()
            await asyncio.gather(*inferences)

    with make_server(rate_limit="execution_count", rate_limit_resource=resources) as server:
        document, page = on_loop(server, asyncio.wait_for(scene(server), HANGING_S))
        after, unlimited = server.explain("two"), server.explain("free")
    used_by, wanted = {"one_0_0": 2}, {"two_0_0": 3}
    assert document["resources"] == [
        {
            "resource": "license",
            "device": None,
            "units": 1,
            "in_use": 1,
            "used_by": dict.fromkeys(used_by, 1),
            "wanted_by": dict.fromkeys(wanted, 1),
        },
        {"resource": "memory", "device": 0, "units": 4, "in_use": 2, "used_by": used_by, "wanted_by": wanted},
    ]
    assert {line for line in page.splitlines() if line.startswith(NAME)} == {
        f'{NAME}_units{{resource="license"}} 1',
        f'{NAME}_units{{device="0",resource="memory"}} 4',
        f'{NAME}_units_in_use{{resource="license"}} 1',
        f'{NAME}_units_in_use{{device="0",resource="memory"}} 2',
        f'{NAME}_waiting_executions{{resource="license"}} 1',
        f'{NAME}_waiting_executions{{device="0",resource="memory"}} 1',
    }
    assert [each["in_use"] for each in after["resources"]] == [0, 0]
    assert after["reasons"] == {"resources": 1}
    assert unlimited["resources"] == []
