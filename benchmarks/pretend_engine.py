"""An engine that computes nothing and writes a token to each of its streams at a fixed rate: a plugin.

`token_overhead.py` uses it to measure the cost of a token beyond its engine. Parameter ``step_ms`` of the model: the
time between two tokens of a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace import Backend, Model, hookimpl
from headrace_llm import Delta, GenerationInstance, GenerationRequest, TokenStream, complete_generation

_CONFIG = """backend: "pretend" parameters { key: "step_ms" value { string_value: "%s" } }
parameters { key: "isolation" value { string_value: "%s" } }
"""


@dataclass(frozen=True, slots=True)
class Parameters:
    step_ms: float = 10.0  #: the time between two tokens of a stream


class Pretend(Backend):
    name = "pretend"

    Parameters = Parameters

    def complete_config(self, model: Model) -> None:
        complete_generation(model.config, "messages", "tools", "tool_choice", "image")

    def load(self, model: Model) -> Steps:
        return Steps(model)


class Steps(GenerationInstance):
    """Runs one step after the other on one thread, like continuous batching."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, most_streams=4096)
        self._step_s = model.parameters.step_ms / 1000
        self._running: dict[TokenStream, int] = {}
        self._ends = threading.Event()
        self._engine = threading.Thread(target=self._run, daemon=True)
        self._engine.start()

    def begin(self, request: GenerationRequest, stream: TokenStream) -> None:
        self._running[stream] = request.max_tokens or 0

    def close(self) -> None:
        self._ends.set()
        self._engine.join()
        super().close()

    def _run(self) -> None:
        while not self._ends.wait(self._step_s):
            for stream in tuple(self._running):
                self._running[stream] = left = self._running[stream] - 1
                reason = "" if left > 0 else "length"
                delta = Delta(" word", 1, [left], num_input_tokens=2, finish_reason=reason)
                if not stream.write(delta) or reason:
                    del self._running[stream]


def install(folder: Path) -> None:
    """Make this module a distribution in ``folder``, which the caller puts on the path of the server."""
    information = folder / "headrace_pretend-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-pretend\nVersion: 0.1.0\n")
    (information / "entry_points.txt").write_text("[headrace]\npretend = pretend_engine\n")
    (folder / "pretend_engine.py").write_text(Path(__file__).read_text())


def repository(folder: Path, steps_ms: Sequence[float], isolations: Sequence[str] = ("thread", "process")) -> Path:
    """Write a model ``<isolation>-<step in ms>`` for each pair, and return the repository."""
    for isolation in isolations:
        for step_ms in steps_ms:
            model = folder / "models" / f"{isolation}-{step_ms:g}"
            (model / "1").mkdir(parents=True)
            (model / "config.pbtxt").write_text(_CONFIG % (step_ms, isolation))
    return folder / "models"


@hookimpl
def register_backends() -> list[type[Backend]]:
    return [Pretend]
