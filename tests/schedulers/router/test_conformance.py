"""The router under the conformance kits of schedulers and of extensions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from headrace_testing import ExtensionConformance, SchedulerConformance, ServedExtension
from headrace_testing.serving import on_loop

from .conftest import router, write


class TestRouter(SchedulerConformance):
    plugin, scheduler = "headrace_router", "router"
    config = router("one = 3, two = 1")
    others = ("one", "two")
    mistakes: ClassVar = {
        'parameters { key: "scheduler.targets" value { string_value: "one = 0" } }': "parameters['scheduler.targets']",
        'parameters { key: "scheduler.sticky" value { string_value: "user" } }': "parameters['scheduler.sticky']",
        'parameters { key: "scheduler.rules" value { string_value: "user" } }': "parameters['scheduler.rules']",
    }


class TestTraffic(ExtensionConformance):
    plugin, extension = "headrace_router", "traffic"

    def ask(self, served: ServedExtension) -> None:
        (repository,) = served.server.options.model_repository
        if not (Path(repository) / "r").exists():
            write(Path(repository), "r", router("doubles = 1"))
            on_loop(served.server, served.server.load("r"))
        path = "/v2/models/r/traffic"
        for weight in (3, 1):
            status, _, body = served.http("PUT", path, json.dumps({"weights": {"doubles": weight}}).encode())
            assert (status, json.loads(body)["targets"][0]["weight"]) == (200, weight)
        assert served.http("GET", path)[::2] == (status, body)
        assert served.http("GET", "/v2/models/doubles/traffic")[0] == 404
