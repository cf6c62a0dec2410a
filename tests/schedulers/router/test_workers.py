"""A router in several server processes: weights and rollbacks reach all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import wait_until
from tests.e2e.lines import Line, Lines

from .conftest import router, write

if TYPE_CHECKING:
    from tests.conftest import Headrace

PATH = "/v2/models/r/traffic"
DELAYED = 'parameters { key: "execute_delay_ms" value { string_value: "100" } }'
MODEL = """backend: "identity" max_batch_size: 0 input { name: "IN" data_type: TYPE_FP32 dims: [1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [1] } """


def weights(line: Line) -> list[float]:
    return [target["weight"] for target in line.get(PATH)[1]["targets"]]


def change(line: Line, **weights: float) -> dict[str, Any]:
    line.http.request("PUT", PATH, json.dumps({"weights": weights}))
    found: dict[str, Any] = json.loads(line.http.getresponse().read())
    return found


def test_a_change_and_a_rollback_reach_all_workers(serve: Callable[..., Headrace], tmp_path: Path) -> None:
    write(tmp_path, "fast", MODEL)
    write(tmp_path, "slow", MODEL + DELAYED)
    write(tmp_path, "r", router("fast = 1, slow = 1", max_p99_ratio=2, min_requests=5, window_s=10))
    server = serve(f"--model-repository={tmp_path}", "--workers=2")
    server.wait_for_line("2 workers serve")
    with contextlib.closing(Lines(server, "worker")) as lines:
        first, second = lines.one_each()
        assert change(first, fast=3, slow=2)["targets"][0]["weight"] == 3
        assert weights(second) == [3, 2]
        assert "all weights are 0" in change(second, fast=0, slow=0)["error"]
        assert weights(first) == [3, 2]
        os.kill(first.owner, signal.SIGKILL)
        server.wait_for_line("worker 0 has been restarted")
        first, second = lines.one_each()
        assert weights(first) == [3, 2], "a worker that is started later has the change"

        def is_rolled_back() -> bool:
            second.ask("r")
            assert second.answer() == [1.5]
            return weights(second) == [5, 0]

        wait_until(is_rolled_back, "the slow target is rolled back")
        wait_until(lambda: weights(first) == [5, 0], "the rollback reaches the other worker")
        assert first.get(PATH)[1]["targets"][1]["rolled_back"] == second.get(PATH)[1]["targets"][1]["rolled_back"]
        server.wait_for_line("rolls back target 'slow'")
        assert sum("rolls back target 'slow'" in line for line in server.lines) == 1
